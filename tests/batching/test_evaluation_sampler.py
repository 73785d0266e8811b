"""Evaluation sees every sample once, whatever the plan."""

import math
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_sampler import order_of

from lightning_hetero.batching.planner import Plan, Planner, Report
from lightning_hetero.batching.sampler import EvaluationSampler, EvenBatches, GroupedBatches
from lightning_hetero.batching.shares import Cost
from lightning_hetero.errors import ShareError

# -- evaluation --------------------------------------------------------------------------------------


@st.composite
def plans(draw):
    world = draw(st.integers(1, 6))
    costs = tuple(Cost(draw(st.floats(0, 1)), draw(st.sampled_from([1e-3, 1e-2, 1.0]))) for _ in range(world))
    low = tuple(draw(st.integers(0, 6)) for _ in range(world))
    high = (2**62,) * world
    if draw(st.booleans()):  # a rank that trains on nothing
        low, high = (0, *low[1:]), (0, *high[1:])
        if world == 1:
            high = (2**62,)
    return Plan(0, costs, low, high)


def even_plan(world):
    return Plan(0, (Cost(0, 1),) * world, (1,) * world, (2**62,) * world)


@given(plans(), st.integers(1, 150), st.integers(1, 40))
@example(even_plan(4), 5, 4)  # batches of 3 and 2 would leave the last rank out
@example(even_plan(6), 7, 3)
@settings(max_examples=300)
def test_evaluation_sees_every_sample_once(plan, samples, batch_size):
    world = len(plan.costs)
    batches = EvenBatches(order_of(samples), batch_size, world)
    samplers = [EvaluationSampler(batches, rank, world, lambda: plan) for rank in range(world)]
    drawn = [list(sampler) for sampler in samplers]
    assert Counter(i for rank in drawn for batch in rank for i in batch) == Counter(range(samples))
    assert all(batch for rank in drawn for batch in rank)
    counts = [len(rank) for rank in drawn]
    assert counts == [len(sampler) for sampler in samplers]
    if min(batches.size(i) for i in range(len(batches))) >= world:
        assert counts == [len(batches)] * world
    if samples >= world:
        assert min(counts) >= 1  # a rank without a batch would not run the epoch's end with the others


def test_evaluation_is_split_by_speed():
    plan = Plan(0, tuple(Cost(0, k) for k in (1, 2, 4)), (1, 1, 1), (99, 99, 99))
    batches = EvenBatches(range(70), 35, 3)
    sizes = [[len(b) for b in EvaluationSampler(batches, rank, 3, lambda: plan)] for rank in range(3)]
    assert sizes == [[20, 20], [10, 10], [5, 5]]


def test_evaluation_asks_for_the_plan_of_the_moment():
    plans = [Plan(0, (Cost(0, 1), Cost(0, k)), (1, 1), (99, 99)) for k in (1, 3)]
    sampler = EvaluationSampler(EvenBatches(range(8), 8, 2), 0, 2, lambda: plans.pop(0))
    assert [[len(b) for b in sampler] for _ in range(2)] == [[4], [6]]


def test_evaluation_goes_on_after_training_has_adapted():
    # Training uses batches of 64, evaluation of 1000. That no rank has been seen to manage so much must not stop it.
    planner = Planner(4)
    planner.expect(64)
    reports = [Report(0.01, k, 0.01, 6, 16, 0, 0) for k in (0.002, 0.002, 0.004, 0.008)]
    assert planner.update(4, reports) is not None
    batches = EvenBatches(range(3000), 1000, 4)
    drawn = [list(EvaluationSampler(batches, rank, 4, lambda: planner.plans[-1])) for rank in range(4)]
    assert sorted(i for rank in drawn for batch in rank for i in batch) == list(range(3000))
    assert [len(rank) for rank in drawn] == [3] * 4


@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_with_a_batch_sampler_of_the_users(world):
    parts = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]]
    plan = Planner(world).plans[0]
    batches = GroupedBatches(parts, world)
    drawn = [list(EvaluationSampler(batches, rank, world, lambda: plan)) for rank in range(world)]
    assert sorted(i for rank in drawn for batch in rank for i in batch) == list(range(11))
    assert len(drawn[0]) == len(EvaluationSampler(batches, 0, world, lambda: plan)) == math.ceil(5 / world)


def test_limits_that_were_found_in_training_grow_with_larger_batches():
    planner = Planner(2, "off")
    planner.expect(24)
    planner.limit([9, 18])
    batches = EvenBatches(order_of(54), 54, 2)

    def drawn(grows):
        samplers = [EvaluationSampler(batches, r, 2, lambda: planner.plans[-1], lambda: grows) for r in range(2)]
        return [list(sampler) for sampler in samplers]

    assert [len(part) for rank in drawn(planner.found) for part in rank] == [18, 36]
    assert sorted(i for rank in drawn(planner.found) for part in rank for i in part) == [*range(54)]
    with pytest.raises(ShareError, match="54 samples cannot be split"):
        drawn(False)  # limits that the user has given are limits here, too
