"""Shares that are right in the mean over the batches of an epoch."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.batching.planner import Plan, Planner, exact_shares, plan_for_survivors, rotating_shares
from lightning_hetero.batching.shares import Cost, split
from lightning_hetero.errors import ShareError

positive = st.floats(0.01, 3.0)
ranks = st.lists(
    st.tuples(st.builds(Cost, st.floats(0.0, 3.0), positive), st.integers(0, 4), st.integers(0, 60)),
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


def test_where_the_same_rank_always_gets_the_rest_it_falls_behind():
    """What `rotating_shares` is there for, by the split that it replaces."""
    alike, limits = [Cost(0.0, 1.0)] * 7, ([1] * 7, [64] * 7)
    assert 100 * split(64, alike, *limits)[0] - 6400 / 7 > 80
    assert abs(sum(rotating_shares(exact_shares(64, alike, *limits), turn)[0] for turn in range(100)) - 6400 / 7) < 4


def test_shares_that_come_out_even_stay():
    plan = Plan(0, (Cost(0.0, 1.0), Cost(0.0, 0.5)), (1, 1), (99, 99))
    assert {tuple(plan.split([12], turn)[0]) for turn in range(50)} == {(4, 8)}


def test_all_loaders_of_a_step_keep_their_proportions():
    plan = Plan(0, (Cost(0.0, 1.0),) * 3, (1,) * 3, (99,) * 3)
    for turn in range(20):
        large, small = plan.split([16, 8], turn)
        assert large == [2 * n for n in small]
        assert sum(small) == 8


def test_a_batch_that_is_too_small_for_all_is_still_whole():
    plan = Plan(0, (Cost(0.0, 1.0), Cost(0.0, 2.0), Cost(0.0, 4.0)), (2, 2, 2), (9, 9, 9))
    for turn in range(20):
        assert sum(plan.split([3], turn)[0]) == 3


@pytest.mark.parametrize("turns", [False, True])
def test_those_that_remain_go_on_in_turn(turns):
    former = Planner(3, "off")
    former.expect(64)
    former.turns, former.origin = turns, 5
    planner = plan_for_survivors(former, [0, 2], Planner(2, "off"))
    planner.expect(63)
    rests = {tuple(planner.at(step).split([63], planner.turn(step))[0]) for step in range(20)}
    assert rests == ({(32, 31), (31, 32)} if turns else {(32, 31)})


def test_limits_that_leave_no_room_are_an_error():
    """Samples would be left out without a word."""
    with pytest.raises(ShareError, match="cannot be split"):
        exact_shares(32, [Cost(0.0, 1.0)] * 10, [0] * 10, [3] * 10)
