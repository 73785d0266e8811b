"""A plan splits the batches of a step, of one loader or several."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_planner import planner_of

from lightning_hetero.batching.planner import Plan, Planner, PlanningState, Report
from lightning_hetero.batching.shares import Cost
from lightning_hetero.errors import ShareError

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


def test_a_rank_that_is_behind_learns_plans_without_forgetting_by_which_it_still_draws() -> None:
    """When ranks are lost, it learns from one that is ahead."""
    ahead, behind = Planner(2), Planner(2)
    for planner in (ahead, behind):
        planner.expect(32)
    for start in (50, 150):
        ahead.adopt(replace(ahead.at(0), start=start))
    PlanningState.of(ahead).apply_to(behind)
    assert [behind.at(step).start for step in (40, 120, 160)] == [0, 50, 150]
