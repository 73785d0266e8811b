"""Costs, lines and convex curves, and shares by them: against brute force, the plain greedy, and numbers by hand."""

import heapq
import itertools
import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.batching.plan import Plan
from lightning_hetero.batching.planner import Planner
from lightning_hetero.batching.reports import Report
from lightning_hetero.batching.shares import (
    MOST_BENDS,
    WORTH_LEAVING,
    Cost,
    Stepwise,
    bound,
    cost_of,
    curve_below,
    makespan,
    multiples,
    on_grid,
    row_of,
    split,
    too_slow,
)
from lightning_hetero.errors import ShareError

FLAT = Cost(0.064, 1e-9, ((16.0, 0.004),))  # flat up to 16 samples, then 4 ms each

# Multiples of 1/8 are exact in binary, so that ties are real ties; the others are not.
exact = st.builds(Cost, st.integers(0, 40).map(lambda i: i / 8), st.integers(1, 40).map(lambda i: i / 8), st.just(()))
rough = st.builds(Cost, st.floats(-1, 10), st.floats(1e-3, 10), st.just(()))
bends = st.lists(st.tuples(st.integers(1, 40).map(float), st.integers(1, 40).map(lambda i: i / 8)), max_size=3).map(
    lambda pairs: tuple(sorted({at: (at, more) for at, more in pairs}.values()))
)
curves = st.builds(Cost, st.integers(0, 40).map(lambda i: i / 8), st.integers(1, 40).map(lambda i: i / 8), bends)
lines = st.lists(exact, min_size=1, max_size=4) | st.lists(rough, min_size=1, max_size=4)
in_passes = st.builds(Stepwise, exact | curves, st.integers(1, 5))
cost_lists = lines | st.lists(rough | curves, min_size=1, max_size=4) | st.lists(in_passes, min_size=1, max_size=4)


@st.composite
def limited(draw, most_total=12, kinds=cost_lists):
    """Feasible instances: costs, total, and limits per rank."""
    costs = draw(kinds)
    total = draw(st.integers(0, most_total))
    low = [draw(st.integers(0, 3)) for _ in costs]
    high = [lo + draw(st.integers(0, most_total)) for lo in low]
    if not sum(low) <= total <= sum(high):
        low, high = [0] * len(costs), [total] * len(costs)
    return costs, total, low, high


def every_split(total, low, high):
    """All splits of ``total`` within the limits."""
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


@given(limited())
@settings(max_examples=300, deadline=None)
def test_no_other_split_is_faster(instance):
    costs, total, low, high = instance
    shares = split(total, costs, low, high)
    assert sum(shares) == total
    assert all(lo <= n <= h for lo, n, h in zip(low, shares, high, strict=True))
    assert makespan(shares, costs) == min(makespan(other, costs) for other in every_split(total, low, high))


@given(
    st.lists(exact, min_size=1, max_size=8) | st.lists(rough | curves | in_passes, min_size=1, max_size=8),
    st.integers(0, 4000),
    st.data(),
)
@settings(max_examples=120, deadline=None)
def test_the_shortcut_gives_exactly_what_one_sample_at_a_time_gives(costs, total, data):
    even = total // len(costs)
    low = [data.draw(st.integers(0, even)) for _ in costs]
    high = [data.draw(st.integers(even + 1, total + 1)) for _ in costs]
    shares = split(total, costs, low, high)
    assert shares == one_at_a_time(total, costs, low, high)
    assert bound(total, costs, low, high) <= makespan(shares, costs) * (1 + 1e-12) + 1e-12


@given(limited(most_total=200, kinds=lines))
@settings(max_examples=200, deadline=None)
def test_whole_samples_take_longer_than_the_bound_but_by_one_sample_at_most(instance):
    costs, total, low, high = instance
    slowest = makespan(split(total, costs, low, high), costs)
    assert bound(total, costs, low, high) <= slowest + 1e-12 * (1 + abs(slowest))
    free = makespan(split(total, costs), costs)  # no rank is later than that, or than its fixed cost
    latest = max(bound(total, costs) + max(c.per_sample for c in costs), *(c.fixed for c in costs), -math.inf)
    assert free <= latest + 1e-12 * abs(latest)


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


@pytest.mark.parametrize(
    ("total", "costs", "low", "high", "shares"),
    [
        (64, [(0.010, k) for k in (0.002, 0.002, 0.004, 0.008)], None, None, [24, 24, 11, 5]),  # all take 58 ms or less
        (7, [(0, 10), (0, 10), (0, 1)], None, None, [0, 0, 7]),  # the rounded proportions 1, 0, 6 would be slower
        (32, [FLAT, (0.010, 0.004)], None, None, [17, 15]),  # 68 and 70 ms: a flat device is filled first
        (24, [FLAT, (0.010, 0.007)], None, None, [16, 8]),  # 64 and 66 ms
        (6, [(0, 1), (0, 1), (0, 1)], None, None, [2, 2, 2]),
        (7, [(0, 1), (0, 1), (0, 1)], None, None, [3, 2, 2]),  # the odd one goes to the lowest rank
        (8, [(0, 1), (0, 1), (0, 1)], None, None, [3, 3, 2]),
        (3, [(0, 2), (0, 1)], None, None, [1, 2]),  # both would finish their next sample at 2
        (2, [(0, 2), (0, 1)], None, None, [1, 1]),  # a tie at 2 goes to rank 0 though rank 1 is faster
        (9, [(0, 1), (10, 1)], None, None, [9, 0]),  # its fixed cost is too high
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
    assert split(total, [c if isinstance(c, Cost) else Cost(*c) for c in costs], low, high) == shares


@pytest.mark.parametrize(
    ("total", "costs", "low", "high", "words"),
    [
        (8, [(0, 1), (math.nan, 1)], None, None, ["rank 1", "nan"]),
        (8, [(0, math.nan), (0, 1)], None, None, ["rank 0", "nan"]),
        (8, [(0, math.inf), (0, 1)], None, None, ["rank 0", "inf"]),
        (8, [(math.inf, 1), (0, 1)], None, None, ["rank 0", "inf"]),
        (8, [(0, 0.0), (0, 1)], None, None, ["rank 0", "0.0"]),
        (8, [(0, 1), (0, -0.25)], None, None, ["rank 1", "-0.25"]),
        (8, [(0, 1), (0.0, 1.0, ((4.0, -0.5),))], None, None, ["rank 1 has cost"]),  # it bends down
        (8, [(0, 1), (0.0, 1.0, ((4.0, math.inf),))], None, None, ["rank 1 has cost"]),
        (8, [(0, 1), (0.0, 1.0, ((8.0, 0.5), (4.0, 0.5)))], None, None, ["rank 1 has cost"]),
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
    assert str(found).startswith("Without 2 ranks: 2, 3 the job is 5.50 times as fast (100 samples/s against 18.2): ")
    assert too_slow(20, costs[:3]).ranks == (2,)
    assert "Without rank 2 the job is 5.50 times as fast (100 samples/s against 18.2)" in str(too_slow(20, costs[:3]))
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


measured = st.lists(st.tuples(st.integers(1, 64), st.floats(0.01, 10)), min_size=2, max_size=7).map(
    lambda pairs: sorted(dict(pairs).items())
)


def greatest_below(points, n):
    """The greatest convex function below points that never decreases, from its definition: the lowest chord."""
    lowest = [(m, min(s for other, s in points if other >= m)) for m, _ in points]
    chords = [
        left_s + (right_s - left_s) * (n - left) / (right - left) if right > left else left_s
        for left, left_s in lowest
        for right, right_s in lowest
        if left <= n <= right
    ]
    return min(chords)


# -- curves ------------------------------------------------------------------------------------------


@given(measured.filter(lambda points: len(points) > 1))
@settings(max_examples=300)
def test_between_the_points_it_is_the_greatest_convex_curve_below_them(points):
    curve = curve_below(points)
    assert curve.is_valid()
    assert len(curve.bends) <= MOST_BENDS
    assert curve.fixed >= 0
    for n in range(points[0][0], points[-1][0] + 1):
        assert curve.seconds(n) == pytest.approx(greatest_below(points, n), abs=1e-4 * points[-1][1])  # it rises a bit


def test_by_hand():
    flat = curve_below([(8, 0.064), (16, 0.064), (32, 0.128)])
    assert [flat.seconds(n) for n in (1, 8, 16, 20, 32, 48)] == pytest.approx(
        [0.064, 0.064, 0.064, 0.080, 0.128, 0.192], rel=1e-4
    )
    steep = curve_below([(10, 0.010), (20, 0.100)])  # the line through them is below 0 at no samples
    assert [steep.seconds(n) for n in (0, 5, 10, 20)] == pytest.approx([0.002, 0.006, 0.010, 0.100])
    hill = curve_below([(8, 0.030), (16, 0.045), (32, 0.060)])  # it bends down: the chord remains
    assert [hill.seconds(n) for n in (8, 16, 32)] == pytest.approx([0.030, 0.040, 0.060])
    falls = curve_below([(8, 0.050), (16, 0.040), (32, 0.060)])
    assert [falls.seconds(n) for n in (8, 16, 32)] == pytest.approx([0.040, 0.040, 0.060], rel=1e-4)


def test_of_many_points_those_that_matter_most_are_kept():
    points = [(n, n**2 + (500.0 if n > 50 else 0.0)) for n in range(10, 90, 4)]
    curve = curve_below(points)
    assert len(curve.bends) == MOST_BENDS
    assert all(1 - 1e-9 <= curve.seconds(n) / greatest_below(points, n) < 1.12 for n in range(10, 87))


@given(curves, st.floats(0, 100))
def test_how_much_is_done_by_a_deadline_is_the_inverse_of_the_time(curve, samples):
    assert curve.samples(curve.seconds(samples)) == pytest.approx(samples, abs=1e-9)
    assert curve.times(3.0).seconds(samples) == pytest.approx(3 * curve.seconds(samples))
    assert curve.in_units(4).seconds(samples) == pytest.approx(curve.seconds(4 * samples))


# -- splits ------------------------------------------------------------------------------------------


# -- on a grid --------------------------------------------------------------------------------------


@given(limited(60, lines), st.integers(1, 9), st.integers(0, 20))
def test_large_shares_are_multiples_but_for_one(case, multiple, least):
    costs, total, low, high = case
    shares, grid = split(total, costs, low, high), ((multiple, max(least, multiple)),)
    rounded, each = on_grid(shares, grid, costs, low, high), multiples(shares, grid, low)
    assert sum(rounded) == total
    assert all(lo <= n <= h for lo, n, h in zip(low, rounded, high, strict=True))
    off = [rank for rank, (n, m) in enumerate(zip(rounded, each, strict=True)) if n % m]
    assert len(off) <= 1 or rounded == shares  # no room
    if sum(h - n for n, h in zip(shares, high, strict=True)) > multiple * len(costs) ** 2:
        assert max(abs(n - share) for n, share in zip(rounded, shares, strict=True)) <= multiple * len(costs)


def test_a_step_is_hardly_longer_for_the_multiples_of_compiled_modules():
    draw, excess = random.Random(0), []
    for even in (64, 96, 128, 200, 256):
        for world in (2, 3, 4, 8) * 30:
            costs = [Cost(0.2 * even * draw.random(), draw.uniform(1, 4)) for _ in range(world)]
            limits = [1] * world, [even * world] * world
            shares = split(even * world, costs, *limits)
            rounded = on_grid(shares, Planner.COMPILED, costs, *limits)
            excess.append(makespan(rounded, costs) / makespan(shares, costs) - 1)
    assert max(excess) < 0.025
    assert sum(excess) / len(excess) < 0.01


# -- wherever costs go -------------------------------------------------------------------------------


@given(curves | rough)
def test_a_cost_survives_a_report_and_a_checkpoint(cost):
    cost = cost_of(*cost[:2]) if not cost.bends else cost
    report = Report(
        cost.fixed, cost.per_sample, 0.1, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, compiles=1.0, bends=cost.bends
    )
    assert len(report.row) == len(Report._fields) - 1 + 2 * MOST_BENDS
    assert Report.of_row(report.row) == report
    assert report.cost == cost
    assert cost_of(*json.loads(json.dumps(row_of(cost)))) == cost


def test_a_planner_splits_by_curves_and_saves_them():
    planner = Planner(2)
    planner.expect(32)
    straight = Report(0.010, 0.004, 0.0, 6.0, 16, 0.1, 0.0)
    reports = [Report(*FLAT[:2], *straight[2:-1], bends=FLAT.bends), straight]
    planner._doubt = 0.0
    planner.MIN_GAIN = 0.0
    assert planner.update(4, reports) is not None
    assert planner.shares(6) == [17, 15]
    restored = Planner(2)
    restored.expect(32)
    restored.load_state_dict(json.loads(json.dumps(planner.state_dict())))
    assert restored.shares(0) == [17, 15]
    assert restored.plans[0].costs == (FLAT, Cost(0.010, 0.004))


def test_a_plan_splits_several_loaders_by_curves():
    plan = Plan(0, (Cost(30.0, 1e-6, ((12.0, 1.0),)), Cost(0.0, 2.0)), (0, 0), (99, 99))
    # In units of two samples and one: 6 units are 18 samples, of which the first rank is late by 6.
    assert plan.split([24, 12]) == [[12, 12], [6, 6]]
