"""Ranks with streams of their own, one thread each."""

import copy
import threading

import pytest
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero.batching.sampler import Drawn, Position
from lightning_hetero.batching.streams import SizedStream, StepTally, Stream, VaryingBatchSizes
from lightning_hetero.errors import DataError


class OneReplica:
    """Peers that average gradients at every step, and sum their tallies with a given function."""

    def __init__(self, sum_up=lambda tally: tally):
        self.sum = self.sum_all = sum_up

    def begin(self):
        pass

    def compare(self, batch):
        pass

    def another_batch(self, drawn, alive):
        return alive


def nothing():
    return Position(0, 0, 0)


class Wire:
    """Sums what each rank gives, when all have given."""

    def __init__(self, world):
        self.world, self.given, self.exchanges = world, [None] * world, 0
        self.barrier = threading.Barrier(world, timeout=60)

    def exchange(self, rank):
        """The peers of a rank where there is one replica."""

        def sum_up(tally):
            self.given[rank] = tally
            self.barrier.wait()
            total = StepTally(*map(sum, zip(*self.given, strict=True)))
            self.exchanges += rank == 0
            self.barrier.wait()
            return total

        return OneReplica(sum_up)


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
            wire.barrier.abort()  # or the others would wait for the rest of the test
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
    """Batches of these lengths, each sample a number of its own."""
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
    stream = SizedStream([[1]], len, nothing, OneReplica(), length=7, replica_length=7)
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
    sizes = VaryingBatchSizes(lambda step: step - 3 if step != 7 else 0, lambda: next(begins))
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


def test_a_stream_can_be_copied():
    stream = copy.copy(Stream(Loader(), len, nothing, OneReplica()))
    assert list(stream) == [[1]]
