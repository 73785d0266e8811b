"""Shares against brute force, against the plain greedy, and against numbers worked out by hand."""

import heapq
import itertools
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_hetero.batching.shares import WORTH_LEAVING, Cost, bound, makespan, split, too_slow
from lightning_hetero.errors import ConfigurationError, HeteroError, ShareError

# The cluster of the design, in seconds: one fixed cost, two fast ranks, one at half speed, one at a quarter.
ISSUE = [Cost(0.010, k) for k in (0.002, 0.002, 0.004, 0.008)]

# Multiples of 1/8 are exact in binary, so that ties are real ties; the others are not.
exact = st.builds(Cost, st.integers(0, 40).map(lambda i: i / 8), st.integers(1, 40).map(lambda i: i / 8))
rough = st.builds(Cost, st.floats(-1, 10), st.floats(1e-3, 10))
cost_lists = st.lists(exact, min_size=1, max_size=4) | st.lists(rough, min_size=1, max_size=4)


@st.composite
def limited(draw, most_total=12):
    """Feasible instances: costs, total, and limits per rank."""
    costs = draw(cost_lists)
    total = draw(st.integers(0, most_total))
    low = [draw(st.integers(0, 3)) for _ in costs]
    high = [lo + draw(st.integers(0, most_total)) for lo in low]
    if not sum(low) <= total <= sum(high):
        low, high = [0] * len(costs), [total] * len(costs)
    return costs, total, low, high


def every_split(total, low, high):
    """All ways to split ``total`` within the limits."""
    ranges = (range(lo, min(h, total) + 1) for lo, h in zip(low, high, strict=True))
    return (shares for shares in itertools.product(*ranges) if sum(shares) == total)


def one_at_a_time(total, costs, low, high):
    """The textbook greedy: give each sample to the rank that would finish it first, the lower rank on a tie."""
    shares = list(low)
    queue = [(c.seconds(n + 1), i) for i, (c, n) in enumerate(zip(costs, shares, strict=True)) if n < high[i]]
    heapq.heapify(queue)
    for _ in range(total - sum(low)):
        _, i = heapq.heappop(queue)
        shares[i] += 1
        if shares[i] < high[i]:
            heapq.heappush(queue, (costs[i].seconds(shares[i] + 1), i))
    return shares


def largest_remainder(total, weights):
    """Proportional shares, rounded the usual way."""
    exact_shares = [total * w / sum(weights) for w in weights]
    shares = [math.floor(s) for s in exact_shares]
    by_remainder = sorted(range(len(weights)), key=lambda i: (shares[i] - exact_shares[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


@given(limited())
@settings(max_examples=300, deadline=None)
def test_no_other_split_is_faster(instance):
    costs, total, low, high = instance
    shares = split(total, costs, low, high)
    assert sum(shares) == total
    assert all(lo <= n <= h for lo, n, h in zip(low, shares, high, strict=True))
    assert makespan(shares, costs) == min(makespan(other, costs) for other in every_split(total, low, high))


@given(
    st.lists(exact, min_size=1, max_size=8) | st.lists(rough, min_size=1, max_size=8),
    st.integers(0, 4000),
    st.data(),
)
@settings(max_examples=120, deadline=None)
def test_the_shortcut_gives_exactly_what_one_sample_at_a_time_gives(costs, total, data):
    even = total // len(costs)
    low = [data.draw(st.integers(0, even)) for _ in costs]
    high = [data.draw(st.integers(even + 1, total + 1)) for _ in costs]
    assert split(total, costs, low, high) == one_at_a_time(total, costs, low, high)


@given(limited(most_total=200))
@settings(max_examples=200, deadline=None)
def test_whole_samples_take_longer_than_the_bound_but_by_one_sample_at_most(instance):
    costs, total, low, high = instance
    slowest = makespan(split(total, costs, low, high), costs)
    assert bound(total, costs, low, high) <= slowest + 1e-12 * (1 + abs(slowest))
    free = makespan(split(total, costs), costs)  # no rank is later than that, or than its fixed cost
    latest = max(bound(total, costs) + max(c.per_sample for c in costs), *(c.fixed for c in costs), -math.inf)
    assert free <= latest + 1e-12 * abs(latest)


@given(cost_lists, st.integers(1, 10_000))
@settings(max_examples=200, deadline=None)
def test_at_the_bound_the_work_is_just_done(costs, total):
    deadline = bound(total, costs)
    done = sum(max(0.0, (deadline - c.fixed) / c.per_sample) for c in costs)
    assert done == pytest.approx(total, rel=1e-6, abs=1e-6)


def test_a_million_samples_take_no_million_steps():
    costs = [Cost(0.01 * i, 0.001 * (i + 1)) for i in range(64)]
    calls = []

    class Counted(Cost):
        def seconds(self, samples):
            calls.append(samples)
            return super().seconds(samples)

    shares = split(10**6, [Counted(*c) for c in costs])
    assert sum(shares) == 10**6
    assert len(calls) < 1000  # a few per rank
    assert makespan(shares, costs) - bound(10**6, costs) < 0.001 * 64


def test_the_cluster_of_the_issue():
    even = [16] * 4
    speeds = [n / cost.seconds(n) for n, cost in zip(even, ISSUE, strict=True)]  # as measured at the even split
    proportional = largest_remainder(64, speeds)
    assert makespan(even, ISSUE) == pytest.approx(0.138)
    assert proportional == [22, 22, 13, 7]
    assert makespan(proportional, ISSUE) == pytest.approx(0.066)
    assert split(64, ISSUE) == [24, 24, 11, 5]
    assert makespan(split(64, ISSUE), ISSUE) == pytest.approx(0.058)
    assert bound(64, ISSUE) == pytest.approx(0.01 + 64 / (500 + 500 + 250 + 125))  # 56.5 ms
    assert bound(64, ISSUE) == pytest.approx(0.0565, abs=5e-5)


@pytest.mark.parametrize(
    ("total", "costs", "low", "high", "shares"),
    [
        (6, [(0, 1), (0, 1), (0, 1)], None, None, [2, 2, 2]),
        (7, [(0, 1), (0, 1), (0, 1)], None, None, [3, 2, 2]),  # the odd one goes to the lowest rank
        (8, [(0, 1), (0, 1), (0, 1)], None, None, [3, 3, 2]),
        (3, [(0, 2), (0, 1)], None, None, [1, 2]),  # both would finish their next sample at 2
        (2, [(0, 2), (0, 1)], None, None, [1, 1]),  # a tie at 2 goes to rank 0 though rank 1 is faster
        (9, [(0, 1), (10, 1)], None, None, [9, 0]),  # not worth starting
        (5, [(0, 1), (0, 1)], [4, 0], None, [4, 1]),
        (5, [(0, 1), (0, 1)], None, [1, 9], [1, 4]),
        (5, [(0, 1), (0, 1)], [2, 3], [2, 3], [2, 3]),
        (0, [(1, 1), (2, 2)], None, None, [0, 0]),
        (4, [(3, 1)], None, None, [4]),
        (4, [(0, 1), (0, 100)], [0, 2], None, [2, 2]),
        (3, [(0, 1), (0, 1)], None, [10**9, 0], [3, 0]),
    ],
)
def test_shares_by_hand(total, costs, low, high, shares):
    assert split(total, [Cost(*c) for c in costs], low, high) == shares


def test_rounded_proportions_would_be_slower():
    costs = [Cost(0, 10), Cost(0, 10), Cost(0, 1)]
    rounded = largest_remainder(7, [1 / c.per_sample for c in costs])
    assert (rounded, makespan(rounded, costs)) == ([1, 0, 6], 10)
    assert (split(7, costs), makespan(split(7, costs), costs)) == ([0, 0, 7], 7)


@given(st.lists(exact, min_size=2, max_size=5), st.integers(1, 40))
@example([Cost(0, 1)] * 3, 7)
@settings(max_examples=100, deadline=None)
def test_equal_ranks_differ_by_one_at_most_and_the_lower_ones_take_more(costs, total):
    shares = split(total, [costs[0]] * len(costs))
    least, extra = divmod(total, len(costs))
    assert shares == [least + (i < extra) for i in range(len(costs))]


@pytest.mark.parametrize(
    ("total", "costs", "low", "high", "words"),
    [
        (8, [(0, 1), (math.nan, 1)], None, None, ["rank 1", "nan"]),
        (8, [(0, math.nan), (0, 1)], None, None, ["rank 0", "nan"]),
        (8, [(0, math.inf), (0, 1)], None, None, ["rank 0", "inf"]),
        (8, [(math.inf, 1), (0, 1)], None, None, ["rank 0", "inf"]),
        (8, [(0, 0.0), (0, 1)], None, None, ["rank 0", "0.0"]),
        (8, [(0, 1), (0, -0.25)], None, None, ["rank 1", "-0.25"]),
        (8, [(0, 1)] * 2, [5, 4], None, ["8 samples", "[5, 4]", "sum 9"]),
        (8, [(0, 1)] * 2, None, [3, 4], ["8 samples", "[3, 4]", "sum 7"]),
        (8, [(0, 1)] * 2, [5, 0], [4, 8], ["rank 0", "5", "4"]),
        (8, [(0, 1)] * 2, [0, -1], None, ["rank 1", "-1"]),
        (8, [(0, 1)] * 2, [9, 0], None, ["rank 0", "9", "8"]),  # more than there is
        (-1, [(0, 1)] * 2, None, None, ["-1"]),
        (8, [(0, 1)] * 2, [1], None, ["2 costs", "1 lower"]),
        (8, [(0, 1)] * 2, None, [8, 8, 8], ["2 costs", "3 upper"]),
    ],
)
def test_the_impossible_is_refused_with_its_values(total, costs, low, high, words):
    with pytest.raises(ShareError) as caught:
        split(total, [Cost(*c) for c in costs], low, high)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_error_can_be_caught_as_what_it_is():
    assert issubclass(ShareError, ConfigurationError)
    assert issubclass(ShareError, ValueError)
    assert issubclass(ShareError, HeteroError)
    with pytest.raises(ValueError, match="above 0"):
        split(1, [Cost(0, 0)])


def test_the_callers_limits_stay_as_they_are():
    low, high = [1, 1], [50, 60]
    split(9, [Cost(0, 1)] * 2, low, high)
    assert (low, high) == ([1, 1], [50, 60])


# -- ranks that are too slow ---------------------------------------------------------------------------------


def fastest(total, costs, low, high):
    """Seconds of the fastest split over some of the ranks, and the largest set of ranks that reaches them."""
    best, whose = math.inf, ()
    for count in range(len(costs), 0, -1):
        for ranks in itertools.combinations(range(len(costs)), count):
            own, least, most = ([values[rank] for rank in ranks] for values in (costs, low, high))
            for shares in every_split(total, least, most):
                if (seconds := makespan(shares, own)) < best:
                    best, whose = seconds, ranks
    return best, whose


@settings(max_examples=300)
@given(limited())
def test_without_ranks_that_are_too_slow_a_step_is_as_fast_as_without_any(instance):
    costs, total, low, high = instance
    low = [max(1, n) for n in low]
    high = [max(lo, h) for lo, h in zip(low, high, strict=True)]
    if total < 1 or not sum(low) <= total <= sum(high):
        assert too_slow(total, costs, low, high) is None
        return
    all_of_them = makespan(split(total, costs, low, high), costs)
    best, whose = fastest(total, costs, low, high)
    found = too_slow(total, costs, low, high)
    if found is None:
        assert best >= all_of_them - WORTH_LEAVING * abs(all_of_them) - 1e-9
    else:
        assert (found.step, found.without) == pytest.approx((all_of_them, best))
        assert set(found.ranks) == set(range(len(costs))) - set(whose)


def test_who_is_too_slow_by_hand():
    costs = [Cost(0.1, 0.01), Cost(0.1, 0.01), Cost(1.0, 0.1), Cost(1.0, 0.1)]
    found = too_slow(20, costs)
    assert (found.ranks, found.step, found.without) == ((2, 3), pytest.approx(1.1), pytest.approx(0.2))
    assert str(found).startswith("The job is faster without 2 ranks: 2, 3 (100 samples/s against 18.2).")
    assert too_slow(20, costs[:3]).ranks == (2,)
    assert "without rank 2 (100 samples/s against 18.2)" in str(too_slow(20, costs[:3]))
    assert too_slow(20, costs, high=[9, 9, 20, 20]) is None  # the others cannot take all samples
    assert too_slow(20, costs[:2]) is None
    assert too_slow(20, costs[:1]) is None
    # With a least share of two samples, as BatchNorm has it, the last rank is too slow; with one it is of use.
    assert too_slow(20, [Cost(0.0, 0.01), Cost(0.0, 0.15)]) is None
    assert too_slow(20, [Cost(0.0, 0.01), Cost(0.0, 0.15)], low=[2, 2]).ranks == (1,)


def test_a_gain_within_noise_is_not_named():
    costs = [Cost(0.0, 0.010), Cost(0.0, 0.010), Cost(0.11, 0.01)]  # 0.12 s with one sample of 20, 0.10 s without
    assert too_slow(20, costs, noise=[0.02] * 3).ranks == (2,)
    assert too_slow(20, costs, noise=[0.2] * 3) is None
    assert too_slow(20, [*costs[:2], Cost(0.092, 0.01)]) is None  # 2%
