"""All ranks of a job in one process: they draw and evaluate together the samples that one process would draw."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_hetero.batching.plan import Plan
from lightning_hetero.batching.planner import Planner
from lightning_hetero.batching.sampler import (
    EvaluationSampler,
    EvenBatches,
    FixedBatches,
    GroupedBatches,
    Position,
    ShareSampler,
    check_enough,
)
from lightning_hetero.batching.shares import Cost
from lightning_hetero.errors import DataError, ShareError


def order_of(samples, epoch=0):
    """A global order that depends on the epoch, the same on every rank; Lightning puts this sampler in."""
    sampler = DistributedSampler(range(samples), num_replicas=1, rank=0, seed=3)
    sampler.set_epoch(epoch)
    return sampler


def one_process(samples, batch_size, drop_last, epoch):
    return list(BatchSampler(order_of(samples, epoch), batch_size, drop_last))


class Rank:
    """A rank: its sampler, and the position of the training."""

    def __init__(self, rank, planner, samples, batch_size, drop_last=False, replica=None):
        self.position = Position(0, 0, 0)
        self.asked = []  # (step, batch in the epoch, size) of every split
        self.planner = planner
        self.sampler = ShareSampler(
            FixedBatches(order_of(samples), batch_size, drop_last),
            rank,
            replica or range(planner.world),
            lambda: self.position,
            self.cut,
        )

    def cut(self, sampler, step, in_epoch, batch):
        assert sampler is self.sampler
        self.asked.append((step, in_epoch, len(batch)))
        plan = self.planner.at(step)
        shares = plan.split([len(batch)])[0]
        return batch, shares, plan.pass_sizes(shares)

    def go_to(self, epoch, batch=0, step=None):
        self.position = Position(epoch, batch, epoch * len(self.sampler) + batch if step is None else step)

    def run(self):
        """Iterate over the rest of the epoch: pairs of a batch and the sampler's record of it."""
        return [(batch, self.sampler.drawn.popleft()) for batch in self.sampler]


def check_together(parts, reference):
    """Check that ``parts[rank][step]`` make up the reference's batches exactly."""
    assert {len(steps) for steps in parts} == {len(reference)}  # the same number of steps on every rank
    for step, batch in enumerate(reference):
        together = []
        for own, drawn in (steps[step] for steps in parts):
            if drawn.samples == 0:
                assert len(own) == 1  # a padding batch, which must have a sample for the model
                assert own[0] in batch
            else:
                assert len(own) == drawn.samples
                together += own
        assert together == batch
        assert {drawn.total for _, drawn in (steps[step] for steps in parts)} == {len(batch)}


@st.composite
def jobs(draw):
    """A planner of up to 5 ranks, of which the plan changes at some steps; samples, batch size, drop_last."""
    world = draw(st.integers(1, 5))
    planner = Planner(world)
    costs = st.lists(
        st.builds(Cost, st.floats(0, 1), st.sampled_from([0.01, 0.1, 1.0]), st.just(())), min_size=world, max_size=world
    )
    starts = sorted(draw(st.sets(st.integers(1, 40), max_size=4)))
    planner.plans = [
        Plan(start, tuple(draw(costs)), (draw(st.integers(0, 2)),) * world, (2**62,) * world) for start in [0, *starts]
    ]
    return planner, draw(st.integers(1, 90)), draw(st.integers(1, 24)), draw(st.booleans())


# -- an epoch ----------------------------------------------------------------------------------------


@given(jobs())
@settings(max_examples=200)
def test_the_ranks_draw_together_what_one_process_draws(job):
    planner, samples, batch_size, drop_last = job
    ranks = [Rank(rank, planner, samples, batch_size, drop_last) for rank in range(planner.world)]
    for epoch in range(3):
        reference = one_process(samples, batch_size, drop_last, epoch)
        parts = []
        for rank in ranks:
            rank.go_to(epoch)
            assert len(rank.sampler) == len(reference)
            parts.append(rank.run())
        check_together(parts, reference)
        seen = Counter(i for steps in parts for own, drawn in steps if drawn.samples for i in own)
        assert set(seen.values()) <= {1}
        assert len(seen) == (samples // batch_size * batch_size if drop_last else samples)


def test_the_total_is_that_of_the_replica():
    planner = Planner(4, [4, 2, 1, 1])
    parts = [Rank(r, planner, 22, 16, replica=(0, 1) if r < 2 else (2, 3)).run() for r in range(4)]
    assert [[(d.samples, d.total) for _, d in steps] for steps in parts] == [
        [(8, 12), (3, 4)],  # the tail has 6 samples, not 16
        [(4, 12), (1, 4)],
        [(2, 4), (1, 2)],
        [(2, 4), (1, 2)],
    ]
    assert [d.parts for _, d in parts[1]] == [{0: 8, 1: 4}, {0: 3, 1: 1}]


def test_a_padding_batch_has_as_many_samples_as_the_model_needs():
    planner = Planner(3, [1, 0, 1])
    rank = Rank(1, planner, 9, 4)
    rank.sampler.padding = 2  # BatchNorm, for one, cannot train on a single sample
    (first, _, tail), drawn = zip(*rank.run(), strict=True)
    reference = one_process(9, 4, False, 0)
    assert first == reference[0][:2]
    assert tail == reference[2] * 2  # the tail is a single sample
    assert [d.samples for d in drawn] == [0, 0, 0]


# -- resuming ----------------------------------------------------------------------------------------


@given(jobs(), st.integers(0, 2), st.data())
@settings(max_examples=150)
def test_resuming_within_an_epoch_gives_exactly_the_rest(job, epoch, data):
    planner, samples, batch_size, drop_last = job
    reference = one_process(samples, batch_size, drop_last, epoch)
    done = data.draw(st.integers(0, max(len(reference) - 1, 0)))
    step = data.draw(st.integers(0, 50))  # an earlier fit may have counted other steps
    parts = []
    for r in range(planner.world):
        rank = Rank(r, planner, samples, batch_size, drop_last)
        rank.go_to(epoch, done, step)
        parts.append(rank.run())
        batches = range(done, len(reference))
        assert rank.asked == [(step + i - done, i, len(reference[i])) for i in batches]
    check_together(parts, reference[done:])


# -- shorter loaders, epochs cut short -----------------------------------------------------------------


@pytest.mark.parametrize("known", [6, 0])  # whether Lightning still tells the batches of the resumed epoch
def test_a_shorter_loader_resumes_where_it_was(known):
    rank = Rank(0, Planner(1), 12, 4)
    rank.go_to(0, 5, step=5)  # in its second round, with one batch of three to go
    steps = rank.run()
    rank.go_to(0, known, step=6)
    steps += rank.run()
    reference = one_process(12, 4, False, 0)
    check_together([steps], [reference[2], *reference])
    assert [a[:2] for a in rank.asked] == [(5, 5), (6, 6), (7, 7), (8, 8)]


def test_what_was_drawn_ahead_of_a_cut_epoch_is_void():
    rank = Rank(0, Planner(1), 40, 8)
    iterator = iter(rank.sampler)
    for _ in range(3):
        next(iterator)  # trained on one, two drawn ahead; then `limit_train_batches=1` ends the epoch
    rank.sampler.drawn.popleft()
    rank.go_to(1, step=1)
    steps = rank.run()
    check_together([steps], one_process(40, 8, False, 1))
    assert [a[0] for a in rank.asked] == [0, 1, 2, 1, 2, 3, 4, 5]
    assert not rank.sampler.drawn


@pytest.mark.parametrize(("drawn", "trained"), [(1, 0), (4, 0), (5, 0), (2, 2), (5, 2)])
def test_an_epoch_that_begins_anew_is_not_taken_for_a_shorter_loader(drawn, trained):
    # Lightning may make an iterator, workers draw from it, and then, after loading a checkpoint, it makes another.
    rank = Rank(0, Planner(1), 40, 8)
    iterator = iter(rank.sampler)
    for _ in range(drawn):
        next(iterator)
    for _ in range(trained):
        rank.sampler.drawn.popleft()
    rank.go_to(0, 2, step=trained)
    check_together([rank.run()], one_process(40, 8, False, 0)[2:])
    assert [a[:2] for a in rank.asked[drawn:]] == [(trained, 2), (trained + 1, 3), (trained + 2, 4)]
    assert not rank.sampler.drawn


# -- small things --------------------------------------------------------------------------------------


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


@st.composite
def limited_plans(draw):
    plan = draw(plans())
    return replace(plan, low=(0,) * len(plan.costs), high=tuple(draw(st.integers(1, 40)) for _ in plan.costs))


@given(limited_plans(), st.integers(1, 300), st.integers(1, 60))
@example(Plan(0, (Cost(0, 1), Cost(0, 1)), (1, 1), (64, 33)), 200, 97)  # 97 in equal parts would be 98
@example(Plan(0, (Cost(0, 1), Cost(0, 1)), (1, 1), (49, 48)), 194, 97)
@example(Plan(0, (Cost(0, 1), Cost(99, 1)), (1, 1), (64, 64), reach=(0.2, 0.2)), 48, 12)  # after a loss
@settings(max_examples=300)
def test_evaluation_keeps_within_limits(plan, samples, batch_size):
    world, high = len(plan.costs), plan.high
    assume(samples >= world)
    batches = EvenBatches(order_of(samples), min(batch_size, sum(high)), world)
    assume(batches.size(0) <= sum(high))  # else there are no such parts
    drawn = [list(EvaluationSampler(batches, rank, world, lambda: plan)) for rank in range(world)]
    assert Counter(i for rank in drawn for batch in rank for i in batch) == Counter(range(samples))
    assert all(len(batch) <= most for rank, most in zip(drawn, high, strict=True) for batch in rank)
    assert {len(rank) for rank in drawn} == {len(batches)}


def test_evaluation_asks_for_the_plan_of_the_moment():
    plans = [Plan(0, (Cost(0, 1), Cost(0, k)), (1, 1), (99, 99)) for k in (1, 3)]
    sampler = EvaluationSampler(EvenBatches(range(8), 8, 2), 0, 2, lambda: plans.pop(0))
    assert [[len(b) for b in sampler] for _ in range(2)] == [[4], [6]]


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
        samplers = [EvaluationSampler(batches, r, 2, lambda: planner.plans[-1], lambda *_: grows) for r in range(2)]
        return [list(sampler) for sampler in samplers]

    assert [len(part) for rank in drawn(planner.limits_measured) for part in rank] == [18, 36]
    assert sorted(i for rank in drawn(planner.limits_measured) for part in rank for i in part) == [*range(54)]
    with pytest.raises(ShareError, match="54 samples cannot be split"):
        drawn(False)  # limits that the user has given are limits here, too


def test_the_epoch_after_a_resumed_one_is_whole():
    rank = Rank(0, Planner(1), 40, 8)
    rank.go_to(2, 3)
    assert len(rank.run()) == 2
    rank.go_to(3)
    check_together([rank.run()], one_process(40, 8, False, 3))
    assert [a[:2] for a in rank.asked] == [(13, 3), (14, 4), (15, 0), (16, 1), (17, 2), (18, 3), (19, 4)]


def test_fewer_samples_than_ranks_are_refused():
    check_enough(4, 4, "validation")
    with pytest.raises(DataError, match="the validation dataset has 3 samples for 4 ranks"):
        check_enough(3, 4, "validation")


def test_a_shorter_loader_starts_over_within_the_epoch():
    planner = Planner(2, [3, 1])
    planner.plans.append(Plan(4, (Cost(0, 1), Cost(0, 3)), (0, 0), (99, 99)))
    ranks = [Rank(r, planner, 10, 4) for r in range(2)]
    for epoch in range(2):
        reference = one_process(10, 4, False, epoch)
        parts = []
        for rank in ranks:
            rank.asked.clear()
            steps = []
            while len(steps) < 7:  # batches of the longer loader
                rank.go_to(epoch, step=7 * epoch + len(steps))
                for batch in rank.sampler:
                    steps.append((batch, rank.sampler.drawn.popleft()))
                    if len(steps) == 7:
                        break
            parts.append(steps)
            assert rank.sampler.next_step == 7 * epoch + 7
            assert [a[:2] for a in rank.asked] == [(7 * epoch + i, i) for i in range(7)]
        check_together(parts, (reference * 3)[:7])
