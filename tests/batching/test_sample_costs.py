"""Costs of samples: their sources, the errors, and the estimates of a rank."""

import json
import math

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from lightning_hetero.batching.cost import CostEvidence, CostModel, SpeedEstimator
from lightning_hetero.batching.plan import Plan
from lightning_hetero.batching.plan_agreement import plan_as_row, plan_from_row
from lightning_hetero.batching.planner import Planner
from lightning_hetero.batching.repartition import plan_for_survivors
from lightning_hetero.batching.reports import Report
from lightning_hetero.batching.sample_costs import SampleCosts, sample_costs_of, stream_costs_of
from lightning_hetero.batching.sampler import Drawn, FixedBatches, Position, ShareSampler
from lightning_hetero.batching.shares import Cost
from lightning_hetero.batching.timer import StepTiming
from lightning_hetero.errors import ConfigurationError, DataError


class Data:
    def __init__(self, samples=4, **more):
        self.samples = samples
        vars(self).update(more)

    def __len__(self):
        return self.samples


def found(dataset, module=None, given=None, rule="additive"):
    """The source, and costs with the least one as 1."""
    costs = sample_costs_of(dataset, module, given, rule)
    return costs and (costs.source, np.round(costs.values / costs.values.min(), 9).tolist())


def by_index(index):
    return 1 + index


ALL = {"sample_costs": [1, 2, 4, 4], "sample_cost": lambda i: [1, 3, 3, 3][i], "lengths": torch.tensor([1, 1, 1, 5])}


def test_who_says_what_samples_cost_in_this_order():
    module = Data(sample_cost=lambda i: [1, 1, 2, 2][i])
    for gone, source, costs in (
        ((), "Data.sample_costs", [1, 2, 4, 4]),
        (("sample_costs",), "Data.sample_cost", [1, 3, 3, 3]),
        (("sample_costs", "sample_cost"), "Data.sample_cost", [1, 1, 2, 2]),  # of the module
    ):
        given = {name: value for name, value in ALL.items() if name not in gone}
        assert found(Data(**given), module, by_index) == (source, costs)
    assert found(Data(lengths=ALL["lengths"]), None, by_index) == ("Data.lengths", [1, 1, 1, 5])
    assert found(Data(), None, by_index) == ("sample_cost of the strategy", [1, 2, 3, 4])
    assert found(Data(), None, [2, 2, 2, 4]) == ("sample_cost of the strategy", [1, 1, 1, 2])
    assert found(Data(**ALL), module, by_index, "samples") is None
    assert found(Data()) is None
    assert found(Data(lengths=lambda: 4)) is None  # of another meaning


def test_a_subset_has_the_costs_of_its_samples():
    whole = Data(6, lengths=[1, 2, 3, 4, 5, 6])
    assert found(Subset(Subset(whole, [5, 3, 1, 0]), [0, 3])) == ("Data.lengths", [6, 1])
    assert found(Subset(Data(6, sample_cost=by_index), [4, 0])) == ("Data.sample_cost", [5, 1])


def test_samples_that_cost_the_same_are_counted():
    assert found(Data(lengths=[7, 7, 7, 7])) is None


def test_a_mean_sample_costs_one_and_none_costs_nothing():
    costs = sample_costs_of(Data(lengths=[0, 2, 6, 4]), None, None, "additive")
    assert costs.values.tolist() == [0.001, 2 / 3, 2.0, 4 / 3]
    assert costs.together([1, 2]) == pytest.approx(8 / 3)
    assert costs.cheapest_first([2, 0, 1]) == [0, 1, 2]
    padded = sample_costs_of(Data(lengths=[0, 2, 6, 4]), None, None, "padded")
    assert padded.together([1, 2]) == 4.0
    assert padded.together([]) == 0.0


@pytest.mark.parametrize(
    ("options", "rule", "words"),
    [
        ({"lengths": [1, 2, -3, 4]}, "additive", "Data.lengths: sample 2 costs -3; costs are finite numbers of at"),
        ({"sample_costs": [1, math.nan, 3, 4]}, "additive", "Data.sample_costs: sample 1 costs nan"),
        ({"sample_costs": [1, 2, 3, math.inf]}, "additive", "sample 3 costs inf"),
        ({"lengths": [1, 2, 3]}, "additive", "Data.lengths has 3 costs for 4 samples: give one for each"),
        ({"lengths": [[1, 2], [2, 3]]}, "additive", "2x2 costs for 4 samples"),
        ({"lengths": [0, 0, 0, 0]}, "additive", "all 4 samples cost 0, so there is nothing to deal by"),
        ({"sample_costs": ["a", "b", "c", "d"]}, "additive", "Data.sample_costs is no sequence of numbers"),
        ({"sample_cost": lambda i: {}[i]}, "additive", "Data.sample_cost gives no number for sample 0: KeyError: 0"),
        ({"lengths": [1, 2.5, 3, 4]}, "padded", "whole numbers, but Data.lengths says 2.5 for sample 1"),
    ],
)
def test_costs_that_cannot_be_used(options, rule, words):
    with pytest.raises(DataError, match=words):
        found(Data(**options), rule=rule)


def test_padded_without_lengths():
    with pytest.raises(ConfigurationError, match="cost='padded' needs the length of each sample, and Data does not"):
        found(Data(), rule="padded")


def test_a_sampler_that_yields_no_indices_of_the_dataset():
    costs = sample_costs_of(Data(lengths=[1, 2, 3, 4]), None, None, "additive")
    for batch in ([1, 4], ["a"]):
        with pytest.raises(DataError, match=r"Data\.lengths knows samples 0 to 3"):
            costs.of(batch)


def test_the_samples_of_a_stream_are_asked_as_they_come():
    costs = stream_costs_of(Data(sample_cost=len), None, "padded")
    assert (costs.source, costs.padded) == ("Data.sample_cost", True)
    assert costs.of(["ab", "abcd", ""], 7).values.tolist() == [1.0, 2.0, 0.001]
    assert costs.of(["", ""], 7).values.tolist() == [1.0, 1.0]
    assert stream_costs_of(Data(), len, "additive").source == "sample_cost of the strategy"
    assert stream_costs_of(Data(lengths=[1, 2, 3, 4]), None, "additive") is None  # in which order?
    assert stream_costs_of(Data(sample_cost=len), None, "samples") is None
    for given, rule in (([1, 2, 3, 4], "additive"), (None, "padded")):
        with pytest.raises(ConfigurationError, match=r"has `sample_cost\(sample\)`"):
            stream_costs_of(Data(), given, rule)
    with pytest.raises(DataError, match="gives no number for sample 8: TypeError"):
        costs.of(["ab", 3], 7)
    with pytest.raises(DataError, match=r"says 1\.5 for sample 8"):
        stream_costs_of(Data(), float, "padded").of([1.0, 1.5], 7)


# -- what a sampler draws ------------------------------------------------------------------------------


def ranks_that_draw(world, plans, costs, samples, position):
    def cut(sampler, step, in_epoch, batch):
        plan = next(plan for plan in reversed(plans) if plan.start <= step)
        order, shares = costs.deal(plan, batch)
        return order, shares, plan.pass_sizes(shares)

    return [
        ShareSampler(FixedBatches(range(samples), 12, False), rank, range(world), lambda: position, cut, costs)
        for rank in range(world)
    ]


@pytest.mark.parametrize("padded", [False, True])
def test_ranks_draw_the_same_global_batches_and_a_resumed_epoch_its_rest(padded):
    values = np.random.default_rng(3).integers(1, 30, 41).astype(float)
    costs = SampleCosts("here", values / values.mean(), padded, "")
    high, low = (99,) * 3, (1, 1, 1)
    plans = [Plan(0, (Cost(0.1, 1.0), Cost(0.0, 2.0), Cost(0.0, 9.0)), low, high)]
    plans.append(Plan(2, (Cost(0.1, 3.0), Cost(0.0, 1.0), Cost(0.0, 9.0)), low, high))
    whole = [list(sampler) for sampler in ranks_that_draw(3, plans, costs, 41, Position(0, 0, 0))]
    samplers = ranks_that_draw(3, plans, costs, 41, Position(0, 0, 0))
    drawn = [[sampler.drawn.popleft() for _ in sampler] for sampler in samplers]
    for step in range(4):
        own = [part[step] for part, records in zip(whole, drawn, strict=True) if records[step].samples]
        batch = [*range(12 * step, min(12 * step + 12, 41))]
        assert [i for part in own for i in part] == costs.deal(plans[step >= 2], batch)[0]
        assert sorted(i for part in own for i in part) == batch
        for part, records in zip(whole, drawn, strict=True):
            units = costs.values[part[step]]
            assert records[step].cost == pytest.approx(len(units) * units.max() if padded else units.sum())
            assert records[step].total == min(12, 41 - 12 * step)
    assert sum(costs.values[whole[0][1]]) > sum(costs.values[whole[1][1]])
    assert sum(costs.values[whole[0][2]]) < sum(costs.values[whole[1][2]])  # speeds have changed
    rest = [list(sampler) for sampler in ranks_that_draw(3, plans, costs, 41, Position(0, 2, 2))]
    assert rest == [part[2:] for part in whole]


def test_a_rank_without_samples_pads_with_the_cheapest():
    costs = SampleCosts("here", np.array([9.0, 3.0, 1.0, 8.0]), False, "")
    plans = [Plan(0, (Cost(0.0, 1.0), Cost(0.0, 1.0)), (0, 0), (9, 0))]
    [_, idle] = ranks_that_draw(2, plans, costs, 4, Position(0, 0, 0))
    assert list(idle) == [[2]]
    assert idle.drawn[0] == Drawn(0, 4, {0: 4, 1: 0}, 1.0)


# -- what a rank learns --------------------------------------------------------------------------------


def steps_of(kind, seed=0, count=200):
    """Cost, samples and seconds of steps; seconds follow the cost, or the samples."""
    draw = np.random.default_rng(seed)
    cost, samples = 16 * draw.uniform(0.9, 1.1, count), draw.integers(8, 25, count)
    size = {"cost": cost, "samples": samples, "neither": np.full(count, 16.0)}[kind]
    return zip(cost, samples, (0.1 + 0.01 * size) * draw.normal(1, 0.02, count), strict=True)


@pytest.mark.parametrize("kind", ["cost", "samples", "neither"])
def test_evidence_tells_what_explains_times(kind):
    evidence = CostEvidence()
    for number, (cost, samples, seconds) in enumerate(steps_of(kind)):
        assert (evidence.off() == (0.0, 0.0)) == (number < CostEvidence.GROUP * CostEvidence.ENOUGH)
        evidence.observe(cost, samples, seconds * (5 if number % 20 == 7 else 1))  # and some stalls
    by_cost, by_samples = evidence.off()
    if kind == "cost":
        assert by_cost < 0.025 < 2 * by_cost < by_samples
    elif kind == "samples":
        assert by_samples < 0.025 < 4 * by_samples < by_cost
    else:
        assert by_cost == pytest.approx(by_samples, rel=0.3)


def report(off_by_cost=0.0, off_by_samples=0.0, k=1.0):
    return Report(0.0, k, 0.01, 8.0, 16, 16 * k, 0.0, 4, off_by_cost=off_by_cost, off_by_samples=off_by_samples)


@pytest.mark.parametrize(
    ("reports", "left"),
    [
        ([(0.30, 0.02), (0.01, 0.02), (0.0, 0.0)], True),
        ([(0.30, 0.02), (0.0, 0.0), (0.0, 0.0)], False),  # most do not know
        ([(0.30, 0.25), (0.30, 0.25), (0.30, 0.25)], False),  # neither explains much
        ([(0.04, 0.01), (0.04, 0.01), (0.04, 0.01)], False),  # it hardly matters
        ([(0.01, 0.30), (0.01, 0.30), (0.01, 0.30)], False),
    ],
)
def test_costs_that_explain_less_than_samples_are_left(reports, left):
    planner = Planner(3)
    planner.expect(48)
    made = planner.update(4, [report(*off) for off in reports])
    assert (made is not None and made.by_samples) == left
    assert planner.at(8).by_samples == left
    assert not planner.at(7).by_samples
    if left:  # for good, also where the run is resumed, and where shares move
        planner.update(8, [report(*off, k=k) for off, k in zip(reports, (1.0, 1.0, 3.0), strict=True)])
        assert planner.plans[-1].split([48])[0] != [16, 16, 16]
        assert planner.plans[-1].by_samples
        resumed = Planner(3)
        resumed.load_state_dict(planner.state_dict())
        assert resumed.plans[0].by_samples
        assert plan_for_survivors(planner, [0, 2], Planner(2)).plans[0].by_samples
        plan = planner.plans[-1]
        assert plan_from_row(json.loads(json.dumps(plan_as_row(plan)))) == plan


def test_fixed_shares_stay_by_cost():
    planner = Planner(3, [1.0, 2.0, 1.0])
    planner.expect(48)
    assert planner.update(4, [report(0.3, 0.01)] * 3) is None


class Simulated:
    """Ranks that take `a + k * cost` seconds for their part, learn that, and are dealt batches by it."""

    def __init__(self, truth, learns):
        draw = np.random.default_rng(1)
        raw = np.ceil(draw.lognormal(4, 1.0, 64 * 300))
        self.costs = sample_costs_of(Data(len(raw), lengths=raw), None, None, "additive")
        self.truth, self.learns, self.noise = truth, learns, draw
        self.planner = Planner(len(truth))
        self.planner.expect(64)
        self.models = [CostModel() for _ in truth]
        self.evidence = [SpeedEstimator() for _ in truth]

    def run(self, steps):
        """Seconds of each step, relative to those of samples that can be cut, which are the least possible."""
        found, reports = [], None
        for step in range(steps):
            if reports:
                self.planner.update(step, reports)
            batch = list(range(64 * step, 64 * step + 64))
            dealt, counts = self.costs.deal(self.planner.at(step), batch)
            parts = np.split(np.array(dealt), np.cumsum(counts)[:-1])
            sizes = [self.costs.together(part.tolist()) for part in parts]
            times = [cost.seconds(size) for cost, size in zip(self.truth, sizes, strict=True)]
            speeds = [1 / cost.per_sample for cost in self.truth]
            ahead = sum(cost.fixed * speed for cost, speed in zip(self.truth, speeds, strict=True))
            found.append(max(times) * sum(speeds) / (sum(sizes) + ahead))
            reports = []
            for i, (model, evidence) in enumerate(zip(self.models, self.evidence, strict=True)):
                size, work = (sizes if self.learns else counts)[i], times[i] * self.noise.normal(1, 0.02)
                model.observe(size, work)
                evidence.observe(StepTiming(size, work, max(times) - times[i], 0, 0, 0, False, False, 1), model.cost)
                speed = evidence.speed(model.cost)
                error = speed.noise if model.ready else math.inf
                values = (*speed.cost[:2], error, step + 2, counts[i], work, max(times) - work, 1, speed.since)
                reports.append(Report(*values))
        return found


def test_ranks_learn_seconds_per_unit_of_cost():
    truth = [Cost(0.1, 0.02), Cost(0.05, 0.01), Cost(0.2, 0.005), Cost(0.1, 0.04)]
    found = Simulated(truth, learns=True).run(300)
    assert np.mean(found[:4]) > 1.5
    assert np.mean(found[-100:]) < 1.035  # 1.05 with seconds per sample
