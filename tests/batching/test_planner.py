"""The agreed plan, from arbitrary reports: when shares change, and when they stay or go back."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.batching.planner import Planner, Report, plan_for_survivors


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
        r._replace(samples=n, compute=seconds, steps=10, since=100.0, drawn=now + 1.0)
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


def test_a_resplit_that_makes_steps_shorter_is_kept():
    planner = planner_of(64, 2)
    now = until_a_resplit(planner, 0, SLOWER, 0.048) + 1
    assert all(steps(planner, now + later, SLOWER, 0.039) is None for later in range(40))
    assert planner.shares(now + 40) == [39, 25]


def seconds_apart(longest, own, exchange):
    """Seconds of a rank's steps: every eighth one waits for the slower rank, and for an exchange."""
    for step in itertools.count(1):
        yield own + (8 * (longest - own) + exchange if step % 8 == 0 else 0.0)


def kept_apart(seed):
    """Whether a re-split stays that makes steps shorter, where ranks report different steps."""
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
    assert all(map(kept_apart, range(200)))


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
