"""All ranks of a job in one process: what they draw together, against what one process would draw."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_hetero.batching.planner import Plan, Planner
from lightning_hetero.batching.sampler import FixedBatches, Position, ShareSampler, batch_slice, check_enough
from lightning_hetero.batching.shares import Cost
from lightning_hetero.errors import DataError, HeteroError


def order_of(samples, epoch=0):
    """A global order that depends on the epoch, the same on every rank; Lightning puts this sampler in."""
    sampler = DistributedSampler(range(samples), num_replicas=1, rank=0, seed=3)
    sampler.set_epoch(epoch)
    return sampler


def one_process(samples, batch_size, drop_last, epoch):
    return list(BatchSampler(order_of(samples, epoch), batch_size, drop_last))


class Rank:
    """One rank: its sampler, and where training stands."""

    def __init__(self, rank, planner, samples, batch_size, drop_last=False, replica=None):
        self.position = Position(0, 0, 0)
        self.asked = []  # (step, batch in the epoch, size) of every split
        self.planner = planner
        self.sampler = ShareSampler(
            FixedBatches(order_of(samples), batch_size, drop_last),
            rank,
            replica or range(planner.world),
            lambda: self.position,
            self.shares,
        )

    def shares(self, sampler, step, in_epoch, size):
        assert sampler is self.sampler
        self.asked.append((step, in_epoch, size))
        return self.planner.at(step).split([size])[0]

    def go_to(self, epoch, batch=0, step=None):
        self.position = Position(epoch, batch, epoch * len(self.sampler) + batch if step is None else step)

    def run(self):
        """The rest of the epoch: pairs of a batch and what the sampler says about it."""
        return [(batch, self.sampler.drawn.popleft()) for batch in self.sampler]


def check_together(parts, reference):
    """``parts[rank][step]`` make up the reference's batches exactly."""
    assert {len(steps) for steps in parts} == {len(reference)}  # the same number of steps on every rank
    for step, batch in enumerate(reference):
        together = []
        for own, drawn in (steps[step] for steps in parts):
            if drawn.samples == 0:
                assert len(own) == 1  # a padding batch, which must be something that the model can take
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
        st.builds(Cost, st.floats(0, 1), st.sampled_from([0.01, 0.1, 1.0])), min_size=world, max_size=world
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


def test_the_epochs_differ_in_order():
    rank = Rank(0, Planner(1), 32, 8)
    rank.go_to(0)
    first = rank.run()
    rank.go_to(1)
    assert [own for own, _ in rank.run()] != [own for own, _ in first]


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


def test_a_rank_without_a_sample_repeats_one_with_weight_0():
    planner = Planner(3, [1, 0, 1])
    parts = [Rank(r, planner, 9, 4).run() for r in range(3)]
    assert [d.samples for _, d in parts[1]] == [0, 0, 0]
    assert [len(own) for own, _ in parts[1]] == [1, 1, 1]
    assert [d.samples for _, d in parts[2]] == [2, 2, 0]  # the tail is a single sample
    check_together(parts, one_process(9, 4, False, 0))


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


def test_the_epoch_after_a_resumed_one_is_whole():
    rank = Rank(0, Planner(1), 40, 8)
    rank.go_to(2, 3)
    assert len(rank.run()) == 2
    rank.go_to(3)
    check_together([rank.run()], one_process(40, 8, False, 3))
    assert [a[:2] for a in rank.asked] == [(13, 3), (14, 4), (15, 0), (16, 1), (17, 2), (18, 3), (19, 4)]


# -- shorter loaders, epochs cut short -----------------------------------------------------------------


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


@pytest.mark.parametrize("told", [6, 0])  # whether Lightning still tells the batches of the resumed epoch
def test_a_shorter_loader_resumes_where_it_was(told):
    rank = Rank(0, Planner(1), 12, 4)
    rank.go_to(0, 5, step=5)  # in its second round, with one batch of three to go
    steps = rank.run()
    rank.go_to(0, told, step=6)
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


def test_an_iterator_that_is_never_used_changes_nothing():
    # A DataLoader with workers makes two and uses the second.
    rank = Rank(0, Planner(1), 12, 4)
    for round_ in range(3):
        iter(rank.sampler)
        rank.position = Position(0, 0, 3 * round_)  # only the step goes on
        check_together([rank.run()], one_process(12, 4, False, 0))
    assert [a[:2] for a in rank.asked] == [(i, i) for i in range(9)]


# -- small things --------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_slices_of_a_batch_are_consecutive_and_complete(shares):
    batch = list(range(sum(shares)))
    parts = [batch_slice(batch, shares, rank) for rank in range(len(shares))]
    assert [len(part) for part in parts] == shares
    assert [i for part in parts for i in part] == batch


def test_fewer_samples_than_ranks_are_refused():
    check_enough(4, 4, "validation")
    with pytest.raises(DataError, match="the validation dataset has 3 samples for 4 ranks") as caught:
        check_enough(3, 4, "validation")
    assert isinstance(caught.value, HeteroError)
    assert isinstance(caught.value, ValueError)
