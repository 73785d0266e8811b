"""The agreed plan, driven through a simulated cluster without processes, and by arbitrary reports."""

import json
import math
import statistics

import pytest
import simulation
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.errors import ConfigurationError, HeteroError, ShareError
from lightning_hetero.workload.limits import fixed_shares
from lightning_hetero.workload.plan import Plan
from lightning_hetero.workload.planner import Planner
from lightning_hetero.workload.report import Report
from lightning_hetero.workload.shares import Cost, makespan, split

EXAMPLE = (0.002, 0.002, 0.004, 0.008)  # seconds per sample; each batch costs 10 ms besides; the optimum is 58 ms


class Cluster(simulation.Cluster):
    """Ranks that take ``10 ms + k * n`` for their share."""

    def __init__(self, speeds, total=64, every=4, noise=0.0, seed=0, ahead=None):
        costs = [Cost(0.010, k) for k in speeds]
        super().__init__(costs, total, every, simulation.gaussian(noise, seed) if noise else None, ahead)

    def run(self, steps, speeds=None):
        return super().run(steps, speeds and [Cost(0.010, k) for k in speeds])


def report(per_sample, fixed=0.0, error=0.0, drawn=0.0):
    return Report(fixed, per_sample, error, drawn, 0, 0, 0)


def planner_of(total, world, *args, **options):
    planner = Planner(world, *args, **options)
    planner.expect(total)
    return planner


def sure_planner(total, world, **options):
    """One that expects no noise beyond what is reported."""
    planner = planner_of(total, world, **options)
    planner.DOUBT = planner._doubt = 0.0
    return planner


# -- the simulated cluster ---------------------------------------------------------------------------


def test_from_an_even_start_to_the_optimum_within_few_pulses():
    cluster = Cluster(EXAMPLE)
    seconds = cluster.run(40)
    assert cluster.shares[0] == [16] * 4
    assert seconds[0] == pytest.approx(0.138)
    assert seconds[12] <= 0.058 * 1.05
    assert seconds[24:] == pytest.approx([0.058] * 16)
    assert cluster.shares[-1][:2] == [24, 24]


# (new speeds, the best possible step in seconds, worked out by hand)
CHANGES = [
    ((0.002, 0.008, 0.004, 0.008), 0.074),  # one rank at a quarter: 32, 8, 16, 8 samples
    ((0.002, 0.002, 0.002, 0.002), 0.042),  # the slow ones recover: 16 each
    ((0.004, 0.004, 0.004, 0.004), 0.074),  # the fast ones at half speed
    ((0.002, 0.002, 0.004, 0.002), 0.048),  # only the slowest recovers: 18, 18, 9, 18 and one more
    ((0.010, 0.002, 0.004, 0.008), 0.078),  # the fastest becomes the slowest: 6, 33, 17, 8
    ((0.020, 0.020, 0.040, 0.080), 0.490),  # all at a tenth: the shares stay
]


@pytest.mark.parametrize("when", [51, 52, 53, 54])
@pytest.mark.parametrize(("speeds", "optimum"), CHANGES)
def test_after_a_change_of_speed_the_step_is_soon_near_the_optimum(speeds, optimum, when):
    cluster = Cluster(EXAMPLE)
    cluster.run(when)
    seconds = cluster.run(60, speeds)
    assert min(seconds) >= optimum - 1e-9  # the number above is the optimum
    assert max(seconds[10:]) <= 1.10 * optimum
    assert max(seconds[12:]) <= 1.05 * optimum


def test_a_change_under_noise_is_followed_too():
    # From fast to slow and back, 10% noise in every measurement; not told from noise by any single one.
    speeds, reversed_ = (0.001, 0.003, 0.005), (0.005, 0.003, 0.001)
    after = []
    for seed in range(20):
        cluster = Cluster(speeds, total=24, noise=0.1, seed=seed)
        cluster.run(40)
        seconds = cluster.run(80, reversed_)
        costs = [Cost(0.010, k) for k in reversed_]
        after.append([seconds[i] / makespan(split(24, costs), costs) for i in (0, 14, 24, 79)])
    before, soon, later, last = (statistics.median(column) for column in zip(*after, strict=True))
    assert before > 2
    assert soon <= 1.1
    assert later <= 1.05
    assert last <= 1.05
    assert max(row[-1] for row in after) <= 1.25


@pytest.mark.parametrize("every", [1, 2, 8])
def test_other_intervals_between_reports_reach_the_optimum_too(every):
    cluster = Cluster(EXAMPLE, every=every)
    assert cluster.run(60)[-20:] == pytest.approx([0.058] * 20)
    assert max(cluster.run(60, CHANGES[0][0])[-20:]) <= 1.05 * 0.074


def test_with_prefetching_workers_it_only_takes_that_much_longer():
    cluster = Cluster(EXAMPLE, ahead=[4, 0, 7, 2])
    seconds = cluster.run(60)
    assert seconds[8] == pytest.approx(0.138)  # steps that are already drawn stay as they were
    assert max(seconds[30:]) <= 1.05 * 0.058
    assert max(cluster.run(60, CHANGES[0][0])[24:]) <= 1.05 * 0.074


@pytest.mark.parametrize("seed", range(4))
def test_under_noise_the_shares_neither_oscillate_nor_wander(seed):
    cluster = Cluster(EXAMPLE, noise=0.10, seed=seed)
    cluster.run(100)
    plans = len(cluster.plans)
    seconds = cluster.run(900)
    assert len(cluster.plans) - plans <= 0.06 * 900 / 4  # of the pulses
    assert sum(seconds) / 900 <= 1.05 * 0.058
    assert all(abs(n - best) <= 0.25 * best + 2 for n, best in zip(cluster.shares[-1], (24, 24, 11, 5), strict=True))


def test_equal_ranks_under_noise_stay_even():
    even, plans, seconds = 0, 0, []
    for seed in range(8):
        cluster = Cluster([0.002] * 4, noise=0.10, seed=seed)
        seconds += cluster.run(300)
        even += sum(shares == [16] * 4 for shares in cluster.shares)
        plans += len(cluster.plans)
    assert even >= 0.85 * 8 * 300
    assert plans <= 0.03 * 8 * 300 / 4
    assert sum(seconds) / len(seconds) <= 1.01 * 0.042


def test_equal_ranks_without_noise_never_change():
    cluster = Cluster([0.002] * 5, total=64)
    cluster.run(60)
    assert cluster.plans == []
    assert cluster.shares == [[13, 13, 13, 13, 12]] * 60


def test_whatever_happens_the_global_batch_stays():
    cluster = Cluster(EXAMPLE, total=61, noise=0.1, seed=3)
    for speeds, _ in CHANGES:
        cluster.run(40, speeds)
    assert len(cluster.plans) > 2
    assert {sum(shares) for shares in cluster.shares} == {61}


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


def test_one_plan_at_a_time():
    planner = planner_of(64, 2)
    planner.update(4, [report(0.001, drawn=10.0), report(0.003, drawn=10.0)])
    opposite = [report(0.003, drawn=12.0), report(0.001, drawn=12.0)]
    assert planner.update(9, opposite) is None  # the first has not begun
    assert planner.update(10, opposite) is not None
    assert [planner.shares(s) for s in (10, 11, 12)] == [[48, 16], [48, 16], [16, 48]]


def test_nothing_is_changed_before_every_model_is_ready():
    planner = planner_of(64, 2)
    assert planner.update(4, [report(0.001), report(0.009, error=math.inf)]) is None
    assert planner.update(8, [report(0.001), report(0.009)]) is not None


def test_nothing_is_changed_before_the_batch_is_known():
    assert Planner(2).update(4, [report(0.001), report(0.009)]) is None


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


def test_no_gain_at_all_is_no_reason_to_change():
    planner = planner_of(64, 2, min_gain=0.0)
    assert planner.update(4, [report(0.001), report(0.001)]) is None


def test_the_gain_is_measured_from_the_latest_plan():
    planner = planner_of(64, 2)
    skewed = [report(0.001), report(0.003)]
    assert planner.update(4, skewed) is not None
    assert planner.update(8, skewed) is None


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
    """Update with reports of steps that have all taken so long, under the plan in force; returns the new plan."""
    shares = planner.shares(max(now - 1, 0))
    reports = [
        r._replace(samples=n, compute=seconds, laps=10, since=100.0, drawn=now + 1.0)
        for r, n in zip(costs, shares, strict=True)
    ]
    return planner.update(now, reports)


def until_a_resplit(planner, now, costs, seconds):
    """Updates until there is a new plan."""
    for waited in range(1000):
        if steps(planner, now + waited, costs, seconds) is not None:
            return waited
    raise AssertionError("there was none")


SLOWER = [report(0.001), report(0.0015)]  # even: 48 ms; 39 and 25 samples: 39 ms


def test_before_any_noise_is_known_only_large_gains_count():
    assert 4 <= until_a_resplit(planner_of(64, 2), 0, SLOWER, 0.048) <= 16
    assert until_a_resplit(planner_of(64, 2), 0, [report(0.001), report(0.004)], 0.128) == 0


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


def test_a_resplit_that_makes_steps_shorter_is_kept():
    planner = planner_of(64, 2)
    now = until_a_resplit(planner, 0, SLOWER, 0.048) + 1
    assert all(steps(planner, now + later, SLOWER, 0.039) is None for later in range(40))
    assert planner.shares(now + 40) == [39, 25]


def test_steps_that_became_longer_by_a_change_of_speed_are_no_reason_to_take_the_answer_back():
    planner = planner_of(64, 2)
    now = until_a_resplit(planner, 0, SLOWER, 0.048) + 1
    for later in range(40):
        steps(planner, now + later, SLOWER, 0.039)
    # Both at a third of their speed, and the second at a sixth: the best step is twice as long as it was.
    changed = [report(0.003)._replace(since=0.1), report(0.009)._replace(since=0.1)]
    now += 40
    reports = [r._replace(compute=0.225, laps=10, drawn=now + 1.0, samples=32) for r in changed]
    assert planner.update(now, reports) is not None
    for later in range(1, 40):
        assert (
            planner.update(now + later, [r._replace(compute=0.144, drawn=now + later + 1.0) for r in reports]) is None
        )
    assert planner.shares(now + 40) == [48, 16]


def test_while_a_model_is_not_ready_nothing_changes_not_even_back_to_even():
    planner = planner_of(64, 2)
    assert planner.update(4, [report(0.001), report(0.003)]) is not None
    assert planner.update(8, [report(0.003), report(0.001, error=math.inf)]) is None


def test_a_share_grows_to_twice_what_has_been_seen_at_most():
    planner = planner_of(64, 4)
    fast = [report(0.0001), report(0.01), report(0.01), report(0.01)]
    grown = [planner.shares(planner.update(step, fast).start)[0] for step in (4, 8)]
    assert grown == [32, 61]
    # What has been managed once stays allowed.
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
    # Validation may use larger batches, and a batch sampler of the user's may vary them; the caution about growth
    # is no limit that the user has set.
    shares = skewed_planner().plans[-1].split([size])[0]
    assert sum(shares) == size
    assert min(shares) > 0
    assert size < 1000 or shares[0] > 1.5 * shares[2] > 2 * shares[3]


@pytest.mark.parametrize("low", [0, 1, [1, 20, 1, 7]])
def test_a_plan_splits_tails_of_any_size(low):
    plan = skewed_planner(low=low).plans[-1]
    assert plan.start > 0
    for size in range(65):
        shares = plan.split([size])[0]
        assert sum(shares) == size
        if size >= sum(plan.low):
            assert all(n >= least for n, least in zip(shares, plan.low, strict=True))


def test_after_a_plan_the_batch_size_may_grow():
    planner = skewed_planner()
    planner.expect(640)
    shares = planner.shares(100)
    assert sum(shares) == 640
    assert shares[0] > 1.5 * shares[2] > 2 * shares[3]


def test_a_checkpoint_of_small_batches_can_be_resumed_with_large_ones():
    planner = planner_of(640, 4)
    planner.load_state_dict(skewed_planner().state_dict())
    assert sum(planner.shares(0)) == 640
    planner.update(4, [report(k, 0.010, drawn=6.0) for k in EXAMPLE])
    assert sum(planner.shares(6)) == 640


def test_the_users_upper_limits_hold_for_any_batch():
    plan = skewed_planner(high=40).plans[-1]
    assert max(plan.split([160])[0]) == 40
    with pytest.raises(ShareError, match="at most"):
        plan.split([161])


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
    ("options", "words"),
    [
        ({"balance": [1, 1, 1]}, ["[1, 1, 1]", "3 shares", "4 ranks"]),
        ({"balance": []}, ["0 shares"]),
        ({"balance": [1, 1, 1, math.nan]}, ["nan", "finite"]),
        ({"balance": [1, 1, 1, math.inf]}, ["inf", "finite"]),
        ({"balance": [1, 1, 1, -0.5]}, ["-0.5", "at least 0"]),
        ({"balance": [0, 0, 0, 0]}, ["[0, 0, 0, 0]", "not all 0"]),
        ({"low": [1, 1]}, ["min_batch_size", "[1, 1]", "2 limits", "4 ranks"]),
        ({"high": [8] * 5}, ["max_batch_size", "5 limits"]),
        ({"low": -1}, ["min_batch_size", "-1"]),
        ({"high": [8, 8, 8, -8]}, ["max_batch_size", "-8"]),
        ({"low": [1, 1, 1, 1.5]}, ["min_batch_size", "1.5", "whole"]),
        ({"low": 1.5}, ["min_batch_size", "1.5", "whole"]),
        ({"low": True}, ["min_batch_size", "True", "whole"]),
        ({"balance": [True, 1, 1, 1]}, ["True", "numbers"]),
        ({"balance": ["1", 1, 1, 1]}, ["'1'", "numbers"]),
        ({"low": 9, "high": [9, 9, 9, 8]}, ["min_batch_size=[9, 9, 9, 9]", "max_batch_size=[9, 9, 9, 8]"]),
    ],
)
def test_options_that_cannot_work_are_refused_with_their_values(options, words):
    with pytest.raises(ConfigurationError) as caught:
        Planner(4, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert isinstance(caught.value, HeteroError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("options", "total", "words"),
    [
        ({}, 3, ["3", "4 ranks", "[1, 1, 1, 1]"]),
        ({"low": 17}, 64, ["64", "[17, 17, 17, 17]", "min_batch_size"]),
        ({"high": 15}, 64, ["64", "[15, 15, 15, 15]", "sum 60"]),
        ({"high": [0, 0, 60, 3], "low": 0}, 64, ["64", "sum 63"]),
    ],
)
def test_a_batch_that_the_limits_do_not_admit_is_refused(options, total, words):
    with pytest.raises(ShareError) as caught:
        planner_of(total, 4, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


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
        ({"low": 1}, 64, [31, 31, 1, 1]),  # the user has said otherwise
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


@pytest.mark.parametrize(("value", "shares"), [([1, 2.5], [1.0, 2.5]), ((0, 1), [0.0, 1.0])])
def test_fixed_shares_are_numbers(value, shares):
    assert fixed_shares(value, 2) == shares


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


def test_a_restored_share_grows_no_faster():
    fast = [report(0.0001), report(0.01), report(0.01), report(0.01)]
    saved, restored = planner_of(64, 4), planner_of(64, 4)
    saved.update(4, fast)
    restored.load_state_dict(saved.state_dict())
    assert restored.shares(0)[0] == saved.shares(4)[0] == 32


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
    ("size", "shares"), [(16, [4, 4, 4, 4]), (12, [3, 3, 3, 3]), (8, [2, 2, 2, 2]), (7, [3, 2, 2, 0])]
)
def test_a_tail_asks_for_no_more_than_the_ranks_need(size, shares):
    planner = Planner(4)
    planner.least = 2
    planner.expect(64)
    assert planner.plans[0].split([size]) == [shares]


@pytest.mark.parametrize(
    ("balance", "size", "shares"),
    [
        ([1, 1, 1, 1], 8, [2, 2, 2, 2]),
        ([1, 1, 1, 1], 7, [3, 2, 2, 0]),
        ([1, 1, 1, 1], 5, [3, 2, 0, 0]),
        ([1, 1, 1, 1], 3, [3, 0, 0, 0]),
        ([1, 1, 1, 1], 1, [1, 0, 0, 0]),  # less than anyone's least
        ([1, 1, 2, 4], 7, [2, 0, 2, 3]),
        ([1, 1, 2, 4], 5, [0, 0, 2, 3]),
        ([1, 1, 2, 4], 2, [0, 0, 0, 2]),
    ],
)
def test_where_a_tail_is_too_small_for_all_the_slowest_have_nothing(balance, size, shares):
    assert planner_of(64, 4, balance, low=2).plans[0].split([size]) == [shares]


def test_limits_count_the_samples_of_all_loaders():
    plan = Plan(0, (Cost(0, 1), Cost(0, 1)), (1, 1), (9, 64))
    assert plan.split([32, 16]) == [[6, 26], [3, 13]]  # 9 of rank 0, 39 of rank 1
    with pytest.raises(ShareError):
        Plan(0, (Cost(0, 1), Cost(0, 1)), (0, 0), (9, 9)).split([32, 16])
    for low in (8, 9):  # in steps of two samples and one
        assert Plan(0, (Cost(0, 100), Cost(0, 1)), (low, 1), (64, 64)).split([32, 16]) == [[6, 26], [3, 13]]


def test_times_count_the_samples_of_all_loaders():
    # 30 + 9 seconds and 39 seconds: a fixed cost weighs as much as 30 samples, whatever loader those are from.
    assert Plan(0, (Cost(30, 1), Cost(0, 1)), (0, 0), (64, 64)).split([32, 16]) == [[6, 26], [3, 13]]


def test_the_plan_of_the_step_before_an_update_is_still_known() -> None:
    planner = Planner(2)
    planner.expect(32)
    planner.update(6, [Report(0.0, k, 0.0, 8, 16, 16 * k, 0.0) for k in (1.0, 3.0)])
    before = planner.shares(7)
    planner.update(8, [Report(0.0, k, 0.0, 10, 16, 16 * k, 0.0) for k in (3.0, 1.0)])
    assert planner.shares(7) == before == [16, 16]
    assert planner.shares(8) == [24, 8]
    assert planner.shares(10)[0] < 16
    planner.update(11, [Report(0.0, k, 0.0, 13, 16, 16 * k, 0.0) for k in (1.0, 3.0)])
    with pytest.raises(LookupError, match="the plan of step 0 is no longer known"):
        planner.at(0)
