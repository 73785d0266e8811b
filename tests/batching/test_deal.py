"""Deals by cost, against all assignments of small batches, and against bounds for large ones."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.batching.deal import Machines, deal_additive, deal_padded
from lightning_hetero.batching.plan import Plan
from lightning_hetero.batching.sample_costs import BatchCosts, SampleCosts, machines_of
from lightning_hetero.batching.shares import Cost

DEALS = {"additive": deal_additive, "padded": deal_padded}


def parts_of(costs, ranks, rule, world):
    """Cost and number of samples of each rank; a column for each assignment."""
    counts = np.stack([(ranks == rank).sum(0) for rank in range(world)])
    loads = []
    for rank in range(world):
        own = np.where(ranks == rank, costs[:, None], 0.0)
        loads.append(own.sum(0) if rule == "additive" else own.max(0) * counts[rank])
    return np.stack(loads), counts


def seconds_of(costs, ranks, rule, machines):
    """Seconds of the slowest rank for each assignment; infinite if it exceeds a limit."""
    loads, counts = parts_of(costs, ranks, rule, len(machines.fixed))
    seconds = (machines.fixed[:, None] + machines.per_unit[:, None] * loads).max(0)
    kept = (counts >= machines.low[:, None]) & (counts <= machines.high[:, None])
    return np.where(kept.all(0), seconds, np.inf)


def every_assignment(samples, world):
    return np.indices((world,) * samples, dtype=np.int8).reshape(samples, -1)


def small_case(draw):
    """Random costs and machines: up to 4 ranks and 10 samples, with limits, ranks without samples, and fixed costs."""
    world, samples = draw.randint(1, 4), draw.randint(1, 10)
    while True:
        low = [draw.choice([0, 0, 1, 1, 2]) for _ in range(world)]
        high = [draw.choice([0, 2, 4, 10, 10]) for _ in range(world)]
        if sum(low) <= samples <= sum(high) and all(a <= b for a, b in zip(low, high, strict=True)):
            break
    fixed = [draw.choice([0.0, 1.0, draw.uniform(0, 20)]) for _ in range(world)]
    per_unit = [draw.choice([1.0, 2.0, draw.uniform(0.2, 5)]) for _ in range(world)]
    make = draw.choice(
        [
            lambda: draw.randint(1, 30),
            lambda: round(draw.lognormvariate(3, 1)) + 1,
            lambda: draw.choice([1, 2, 10]),
        ]
    )
    return np.array([float(make()) for _ in range(samples)]), Machines.of(fixed, per_unit, low, high)


@pytest.mark.parametrize("rule", DEALS)
def test_small_batches_are_dealt_as_well_as_can_be(rule):
    draw, gaps = random.Random(16), []
    for _ in range(500):
        costs, machines = small_case(draw)
        best = seconds_of(costs, every_assignment(len(costs), len(machines.fixed)), rule, machines).min()
        ours = seconds_of(costs, DEALS[rule](costs, machines)[:, None], rule, machines)[0]
        gaps.append(ours / best - 1)
    if rule == "padded":
        assert max(gaps) <= 1e-12
    assert np.mean([gap <= 0.02 for gap in gaps]) >= 0.99
    assert max(gaps) >= -1e-12


@st.composite
def cases(draw):
    world, samples = draw(st.integers(1, 12)), draw(st.integers(1, 150))
    costs = draw(st.lists(st.integers(0, 60), min_size=samples, max_size=samples))
    low = draw(st.lists(st.integers(0, samples // world), min_size=world, max_size=world))
    high = [least + draw(st.integers(0, samples)) for least in low]
    high[0] += max(samples - sum(high), 0)
    fixed = draw(st.lists(st.sampled_from([0.0, 0.5, 30.0]), min_size=world, max_size=world))
    per_unit = draw(st.lists(st.sampled_from([0.01, 1.0, 1.1, 7.0]), min_size=world, max_size=world))
    return np.array(costs, float), Machines.of(fixed, per_unit, low, high)


@given(cases(), st.sampled_from(sorted(DEALS)))
@settings(max_examples=200)
def test_each_sample_goes_to_one_rank_within_its_limits(case, rule):
    costs, machines = case
    ranks = DEALS[rule](costs, machines)
    assert ranks.shape == costs.shape
    assert np.isfinite(seconds_of(costs, ranks[:, None], rule, machines)[0])
    assert (DEALS[rule](costs.copy(), machines) == ranks).all()


@pytest.mark.parametrize("limits", [{}, {"low": [8] * 64}, {"low": [1] * 64, "high": [70] * 64}])
def test_large_batches_come_near_the_bound(limits):
    draw = np.random.default_rng(0)
    costs, speeds = np.ceil(draw.lognormal(4, 0.8, 4096)), draw.choice([1.0, 2.0, 4.0], 64) * draw.uniform(0.9, 1.1, 64)
    machines = Machines.of(draw.uniform(0, 50, 64), 1 / speeds, **limits)
    ours = seconds_of(costs, deal_additive(costs, machines)[:, None], "additive", machines)[0]
    if "high" in limits:  # equal numbers of samples, nearly; the fast ranks have the long ones
        assert ours < 1.5 * (costs.sum() + (machines.fixed * speeds).sum()) / speeds.sum()
    else:  # samples that can be cut
        assert ours < 1.002 * (costs.sum() + (machines.fixed * speeds).sum()) / speeds.sum()


def test_many_ranks_take_padded_runs_by_speed():
    """With too many ranks to try all orders, the result is near the bound of divisible samples, without padding."""
    draw = np.random.default_rng(0)
    lengths, speeds = np.ceil(draw.lognormal(4, 0.5, 1024)), draw.choice([1.0, 4.0], 32)
    machines = Machines.of([0.0] * 32, 1 / speeds, [1] * 32)
    ours = seconds_of(lengths, deal_padded(lengths, machines)[:, None], "padded", machines)[0]
    drawn = np.repeat(np.arange(32), np.round(1024 * speeds / speeds.sum()).astype(int))[:1024]
    drawn = np.pad(drawn, (0, 1024 - len(drawn)), constant_values=int(speeds.argmax()))
    unsorted = seconds_of(lengths, drawn[:, None], "padded", Machines.of([0.0] * 32, 1 / speeds))[0]
    assert ours < 1.15 * lengths.sum() / speeds.sum() < 0.5 * unsorted


# -- by a plan ---------------------------------------------------------------------------------------


def costs_of(values, padded=False):
    return SampleCosts("here", np.array(values, float), padded, "")


def test_a_deal_by_a_plan_is_the_batch_in_another_order():
    plan = Plan(0, (Cost(0.0, 1.0), Cost(0.0, 2.0)), (1, 1), (9, 9))
    samples, counts = costs_of([4, 1, 2, 2, 9]).deal(plan, [3, 0, 2, 1])
    assert (samples, counts) == ([0, 2, 3, 1], [2, 2])  # 6 units, and 3 for the rank that is half as fast


def test_a_rank_is_not_dealt_far_more_than_it_is_trusted_with():
    costs = (Cost(0.0, 1.0), Cost(0.0, 50.0))
    counts = [
        costs_of([1, 1.5] * 32).deal(Plan(0, costs, (0, 0), (99, 99), reach), range(64))[1]
        for reach in ((), (0.5, 1.0), (1.0, 1.0))
    ]
    assert counts[0] == counts[2]
    assert counts[0][0] > 60
    assert counts[1][0] == pytest.approx(32, abs=1)


def test_a_curve_counts_as_the_line_through_its_time_at_the_share():
    curve = Cost(1.0, 1.0, ((4.0, 3.0),))
    machines = machines_of(Plan(0, (curve, curve), (0, 0), (99, 99)), 20)
    assert machines.per_unit == pytest.approx([(10 + 3 * 6) / 10] * 2)


def test_a_tail_that_is_too_small_for_all_leaves_the_slowest_out():
    plan = Plan(0, (Cost(0.0, 1.0), Cost(0.0, 3.0), Cost(0.0, 2.0)), (1, 1, 1), (9, 9, 9))
    assert costs_of([1, 5]).deal(plan, [0, 1])[1] == [1, 0, 1]


def test_what_limits_leave_no_room_for_runs_in_passes():
    plan = Plan(0, (Cost(0.0, 1.0), Cost(0.0, 1.0)), (1, 1), (2, 2))
    order, parts = costs_of([1, 2, 3, 4, 5]).deal(plan, range(5))
    assert sorted(order) == list(range(5))
    assert sorted(parts) == [2, 3]


# -- batches that stay whole -------------------------------------------------------------------------


def test_whole_batches_are_dealt_as_well_as_can_be():
    draw, gaps = random.Random(5), []
    for _ in range(200):
        world, number = draw.randint(1, 4), draw.randint(1, 8)
        values = [float(draw.randint(1, 30)) for _ in range(40)]
        costs = draw.choice([BatchCosts(costs_of(values, draw.random() < 0.5), 0.0), BatchCosts(None, 7.0)])
        batches = [draw.sample(range(40), draw.randint(1, 6)) for _ in range(number)]
        speeds = [draw.choice([1.0, 2.0, draw.uniform(0.5, 8)]) for _ in range(world)]
        plan = Plan(0, tuple(Cost(0.0, k) for k in speeds), (1,) * world, (2**62,) * world)
        order, counts = costs.deal(plan, batches)
        assert sorted(order) == sorted(batches)
        owner = np.repeat(np.arange(world), counts)
        of_each = np.array([costs.of(batch) for batch in order])
        machines = Machines.of([0.0] * world, speeds)
        ours = seconds_of(of_each, owner[:, None], "additive", machines)[0]
        gaps.append(ours / seconds_of(of_each, every_assignment(number, world), "additive", machines).min() - 1)
    assert np.mean([gap <= 0.02 for gap in gaps]) >= 0.99


def test_a_rank_may_have_no_whole_batch_and_runs_the_smallest_as_padding():
    plan = Plan(0, (Cost(0.5, 0.5), Cost(4.0, 4.0)), (1, 1), (9, 9))
    alike = BatchCosts(None, 3.0)
    assert alike.deal(plan, [[0, 1, 2], [3, 4], [5]]) == ([[0, 1, 2], [3, 4], [5]], [3, 0])
    assert alike.deal(replace(plan, high=(0, 9)), [[0, 1, 2]]) == ([[0, 1, 2]], [0, 1])
    assert alike.padded_if_empty([], [[0, 1, 2], [3, 4], [5]], 2) == ([[5, 5]], 3.0)
    assert alike.padded_if_empty([[3, 4], [5]], [], 2) == ([[3, 4], [5]], 6.0)
    by_samples = BatchCosts(None, 0.0)
    assert [by_samples.of([3, 4]), by_samples.deal(plan, [[0, 1, 2]])] == [2.0, ([[0, 1, 2]], [1, 0])]
    known = BatchCosts(costs_of([1, 2, 4], padded=True), 0.0)
    assert known.padded_if_empty([], [[0, 1, 2], [2, 1]], 1) == ([[2]], 4.0)


def test_whole_batches_are_dealt_by_samples_where_costs_explain_nothing():
    plan = Plan(0, (Cost(0.0, 1.0), Cost(0.0, 1.0)), (1, 1), (9, 9), by_samples=True)
    assert BatchCosts(None, 3.0).deal(plan, [[0, 1, 2, 3], [4, 5], [6, 7]])[1] == [1, 2]
