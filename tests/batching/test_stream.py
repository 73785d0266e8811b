"""Ranks with streams of their own, one thread each."""

import copy
import random
import threading
from itertools import count, islice

import pytest
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.distributed import HashStore
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero.batching.plan import Plan
from lightning_hetero.batching.sample_costs import StreamCosts
from lightning_hetero.batching.sampler import Drawn, Position, RankSlot
from lightning_hetero.batching.shares import Cost
from lightning_hetero.batching.stream_peers import StepTally
from lightning_hetero.batching.streams import (
    BatchRequests,
    SharedStream,
    SharedStreamLoader,
    Stream,
    VaryingBatchSizes,
)
from lightning_hetero.comm.progress import DataProgress, DataProgressTracker
from lightning_hetero.comm.retry import NumberedResults
from lightning_hetero.errors import DataError


class OneReplica:
    """Peers that average gradients at every step, and exchange their tallies with a given function."""

    def __init__(self, of_replica=lambda tally: {0: tally}, length=None):
        self.length = length
        self.of_replica, self.of_all = of_replica, lambda tally: StepTally.over(of_replica(tally).values())

    def begin(self, number):
        pass

    def compare(self, batch):
        pass

    def another_batch(self, drawn, alive):
        return alive


def nothing():
    return Position(0, 0, 0)


class Wire:
    """Exchange in threads: all ranks get the values of all, once all have given theirs."""

    def __init__(self, world):
        self.world, self.given, self.exchanges = world, [None] * world, 0
        self.barrier = threading.Barrier(world, timeout=60)

    def exchange(self, rank):
        """Peers of a rank in a job with one replica."""

        def of_replica(tally):
            self.given[rank] = tally
            self.barrier.wait()
            everyone = dict(enumerate(self.given))
            self.exchanges += rank == 0
            self.barrier.wait()
            return everyone

        return OneReplica(of_replica)


def run(streams, wire, steps=None):
    """Iterate over all streams at once: for each rank its (batch, drawn) pairs, or the error that it got."""
    results = [None] * len(streams)

    def work(rank):
        pairs = []
        try:
            for batch in streams[rank]:
                pairs.append((batch, streams[rank].take()))
                if len(pairs) == steps:
                    break
            results[rank] = pairs
        except DataError as error:
            results[rank] = error
        except BaseException:
            wire.barrier.abort()  # otherwise the others would wait until the test ends
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(streams))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    return results


def job(loaders, size_of=len, kind=Stream, **options):
    wire = Wire(len(loaders))
    streams = [kind(loader, size_of, nothing, wire.exchange(r), **options) for r, loader in enumerate(loaders)]
    return streams, wire


def numbered(lengths):
    """Batches of these lengths, of numbered samples."""
    numbers = iter(range(10**6))
    return [[[next(numbers) for _ in range(n)] for n in of_rank] for of_rank in lengths]


@pytest.mark.parametrize("empty", [[0], [1], [0, 2]])
def test_a_rank_without_any_batch_is_an_error_on_all_ranks(empty):
    streams, wire = job([[] if rank in empty else [[1], [2]] for rank in range(3)])
    results = run(streams, wire)
    assert all(isinstance(result, DataError) for result in results)
    assert all(f"{len(empty)} rank(s) got no training batch" in str(result) for result in results)
    assert wire.exchanges == 1  # at once


@pytest.mark.parametrize("step", [0, 2])
def test_a_batch_of_unknown_size_on_one_rank_is_an_error_on_all_ranks(step):
    def size_of(batch):
        if batch == "?":
            raise ValueError("no tensor in it")
        return len(batch)

    strange = [[1, 2]] * step + ["?", [3]]
    streams, wire = job([[[1]] * 5, strange, [[1]] * 5], size_of)
    results = run(streams, wire)
    assert all(isinstance(result, DataError) for result in results)
    assert ["no tensor in it" in str(result) for result in results] == [False, True, False]
    assert ["on another rank" in str(result) for result in results] == [True, False, True]
    assert all("batch_weight" in str(result) for result in results)
    assert wire.exchanges == step + 1 + (step > 0)  # at the first batch of all ranks, then of the replica's


class Loader:
    dataset = "the dataset"

    def __init__(self):
        self._iterator = "running"

    def __iter__(self):
        return iter([[1]])


def test_attributes_are_the_loaders():
    loader = Loader()
    stream = Stream(loader, len, nothing, OneReplica())
    assert stream.dataset == "the dataset"
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = stream.no_such_thing
    # Lightning resets workers by setting `_iterator` to None.
    assert stream._iterator == "running"
    stream._iterator = None
    assert loader._iterator is None
    assert stream._iterator is None


def test_a_sized_stream_has_the_length_that_it_is_given_and_another_none():
    stream = Stream([[1]], len, nothing, OneReplica(length=7), replica_length=7)
    assert len(stream) == 7
    assert list(stream) == [[1]]
    with pytest.raises(TypeError):
        len(Stream([[1]], len, nothing, OneReplica()))


class Endless(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(range(self.samples))


def test_an_iterable_dataset_gives_batches_of_the_sizes_of_the_plan():
    begins = iter([5, 11])
    sizes = VaryingBatchSizes(lambda step: step - 3 if step != 7 else 0, lambda: next(begins), 8)
    loader = DataLoader(Endless(21), batch_size=4)
    object.__setattr__(loader, "batch_sampler", sizes)
    first = [batch.tolist() for batch in loader]
    assert [len(batch) for batch in first] == [2, 3, 1, 5, 6, 4]  # steps 5, 6, 7 (at least one sample), ...; the rest
    assert [i for batch in first for i in batch] == list(range(21))
    second = [batch.tolist() for batch in loader]
    assert [len(batch) for batch in second] == [8, 9, 4]  # from step 11
    assert [i for batch in second for i in batch] == list(range(21))


def test_no_batch_on_any_rank_is_no_error():
    streams, wire = job([[], []])
    assert run(streams, wire) == [[], []]


def test_what_was_drawn_before_a_cut_is_void():
    streams, wire = job(numbered([[2, 3, 4], [5, 6, 7]]))
    run(streams, wire, steps=1)
    for stream in streams:
        stream.drawn.append(Drawn(99, 99))  # drawn ahead, not trained on
    results = run(streams, wire)
    assert [[(d.samples, d.total) for _, d in pairs] for pairs in results] == [
        [(2, 7), (3, 9), (4, 11)],
        [(5, 7), (6, 9), (7, 11)],
    ]


class Counts(list):
    """Batches, with a saved position."""

    def __iter__(self):
        for self.at, batch in enumerate(super().__iter__(), 1):
            yield batch

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        raise NotImplementedError


def test_a_shorter_stream_that_begins_again_keeps_what_is_yet_to_be_trained_on():
    # The Trainer fetches one batch ahead where it does not know how many there are.
    epoch = 0
    streams = [
        Stream(Counts(batches), len, lambda: Position(epoch, 0, 5 * epoch), OneReplica())
        for batches in numbered([[1, 2, 3, 4, 5], [6, 7]])
    ]
    combined = CombinedLoader(streams, "max_size_cycle")
    for epoch in range(2):  # noqa: B007  the streams ask for it
        batches = iter(combined)
        ahead, trained = next(batches)[0], []
        while ahead is not None:
            batch, ahead = ahead, next(batches, [None])[0]
            draws = [stream.take() for stream in streams]
            assert [draw.samples for draw in draws] == [len(part) for part in batch]
            trained.append(
                [(len(part), stream.position()["state"]["at"]) for part, stream in zip(batch, streams, strict=True)]
            )
        assert trained == [[(1, 1), (6, 1)], [(2, 2), (7, 2)], [(3, 3), (6, 1)], [(4, 4), (7, 2)], [(5, 5), (6, 1)]]
        assert not any(stream.drawn for stream in streams)


def test_a_stream_can_be_copied():
    stream = copy.copy(Stream(Loader(), len, nothing, OneReplica()))
    assert list(stream) == [[1]]


class Shared:
    """Ranks that read one stream, in one process by turns; some of them are lost."""

    def __init__(self, world, samples, workers=0, costs=None):
        self.world, self.step, self.ranks = world, 0, list(range(world))
        self.plans = [Plan(0, (Cost(0.0, 1.0),) * world, (0,) * world, (10**6,) * world)]
        self.loaders = []
        for rank in range(world):
            slot = RankSlot(rank, tuple(range(world)), self._plan())
            requests = BatchRequests(12, slot, lambda: Position(0, 0, 0))
            loader = DataLoader(SharedStream(Endless(samples)), batch_size=4, num_workers=workers)
            self.loaders.append(SharedStreamLoader(loader, requests, 1, costs))
        self.drawn = [0] * world

    def _plan(self):
        plan = self.plans[-1]
        return lambda step: (plan, False)

    def lose(self, lost):
        """Remove a rank; the others share the batches from the first step on that none of them has asked for."""
        kept = [now for now, rank in enumerate(self.ranks) if rank != lost]
        self.ranks = [self.ranks[now] for now in kept]
        world = len(kept)
        self.plans.append(Plan(0, (Cost(0.0, 1.0),) * world, (0,) * world, (10**6,) * world))
        start = max(self.loaders[rank].next_step for rank in self.ranks)
        for now, rank in enumerate(self.ranks):
            slot = RankSlot(now, tuple(range(world)), self._plan(), start)
            self.loaders[rank].batch_sampler.repartition(slot, kept, lambda: Position(0, 0, 0))
        return start


@pytest.mark.parametrize("costs", [None, StreamCosts("a cost", lambda sample: 1 + sample % 7, False)])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed", range(5))
def test_ranks_of_a_shared_stream_are_lost_wherever_the_others_are(seed, workers, costs):
    """Steps that a rank has asked for stay; from the next one on no sample is missing."""
    rng = random.Random(seed)
    job = Shared(4, 173, workers, costs)
    streams = [iter(loader) for loader in job.loaders]
    taken = [[] for _ in streams]  # of each rank, by step: the samples that count
    starts, lost = [], []
    when = sorted(rng.sample(range(20), 2))
    for turn in count():
        alive = job.ranks
        if turn in when:
            lost.append(rng.choice(alive))
            starts.append(job.lose(lost[-1]))
            continue
        rank = rng.choice([rank for rank in alive if len(taken[rank]) == min(len(taken[r]) for r in alive)])
        for batch in islice(streams[rank], rng.randint(1, 2)):
            drawn = job.loaders[rank].drawn[-1]
            taken[rank].append(batch.tolist()[: drawn.samples])
        if all(len(taken[rank]) == 15 for rank in job.ranks):
            break
    assert len(lost) == 2
    for step in range(15):
        samples = [sample for rank in job.ranks for sample in taken[rank][step]]
        whole = list(range(12 * step, min(12 * step + 12, 173)))
        assert len(samples) == len(set(samples))
        assert set(samples) <= set(whole)
        if step >= starts[-1]:
            assert (sorted(samples) if costs else samples) == whole
        draws = [job.loaders[rank].drawn[step] for rank in job.ranks]  # nobody has taken one
        assert {drawn.total for drawn in draws} == {len(samples)}
        assert [drawn.samples for drawn in draws] == [len(taken[rank][step]) for rank in job.ranks]
        if costs:  # in units of the mean cost of the global batch's samples
            mean = sum(map(costs.ask, whole)) / len(whole)
            for drawn, rank in zip(draws, job.ranks, strict=True):
                own = sum(map(costs.ask, taken[rank][step]))
                assert drawn.cost == pytest.approx(own / mean) if own else drawn.cost > 0  # the cost of padding
    for stream in streams:
        stream.close()


def test_who_has_missed_a_result_gets_it_from_who_has_it():
    ahead, behind = NumberedResults(), NumberedResults()
    assert [ahead.once(lambda: 5), behind.once(lambda: 5)] == [5, 5]
    assert ahead.once(lambda: 7) == 7
    with pytest.raises(ConnectionError):
        behind.once(lambda: (_ for _ in ()).throw(ConnectionError()))
    number, result = max(ahead.latest, behind.latest)
    assert (number, behind.calls) == (1, 1)
    behind.received[number] = result
    assert behind.latest == ahead.latest  # it can replace the one that was ahead, if that is lost
    assert behind.once(pytest.fail) == 7
    assert (behind.calls, behind.latest) == (ahead.calls, ahead.latest)


def test_replicas_run_as_many_batches_as_the_one_that_knows_of_most():
    """A lost replica had more batches than the others. One of them had read this, and has run a padding batch."""
    store = HashStore()
    trackers = [DataProgressTracker(store, [0, 1, 2], replica, 5.0) for replica in range(3)]
    for tracker in trackers:
        tracker.begin(1)
    trackers[0].write(DataProgress(3, True))
    trackers[2].write(DataProgress(7, False))
    assert trackers[0].beyond(6)
    trackers[1].write(DataProgress(4, False))
    rest = [DataProgressTracker(other := HashStore(), [0, 1], 0, 5.0), DataProgressTracker(other, [0, 1], 1, 5.0)]
    for tracker, former in zip(rest, trackers, strict=False):
        tracker.continue_from(former)
    rest[1].write(DataProgress(5, True))
    for tracker in rest:
        assert [tracker.beyond(drawn) for drawn in (4, 6, 7)] == [True, True, False]
    for tracker in rest:
        tracker.begin(2)
    assert not store.check(["pass 2 of replica 0"])
