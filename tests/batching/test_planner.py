"""Plans: when shares change and when they stay, limits, the split of a step, turns, and the record of past plans."""

import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.batching.plan import Plan, exact_shares, rotating_shares
from lightning_hetero.batching.planner import Planner
from lightning_hetero.batching.repartition import ShareHistory, plan_for_survivors
from lightning_hetero.batching.reports import Report
from lightning_hetero.batching.shares import Cost, Stepwise, makespan, split
from lightning_hetero.errors import ConfigurationError, ShareError

EXAMPLE = (0.002, 0.002, 0.004, 0.008)  # seconds per sample


def report(per_sample, fixed=0.0, error=0.0, drawn=0.0):
    return Report(fixed, per_sample, error, drawn, 0, 0, 0)


def planner_of(total, world, *args, **options):
    planner = Planner(world, *args, **options)
    planner.expect(total)
    return planner


def sure_planner(total, world, **options):
    """A planner that expects no noise beyond the reported one."""
    planner = planner_of(total, world, **options)
    planner.DOUBT = planner._doubt = 0.0
    return planner


# -- plans from arbitrary reports --------------------------------------------------------------------

reports_of_three = st.lists(
    st.builds(
        report,
        per_sample=st.floats(1e-4, 1.0),
        fixed=st.floats(0.0, 1.0),
        error=st.sampled_from([0.0, 0.01, 0.2, math.inf]),
        drawn=st.integers(0, 12).map(float),
    ),
    min_size=3,
    max_size=3,
)


@given(st.lists(reports_of_three, max_size=8), st.integers(3, 60), st.integers(0, 3))
def test_no_report_changes_what_may_have_been_drawn(pulses, total, low):
    low = min(low, total // 3)
    planner, other = (planner_of(total, 3, low=low, high=max(total // 2, 1) + 1) for _ in range(2))
    for pulse, reports in enumerate(pulses):
        step = 4 * pulse
        reports = [r._replace(drawn=step + 1 + r.drawn) for r in reports]
        drawn = int(max(r.drawn for r in reports))
        before = [planner.shares(s) for s in range(step, drawn + 2)]
        plan = planner.update(step, reports)
        assert other.update(step, list(reports)) == plan  # deterministic
        after = [planner.shares(s) for s in range(step, drawn + 2)]
        assert after[: drawn - step] == before[: drawn - step]
        if plan is None:
            assert after == before
        else:
            assert plan.start >= drawn
            assert planner.at(plan.start) is plan
        for shares in after:
            assert sum(shares) == total
            assert all(low <= n <= max(total // 2, 1) + 1 for n in shares)


def test_a_plan_begins_at_the_first_step_that_nobody_has_drawn():
    planner = planner_of(64, 2)
    plan = planner.update(4, [report(0.001, drawn=6.0), report(0.003, drawn=11.0)])
    assert plan is not None
    assert plan.start == 11
    assert planner.shares(10) == [32, 32]
    assert planner.shares(11) == [48, 16]
    assert planner.shares(10**6) == [48, 16]


def test_nothing_is_changed_before_every_model_is_ready_not_even_back_to_even():
    assert Planner(2).update(4, [report(0.001), report(0.009)]) is None  # the size of the batch is not known
    planner = planner_of(64, 2)
    assert planner.update(4, [report(0.001), report(0.009, error=math.inf)]) is None
    assert planner.update(8, [report(0.001), report(0.003)]) is not None
    assert planner.update(12, [report(0.001), report(0.003)]) is None  # the gain is measured from the latest plan
    assert planner.update(12, [report(0.003), report(0.001, error=math.inf)]) is None


def test_one_plan_at_a_time():
    planner = planner_of(64, 2)
    planner.update(4, [report(0.001, drawn=10.0), report(0.003, drawn=10.0)])
    opposite = [report(0.003, drawn=12.0), report(0.001, drawn=12.0)]
    assert planner.update(9, opposite) is None  # the first has not begun
    assert planner.update(10, opposite) is not None
    assert [planner.shares(s) for s in (10, 11, 12)] == [[48, 16], [48, 16], [16, 48]]


def test_the_batch_is_learned_from_reports_where_it_is_not_known():
    planner = Planner(2)
    planner.expect(None)
    slow_and_fast = [report(0.009)._replace(samples=31.6), report(0.001)._replace(samples=32.5)]
    assert planner.update(4, slow_and_fast) is not None
    assert planner.total == 64  # of 64.1
    shares = planner.shares(planner.plans[-1].start)
    assert sum(shares) == 64
    assert shares[0] < shares[1] <= 64  # no more than twice what it has been given


def test_shares_of_data_that_each_rank_has_for_itself_stay_even():
    planner = planner_of(64, 2)
    planner.update(4, [report(0.001), report(0.009)])
    planner.hold(True)
    planner.expect(64)
    assert planner.shares(0) == [32, 32]  # the plan of an earlier fit is forgotten
    assert planner.update(8, [report(0.001), report(0.009)]) is None
    planner.hold(False)
    assert planner.update(12, [report(0.001), report(0.009)]) is not None


# With two ranks of k and (1 + x) k the best split gains x / (2 + x) over the even one.
@pytest.mark.parametrize(
    ("x", "error", "pays"),
    [
        (0.060, 0.0, False),  # 2.9%
        (0.064, 0.0, True),  # 3.1%
        (0.150, 0.05, False),  # 7.0%, of which 2.3% are left if the slow one is really 5% faster
        (0.170, 0.05, True),  # 7.8%, and 3.2%
        (0.450, 0.2, False),  # 18%
    ],
)
def test_shares_change_only_for_a_gain_that_counts_and_is_sure(x, error, pays):
    planner = sure_planner(20_000, 2)
    plan = planner.update(4, [report(0.001, error=0.0), report(0.001 * (1 + x), error=error)])
    assert (plan is not None) == pays


def test_where_a_batch_costs_the_same_whatever_its_size_the_shares_go_back_to_even():
    planner = planner_of(64, 2)
    assert planner.update(4, [report(0.001), report(0.003)]) is not None
    flat = [report(1.0e-6, fixed=1.0), report(1.1e-6, fixed=1.0)]
    assert planner.update(8, flat) is not None
    assert planner.shares(8) == [32, 32]
    assert planner.update(12, flat) is None  # and stay there


def test_shares_go_back_to_even_ones_only_as_their_reason_fades():
    planner = sure_planner(64, 2)
    costs = [report(0.001), report(0.0015)]
    assert planner.update(4, costs) is not None
    assert planner.update(8, [r._replace(error=0.1) for r in costs]) is None  # would not have been enough to leave
    assert planner.shares(8) == [39, 25]
    assert planner.update(12, [r._replace(error=0.3) for r in costs]) is not None
    assert planner.shares(12) == [32, 32]
    assert sure_planner(64, 2).update(4, [r._replace(error=0.1) for r in costs]) is None


def steps(planner, now, costs, seconds):
    """Update with reports of steps of this length, under the plan in force; returns the new plan."""
    shares = planner.shares(max(now - 1, 0))
    reports = [
        r._replace(samples=n, compute=seconds, steps=10, since=100.0, drawn=now + 1.0)
        for r, n in zip(costs, shares, strict=True)
    ]
    return planner.update(now, reports)


def until_a_resplit(planner, now, costs, seconds):
    """Update until there is a new plan; returns the number of updates before it."""
    for waited in range(1000):
        if steps(planner, now + waited, costs, seconds) is not None:
            return waited
    raise AssertionError("there was none")


SLOWER = [report(0.001), report(0.0015)]  # even: 48 ms; 39 and 25 samples: 39 ms


def test_before_any_noise_is_known_only_large_gains_count():
    assert 4 <= until_a_resplit(planner_of(64, 2), 0, SLOWER, 0.048) <= 16
    assert until_a_resplit(planner_of(64, 2), 0, [report(0.001), report(0.004)], 0.128) == 0


def test_a_planner_that_goes_on_for_another_one_need_not_learn_how_far_to_trust():
    alone = until_a_resplit(planner_of(64, 2), 0, SLOWER, 0.048)
    former = planner_of(64, 2)
    for now in range(alone - 1):
        assert steps(former, now, SLOWER, 0.048) is None
    assert until_a_resplit(plan_for_survivors(former, (0, 1), Planner(2)), 0, SLOWER, 0.048) <= 1 < alone


def test_a_resplit_that_does_not_make_steps_shorter_is_taken_back_and_the_next_waits_longer():
    planner, waits, now = planner_of(64, 2), [], 0
    for _ in range(3):
        waits.append(until_a_resplit(planner, now, SLOWER, 0.048))
        now += waits[-1] + 1
        assert planner.shares(now) == [39, 25]
        looks = until_a_resplit(planner, now, SLOWER, 0.048)
        assert planner.TRIAL - 1 <= looks <= planner.TRIAL + 1
        now += looks + 1
        assert planner.shares(now) == [32, 32]
    assert waits[1] > 1.5 * waits[0]
    assert waits[2] > 1.5 * waits[1]


def test_a_correction_that_failed_its_trial_does_not_come_back_without_one():
    planner = planner_of(64, 2)
    now = until_a_resplit(planner, 0, SLOWER, 0.048) + 1
    for now in range(now, now + 40):  # noqa: B020
        steps(planner, now, SLOWER, 0.039)
    assert planner.shares(now) == [39, 25]
    apparent = [report(0.001, error=0.4), report(0.004, error=0.4)]  # so it is measured; steps take 60 ms anyway
    splits = []
    for now in range(now + 1, now + 31):  # noqa: B020
        if (plan := steps(planner, now, apparent, 0.060)) is not None:
            splits.append(plan.split([64])[0])
    assert len(splits) >= 4
    assert splits == [[52, 12], [39, 25]] * (len(splits) // 2), "every one was on trial"


def seconds_apart(longest, own, exchange):
    """Seconds of a rank's steps: in every eighth one it waits for the slower rank, and for an exchange."""
    for step in itertools.count(1):
        yield own + (8 * (longest - own) + exchange if step % 8 == 0 else 0.0)


def split_is_kept(seed):
    """Whether a new split that shortens steps is kept, where ranks report different steps."""
    rng, planner, now = random.Random(seed), planner_of(64, 2), 0
    costs, ahead, exchange = [report(0.001), report(0.0015)], [0.0, 0.0], rng.uniform(0.1, 0.3)
    for shares in ([32, 32], [39, 25]):
        work = [n * cost.per_sample for n, cost in zip(shares, costs, strict=True)]
        paces = [seconds_apart(max(work), own, exchange) for own in work]
        for _ in range(40):
            laps, spent = [0, 0], [0.0, 0.0]
            for rank, pace in enumerate(paces):
                until = rng.uniform(0.8, 1.4)  # the next message
                while ahead[rank] + spent[rank] < until:
                    spent[rank] += next(pace)
                    laps[rank] += 1
                ahead[rank] += spent[rank] - until
            now += min(laps)
            reports = [
                cost._replace(samples=n, compute=s / k, steps=k, since=100.0, drawn=now + 1.0)
                for cost, n, s, k in zip(costs, shares, spent, laps, strict=True)
            ]
            if planner.update(now, reports) is not None:
                break
    return planner.shares(now + 1) == [39, 25]


def test_where_ranks_report_different_steps_a_resplit_that_makes_them_shorter_is_kept():
    assert all(map(split_is_kept, range(200)))


def test_steps_that_became_longer_by_a_change_of_speed_are_no_reason_to_take_the_answer_back():
    planner = planner_of(64, 2)
    now = until_a_resplit(planner, 0, SLOWER, 0.048) + 1
    for later in range(40):
        steps(planner, now + later, SLOWER, 0.039)
    # Both at a third of their speed, and the second at a sixth: the best step is twice as long as it was.
    changed = [report(0.003)._replace(since=0.1), report(0.009)._replace(since=0.1)]
    now += 40
    reports = [r._replace(compute=0.225, steps=10, drawn=now + 1.0, samples=32) for r in changed]
    assert planner.update(now, reports) is not None
    for later in range(1, 40):
        assert (
            planner.update(now + later, [r._replace(compute=0.144, drawn=now + later + 1.0) for r in reports]) is None
        )
    assert planner.shares(now + 40) == [48, 16]


def test_a_share_grows_to_twice_what_has_been_seen_at_most():
    planner = planner_of(64, 4)
    fast = [report(0.0001), report(0.01), report(0.01), report(0.01)]
    grown = [planner.shares(planner.update(step, fast).start)[0] for step in (4, 8)]
    assert grown == [32, 61]
    # A size that was possible once stays allowed.
    assert planner.update(12, fast[::-1]) is not None
    assert planner.update(16, fast) is not None
    assert planner.shares(16) == [61, 1, 1, 1]


# -- batches that are larger than the one that was expected --------------------------------------------


def skewed_planner(total=64, **options):
    planner = planner_of(total, 4, **options)
    assert planner.update(4, [report(k, 0.010, drawn=6.0) for k in EXAMPLE]) is not None
    return planner


@pytest.mark.parametrize("size", [128, 129, 1000])
def test_a_plan_also_splits_batches_much_larger_than_those_of_training(size):
    # Validation may use larger batches, and a batch sampler of the user's may vary them; the limit of growth
    # does not come from the user, and does not count here.
    shares = skewed_planner().plans[-1].split([size])[0]
    assert sum(shares) == size
    assert min(shares) > 0
    assert size < 1000 or shares[0] > 1.5 * shares[2] > 2 * shares[3]


# -- given shares and limits ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("balance", "total", "shares"),
    [
        ("off", 64, [16, 16, 16, 16]),
        ("off", 66, [17, 17, 16, 16]),
        ([1, 1, 1, 1], 66, [17, 17, 16, 16]),
        ([4, 2, 1, 1], 64, [32, 16, 8, 8]),
        ([0.5, 0.25, 0.125, 0.125], 64, [32, 16, 8, 8]),  # relative
        ([1, 0, 0, 1], 64, [32, 0, 0, 32]),
        ([0, 0, 0, 3], 7, [0, 0, 0, 7]),
        ([100, 100, 100, 1], 12, [4, 4, 3, 1]),  # a share above 0 means at least a sample
    ],
)
def test_given_shares(balance, total, shares):
    planner = planner_of(total, 4, balance)
    assert planner.shares(0) == shares
    assert planner.update(4, [report(k) for k in EXAMPLE]) is None  # and no measurement changes them
    assert planner.shares(100) == shares


@pytest.mark.parametrize(
    "options",
    [
        {"balance": []},
        {"balance": [1, 1, 1, math.inf]},
        {"balance": [True, 1, 1, 1]},
        {"balance": ["1", 1, 1, 1]},
        {"high": [8] * 5},
        {"low": [1, 1, 1, 1.5]},
        {"low": True},
    ],
)
def test_options_that_cannot_work_are_refused(options):
    name = {"balance": "balance", "low": "min_batch_size", "high": "max_batch_size"}[next(iter(options))]
    with pytest.raises(ConfigurationError, match=name):
        Planner(4, **options)


@pytest.mark.parametrize(
    ("options", "total", "words"),
    [
        ({}, 3, ["3", "4 ranks", "[1, 1, 1, 1]"]),
        ({"low": 17}, 64, ["64", "[17, 17, 17, 17]", "min_batch_size"]),
        ({"high": 15}, 64, ["64", "[15, 15, 15, 15]", "60 together", "a reason."]),
        ({"high": [0, 0, 60, 3], "low": 0}, 64, ["64", "63 together"]),
        ({"high": 0, "low": 0}, 64, ["64", "0 together"]),
    ],
)
def test_a_batch_that_the_limits_do_not_admit_is_refused(options, total, words):
    planner = Planner(4, **options)
    planner.one_pass = "a reason."
    with pytest.raises(ShareError) as caught:
        planner.expect(total)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_batch_that_is_more_than_fits_is_run_in_passes():
    planner = planner_of(64, 4, high=[20, 20, 5, 5])
    assert planner.in_passes(64)
    assert planner.shares(0) == [16, 16, 16, 16]
    assert planner.plans[-1].passes([16, 16, 16, 16]) == [1, 1, 4, 4]
    assert planner.plans[-1].split([50]) == [[20, 20, 5, 5]]  # a smaller one, that fits, is not
    planner.update(4, [report(k, 0.050) for k in (0.002, 0.002, 0.004, 0.008)])
    shares = planner.shares(4)
    assert sum(shares) == 64
    limits = zip((0.002, 0.002, 0.004, 0.008), (20, 20, 5, 5), strict=True)
    costs = [Stepwise(Cost(0.050, k), high) for k, high in limits]
    assert makespan(shares, costs) == makespan(split(64, costs), costs)
    assert planner.plans[-1].passes(shares)[:2] == [2, 2]


def test_a_rank_that_may_take_nothing_takes_nothing_in_passes_either():
    planner = planner_of(64, 3, low=0, high=[0, 20, 10])
    assert planner.shares(0)[0] == 0
    assert sum(planner.shares(0)) == 64


def test_every_rank_takes_a_sample_unless_it_may_take_none():
    extreme = [report(0.0001), report(0.0001), report(0.0001), report(5.0)]
    planner = planner_of(64, 4)
    planner.update(4, extreme)
    assert planner.shares(4)[3] == 1
    planner = planner_of(64, 4, low=0)
    planner.update(4, extreme)
    assert planner.shares(4)[3] == 0


@pytest.mark.parametrize(
    ("options", "total", "shares"),
    [
        ({}, 64, [28, 28, 4, 4]),  # a quarter of an even share
        ({}, 1024, [496, 496, 16, 16]),  # but no more than that
        ({}, 16, [6, 6, 2, 2]),  # and no less than this
        ({"low": 1}, 64, [31, 31, 1, 1]),  # the user has set another limit
        ({}, 7, [2, 2, 2, 1]),  # too few for that; the plan begins even, and no share doubles at once
        ({"balance": [20, 20, 1, 0]}, 64, [31, 31, 2, 0]),
    ],
)
def test_models_that_normalise_their_batch_get_enough_of_it_where_the_batch_allows(options, total, shares):
    planner = Planner(4, **options)
    planner.least = 2
    planner.expect(total)
    if total > 7:
        planner.update(4, [report(0.001), report(0.001), report(1.0), report(1.0)])
    assert planner.shares(4) == shares


def test_limits_hold_for_the_even_start_and_for_every_plan():
    limits = {"low": [1, 20, 1, 7], "high": [10, 64, 12, 64]}
    planner = planner_of(64, 4, **limits)
    planner.update(4, [report(k, 0.010) for k in EXAMPLE])
    for step in (0, 4):
        shares = planner.shares(step)
        assert sum(shares) == 64
        assert all(lo <= n <= hi for lo, n, hi in zip(limits["low"], shares, limits["high"], strict=True))
    assert planner.shares(4) == [10, 34, 12, 8]  # 30, 78, 58 and 74 ms


# -- state ---------------------------------------------------------------------------------------------


def test_a_restored_planner_goes_on_as_the_saved_one():
    saved = skewed_planner(low=2, high=40)
    state = json.loads(json.dumps(saved.state_dict()))  # builtins only, as a weights-only checkpoint needs
    restored = planner_of(64, 4, low=2, high=40)
    restored.load_state_dict(state)
    assert restored.shares(0) == saved.shares(100) == [24, 24, 11, 5]
    faster = [report(0.0001, drawn=101.0), *[report(0.01, drawn=101.0)] * 3]
    assert restored.update(100, faster) == saved.update(100, faster)
    assert restored.shares(101) == saved.shares(101)


# -- limits that are found after the planner was made ----------------------------------------------------


@pytest.mark.parametrize("balance", ["auto", "off", [3.0, 1.0, 1.0, 0.0]])
@pytest.mark.parametrize("least", [1, 2])
def test_limits_that_are_found_later_are_as_those_that_were_given(balance, least):
    high = [20, 40, 9, 30]

    def planner(**options):
        made = Planner(4, balance, **options)
        made.least = least
        made.expect(64)
        return made

    given, found = planner(high=high), planner()
    assert found.limit(high)
    assert not found.limit(high)
    assert found.plans == given.plans
    assert found.shares(0) == given.shares(0)
    assert found.state_dict() == given.state_dict()
    slow = [report(k, 0.010, drawn=6.0) for k in EXAMPLE]
    assert found.update(4, slow) == given.update(4, slow)
    assert found.shares(6) == given.shares(6)


def test_limits_that_are_found_and_cannot_be_met():
    planner = planner_of(64, 2)
    planner.one_pass = "a reason."
    with pytest.raises(ShareError, match="64, and cannot take it in several passes: a reason"):
        planner.limit([20, 30])
    with pytest.raises(ShareError, match=r"min_batch_size=\[8, 8\] exceeds max_batch_size=\[7, 64\]"):
        planner_of(64, 2, low=8).limit([7, 64])
    planner = planner_of(None, 2)
    planner.least = 2  # BatchNorm's least share gives way to what fits
    planner.expect(64)
    assert planner.limit([5, 64])
    assert planner.shares(0) == [5, 59]


# -- splitting a step ----------------------------------------------------------------------------------

plans = st.builds(
    lambda costs, low: Plan(0, tuple(Cost(*c) for c in costs), tuple(low[: len(costs)]), (2**62,) * len(costs)),
    st.lists(st.tuples(st.floats(0, 1), st.floats(1e-3, 1)), min_size=1, max_size=5),
    st.lists(st.integers(0, 3), min_size=5, max_size=5),
)


@given(plans, st.lists(st.integers(0, 96), min_size=1, max_size=3))
def test_loaders_are_split_in_equal_proportions_exactly(plan, sizes):
    shares = plan.split(sizes)
    assert [sum(of_loader) for of_loader in shares] == sizes
    for rank in range(len(plan.costs)):
        parts = [of_loader[rank] for of_loader in shares]
        assert all(n >= 0 for n in parts)
        # n_i / N is the same for all loaders, as fractions, not as floats.
        assert all(parts[i] * sizes[j] == parts[j] * sizes[i] for i in range(len(sizes)) for j in range(len(sizes)))
        if 0 < sum(plan.low) <= math.gcd(*sizes):
            assert sum(parts) >= plan.low[rank]


@pytest.mark.parametrize(
    ("sizes", "shares"),
    [
        ([64], [[32, 16, 8, 8]]),
        ([64, 32], [[32, 16, 8, 8], [16, 8, 4, 4]]),
        ([64, 0], [[32, 16, 8, 8], [0, 0, 0, 0]]),  # a loader that has run out
        ([8, 16, 24], [[4, 2, 1, 1], [8, 4, 2, 2], [12, 6, 3, 3]]),
        ([0, 0], [[0, 0, 0, 0], [0, 0, 0, 0]]),
        ([5], [[2, 1, 1, 1]]),
        ([4], [[1, 1, 1, 1]]),  # the lower limits still hold
        ([3], [[2, 1, 0, 0]]),  # too few for them, so the fastest take what there is
        ([1], [[1, 0, 0, 0]]),
        ([3, 3], [[2, 1, 0, 0], [2, 1, 0, 0]]),
    ],
)
def test_batches_by_hand(sizes, shares):
    assert planner_of(64, 4, [4, 2, 1, 1]).plans[0].split(sizes) == shares


@pytest.mark.parametrize(
    ("size", "shares"), [(8, [2, 2, 2, 2]), (7, [2, 0, 2, 3]), (5, [0, 0, 2, 3]), (2, [0, 0, 0, 2]), (1, [0, 0, 0, 1])]
)
def test_where_a_tail_is_too_small_for_all_the_slowest_have_nothing(size, shares):
    balance = [1, 1, 1, 1] if size == 8 else [1, 1, 2, 4]
    assert planner_of(64, 4, balance, low=2).plans[0].split([size]) == [shares]


@pytest.mark.parametrize(
    ("size", "shares"), [(16, [4, 4, 4, 4]), (12, [3, 3, 3, 3]), (8, [2, 2, 2, 2]), (7, [3, 2, 2, 0])]
)
def test_a_tail_asks_for_no_more_than_the_ranks_need(size, shares):
    planner = Planner(4)
    planner.least = 2
    planner.expect(64)
    assert planner.plans[0].split([size]) == [shares]


def test_limits_count_the_samples_of_all_loaders():
    plan = Plan(0, (Cost(0, 1), Cost(0, 1)), (1, 1), (9, 64))
    assert plan.split([32, 16]) == [[6, 26], [3, 13]]  # 9 of rank 0, 39 of rank 1
    with pytest.raises(ShareError):
        Plan(0, (Cost(0, 1), Cost(0, 1)), (0, 0), (9, 9)).split([32, 16])
    for low in (8, 9):  # in steps of two samples and one
        assert Plan(0, (Cost(0, 100), Cost(0, 1)), (low, 1), (64, 64)).split([32, 16]) == [[6, 26], [3, 13]]


def test_earlier_plans_are_still_known() -> None:
    planner = Planner(2)
    planner.expect(32)
    planner.update(6, [Report(0.0, k, 0.0, 8, 16, 16 * k, 0.0) for k in (1.0, 3.0)])
    before = planner.shares(7)
    planner.update(8, [Report(0.0, k, 0.0, 10, 16, 16 * k, 0.0) for k in (3.0, 1.0)])
    assert planner.shares(7) == before == [16, 16]
    assert planner.shares(8) == [24, 8]
    assert planner.shares(10)[0] < 16
    for number in range(Planner.KEPT - 3):
        planner.adopt(replace(planner.at(0), start=11 + number))
    assert planner.at(0).start == 0
    planner.adopt(replace(planner.at(0), start=100))
    with pytest.raises(LookupError, match="the plan of step 0 is no longer known; there are those from 8 on"):
        planner.at(0)
    assert planner.shares(8) == [24, 8]


positive = st.floats(0.01, 3.0)
ranks = st.lists(
    st.tuples(st.builds(Cost, st.floats(0.0, 3.0), positive, st.just(())), st.integers(0, 4), st.integers(0, 60)),
    min_size=1,
    max_size=8,
)


@settings(deadline=None)
@given(ranks, st.floats(0.0, 1.0), st.integers(1, 200))
def test_no_rank_is_ever_more_than_a_few_samples_off_its_exact_part(ranks, part, turns):
    costs, low = [cost for cost, _, _ in ranks], [least for _, least, _ in ranks]
    high = [least + more for _, least, more in ranks]
    units = round(sum(low) + part * (sum(high) - sum(low)))
    exact = exact_shares(units, costs, low, high)
    assert sum(exact) == pytest.approx(units)
    given = [0] * len(costs)
    for turn in range(turns):
        shares = rotating_shares(exact, turn)
        assert sum(shares) == units
        assert all(lo <= n <= h for lo, n, h in zip(low, shares, high, strict=True))
        given = [before + n for before, n in zip(given, shares, strict=True)]
        assert all(abs(n - (turn + 1) * x) < 4 for n, x in zip(given, exact, strict=True))


def test_shares_that_come_out_even_stay():
    plan = Plan(0, (Cost(0.0, 1.0), Cost(0.0, 0.5)), (1, 1), (99, 99))
    assert {tuple(plan.split([12], turn)[0]) for turn in range(50)} == {(4, 8)}


def test_all_loaders_of_a_step_keep_their_proportions():
    plan = Plan(0, (Cost(0.0, 1.0),) * 3, (1,) * 3, (99,) * 3)
    for turn in range(20):
        large, small = plan.split([16, 8], turn)
        assert large == [2 * n for n in small]
        assert sum(small) == 8


@pytest.mark.parametrize("turns", [False, True])
def test_those_that_remain_go_on_in_turn(turns):
    former = Planner(3, "off")
    former.expect(64)
    former.rotates, former.origin = turns, 5
    planner = plan_for_survivors(former, [0, 2], Planner(2, "off"))
    planner.expect(63)
    rests = {
        tuple(planner.at(step).split([63], step + planner.origin if planner.rotates else None)[0]) for step in range(20)
    }
    assert rests == ({(32, 31), (31, 32)} if turns else {(32, 31)})


def test_a_rank_whose_share_is_0_has_no_samples_once_another_is_lost_either():
    former = Planner(3, [1.0, 0.0, 2.0])
    former.expect(30)
    assert former.shares(0) == [10, 0, 20]
    assert plan_for_survivors(former, [1, 2], Planner(2, [0.0, 2.0])).shares(0) == [0, 30]


# -- multiples ----------------------------------------------------------------------------------------


def compiled(*per_sample, compiles=1.0):
    return [report(k)._replace(compiles=compiles) for k in per_sample]


@pytest.mark.parametrize("compiling", [(1.0, 1.0, 1.0), (0.0, 1.0, 0.0)])
def test_measured_shares_are_multiples_where_a_rank_compiles(compiling):
    planner = sure_planner(480, 3)
    assert planner.update(4, compiled(*EXAMPLE[1:], compiles=0.0)).split([480]) == [[275, 137, 68]]
    planner = sure_planner(480, 3)
    reports = [one._replace(compiles=flag) for one, flag in zip(compiled(*EXAMPLE[1:]), compiling, strict=True)]
    assert planner.update(4, reports).split([480]) == [[276, 136, 68]]
    resumed = planner_of(480, 3)
    resumed.load_state_dict(json.loads(json.dumps(planner.state_dict())))
    assert resumed.shares(0) == [276, 136, 68]
    assert plan_for_survivors(planner, [0, 2], Planner(2)).plans[0].grid == Planner.COMPILED
    assert planner_of(480, 3).shares(0) == [160] * 3


def test_even_shares_stay_where_ranks_compile():
    planner = sure_planner(300, 3)
    planner.plans = [Plan(0, (Cost(0, 1), Cost(0, 2), Cost(0, 2)), (1,) * 3, (300,) * 3)]
    planner.most = [0.5] * 3
    assert planner.update(4, compiled(*[0.01] * 3)).split([300]) == [[100] * 3]


def test_a_multiple_that_was_asked_for_counts_at_once():
    assert planner_of(60, 3, multiple=8).shares(0) == [24, 20, 16]  # 4 are left
    assert planner_of(60, 3, [4.0, 2.0, 0.5], multiple=8).shares(0) == [40, 16, 4]
    assert planner_of(60, 3, multiple=8, high=20).shares(0) == [20] * 3  # no room


@pytest.mark.parametrize(
    ("total", "multiple", "sizes"),
    [(64, 8, {16, 24}), (80, 4, {24, 28}), (62, 8, {20, 21})],  # of the last one, no multiples are left over
)
def test_multiples_in_turn(total, multiple, sizes):
    plan = Plan(0, (Cost(0.0, 1.0),) * 3, (1,) * 3, (99,) * 3, grid=((multiple, multiple),))
    given = [plan.split([total], turn)[0] for turn in range(300)]
    assert all(sum(shares) == total for shares in given)
    assert {n for shares in given for n in shares} == sizes
    assert all(abs(sum(column) / 300 - total / 3) < 0.2 for column in zip(*given, strict=True))


def past_planner(*plans: tuple[int, Sequence[int]]) -> Planner:
    """A planner with past plans: the samples of each rank, from a step on."""
    made = Planner(len(plans[0][1]))
    made.total = 12
    made.plans = [Plan(start, (Cost(0, 1),) * len(n), tuple(n), tuple(n)) for start, n in plans]
    return made


def test_shares_are_those_of_each_step() -> None:
    past = ShareHistory()
    past.end([4, 7, 9], past_planner((0, [4, 4, 4]), (10, [2, 3, 7]), (20, [1, 1, 10])), 25)
    assert past.samples(9, 5) == 5 * 4 + 10 * 7 + 5 * 10
    assert past.samples(7, 12) == 8 * 3 + 5 * 1
    assert past.samples(4, 25) == 0
    assert past.samples(4, 30) == 0  # it was ahead: from step 25 on others take the samples that it had trained on


def test_of_steps_that_nobody_remembers_the_oldest_plan_counts() -> None:
    past = ShareHistory()
    past.end([0, 1], past_planner((10, [2, 10]), (20, [6, 6])), 22)
    assert past.samples(1, 5) == 15 * 10 + 2 * 6


def test_two_are_lost_one_after_the_other() -> None:
    """The second rank is lost before the steps end that were drawn when the first one was lost."""
    past = ShareHistory()
    past.end([0, 1, 2], past_planner((0, [2, 4, 6])), 30)
    assert past.samples(1, 20) == 10 * 4
    past.end([0, 2], past_planner((0, [3, 9])), 40)
    assert past.samples(2, 25) == 5 * 6 + 10 * 9
    assert past.samples(1, 20) == 10 * 4  # since step 30 others have its share


def test_who_could_not_meet_meets_again_among_fewer() -> None:
    past = ShareHistory()
    past.end([0, 1, 2, 3], past_planner((0, [3, 3, 3, 3])), 30)
    past.end([0, 1, 3], past_planner((0, [4, 4, 4])), 28)  # the rank that had drawn the most is lost, too
    assert past.samples(2, 20) == past.samples(3, 20) == 8 * 3


def test_turns() -> None:
    """Ranks get the remainder in turn: over many steps, and over some, no rank gets more."""
    made = Planner(3, "off")
    made.expect(10)
    made.rotates, made.origin = True, -50  # the epoch has begun with step 50
    taken = [made.at(step).split([10], step + made.origin)[0] for step in range(100)]
    past = ShareHistory()
    past.end([5, 6, 8], made, 100)
    for at, rank in enumerate([5, 6, 8]):
        assert past.samples(rank, 70) == sum(each[at] for each in taken[70:])
        assert past.samples(rank, 70) == 100


def test_a_batch_that_is_too_small_for_all_is_still_whole():
    plan = Plan(0, (Cost(0.0, 1.0), Cost(0.0, 2.0), Cost(0.0, 4.0)), (2, 2, 2), (9, 9, 9))
    for turn in range(20):
        assert sum(plan.split([3], turn)[0]) == 3


def test_limits_that_leave_no_room_are_an_error():
    """Otherwise samples would be left out silently."""
    with pytest.raises(ShareError, match="cannot be split"):
        exact_shares(32, [Cost(0.0, 1.0)] * 10, [0] * 10, [3] * 10)


def test_a_checkpoint_of_small_batches_can_be_resumed_with_large_ones():
    planner = planner_of(640, 4)
    planner.load_state_dict(skewed_planner().state_dict())
    assert sum(planner.shares(0)) == 640
    planner.update(4, [report(k, 0.010, drawn=6.0) for k in EXAMPLE])
    assert sum(planner.shares(6)) == 640


def test_the_users_upper_limits_hold_for_any_batch():
    plan = skewed_planner(high=40).plans[-1]
    assert max(plan.split([160])[0]) == 40
    assert plan.passes(plan.split([160])[0]) == [1, 1, 1, 1]
    assert max(plan.passes(plan.split([161])[0])) == 2


def test_what_a_part_costs_in_passes_and_of_whole_batches():
    planner, cost = Planner(2, high=[4, 8]), Cost(10.0, 1.0)
    planner.expect(12)
    assert planner.cost_of_part(0, cost) == cost
    planner.expect(13)
    assert planner.cost_of_part(0, cost) == Stepwise(cost, 4)
    planner.whole = 2
    assert planner.cost_of_part(0, cost) == Cost(0.0, (10.0 + 6.5) / 6.5)
