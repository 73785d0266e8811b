"""A stream that all ranks read alike, so that its samples can be dealt out by speed as those of a list can."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_hetero.errors import DataError
from lightning_hetero.workload.plan import Plan
from lightning_hetero.workload.sampler import Drawn, Position, batch_slice


class SharedStream(IterableDataset):
    """An iterable dataset that a strategy may split by speed: each sample counts once, and shares move.

    Every rank reads the whole stream, and takes its part of each global batch by the sample's number. So a fast rank
    takes more, the global batch keeps its size, ranks end together, and a resumed run goes on at the right sample.
    That costs each rank, and each of its workers, the reading of the samples of others, unless the dataset can jump.

    Under strategies that are not of this package, such as ``ddp``, ranks and workers take samples in turns.

    Args:
        dataset: iterable over samples. It must yield the same samples in the same order on every rank and in every
            worker: shuffle by a seed, and do not shard it. It may have

            * ``__len__``: samples of an epoch; the Trainer then knows how many steps there are;
            * ``set_epoch(epoch)``: called before each epoch is read, for instance to shuffle anew;
            * ``iter_from(index)``: an iterator that begins at a sample, so that those before it need not be read.

    Example::

        from lightning_hetero import SharedStream
        from torch.utils.data import DataLoader, IterableDataset


        class Numbers(IterableDataset):
            def __iter__(self):
                return iter(range(1000))


        loader = DataLoader(SharedStream(Numbers()), batch_size=8)
        assert next(iter(loader)).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]  # in one process
    """

    def __init__(self, dataset: Iterable[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # an error that says so where there is no length

    def __iter__(self) -> Iterator[Any]:
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return islice(self.dataset, rank * workers + worker, None, world * workers)


class Request(NamedTuple):
    """A global batch that a rank, or a worker of it, is to read.

    Attributes:
        epoch: epochs done before it.
        first: number of its first sample in the epoch.
        size: samples.
        plan: how they are split.
    """

    epoch: int
    first: int
    size: int
    plan: Plan


class Requests:
    """Batch sampler of global batches, without an end: where the stream ends is known when it has been read.

    Args:
        size: samples in a global batch.
        plan: in force at a given step.
        begin: says where training stands; called whenever an epoch's first batch is drawn.
    """

    def __init__(self, size: int, plan: Callable[[int], Plan], begin: Callable[[], Position]) -> None:
        self.batch_size, self._plan, self._begin = size, plan, begin
        self.begun: Position | None = None  # where the running epoch began, or was resumed
        self.next_step = 0  # first step not drawn yet

    def __iter__(self) -> Iterator[Request]:
        self.begun = position = self._begin()
        self.next_step = position.step
        while True:
            done = position.batch + self.next_step - position.step
            self.next_step += 1
            yield Request(position.epoch, done * self.batch_size, self.batch_size, self._plan(self.next_step - 1))


class Slice(NamedTuple):
    """A rank's part of a global batch.

    Attributes:
        batch: collated; ``None``: the stream has ended.
        drawn: how many samples it holds.
    """

    batch: Any
    drawn: Drawn


class Reader(Dataset):
    """Reads global batches from a stream, and keeps one rank's part of each. Looks like a map-style dataset.

    Args:
        stream: the same on every rank.
        rank: this rank.
        replica: the ranks that average gradients with this one, itself among them.
        padding: samples of a padding batch.
    """

    def __init__(self, stream: Iterable[Any], rank: int, replica: Sequence[int], padding: int) -> None:
        self.stream, self._rank, self._replica, self._padding = stream, rank, replica, padding
        self._epoch, self._next = -1, 0  # the sample that comes next
        self._samples: Iterator[Any] = iter(())

    def __getitems__(self, request: Request) -> tuple[list[Any], Drawn]:
        """This rank's samples of a global batch; padding if it has none, nothing where the stream has ended."""
        self._seek(request.epoch, request.first)
        batch = list(islice(self._samples, request.size))
        self._next += len(batch)
        shares = request.plan.split([len(batch)])[0]
        own = batch_slice(batch, shares, self._rank)
        drawn = Drawn(len(own), sum(shares[rank] for rank in self._replica))
        return own or (batch * self._padding)[: self._padding], drawn

    def _seek(self, epoch: int, first: int) -> None:
        """Go to a sample of an epoch."""
        anew = epoch != self._epoch or first < self._next
        if anew and callable(set_epoch := getattr(self.stream, "set_epoch", None)):
            set_epoch(epoch)
        jump = getattr(self.stream, "iter_from", None)
        if callable(jump) and (anew or first > self._next):
            self._samples, self._next = iter(jump(first)), first
        elif anew:
            self._samples, self._next = iter(self.stream), 0
        self._epoch = epoch
        self._next += sum(1 for _ in islice(self._samples, first - self._next))


def collate_part(collate: Callable[[list[Any]], Any], read: tuple[list[Any], Drawn]) -> Slice:
    """Collate a rank's samples as the user's loader does."""
    samples, drawn = read
    return Slice(collate(samples) if samples else None, drawn)


class SharedStreamLoader:
    """Iterates over this rank's parts of the global batches of a :class:`SharedStream`.

    Args:
        loader: of the user's.
        requests: the global batches.
        rank: this rank.
        replica: the ranks that average gradients with this one.
        padding: samples of a padding batch.

    Attributes:
        like: the user's loader.
        loader: what reads the parts.
    """

    def __init__(self, loader: DataLoader, requests: Requests, rank: int, replica: Sequence[int], padding: int) -> None:
        self.stream, self.batch_sampler, self.like = loader.dataset, requests, loader
        self.drawn: deque[Drawn] = deque()
        self._length = -(-n // requests.batch_size) if (n := _length_of(self.stream)) is not None else None
        same = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "generator", "prefetch_factor")
        more = ("multiprocessing_context", "persistent_workers")
        self.loader = DataLoader(
            Reader(self.stream.dataset, rank, replica, padding),  # type: ignore[attr-defined]
            batch_sampler=requests,  # type: ignore[arg-type]
            collate_fn=partial(collate_part, loader.collate_fn),
            **{name: getattr(loader, name) for name in (*same, *more)},
        )

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self.stream

    @property
    def begun(self) -> Position | None:
        """Where the running epoch began, or was resumed."""
        return self.batch_sampler.begun

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{type(self.stream.dataset).__name__} has no length")  # type: ignore[attr-defined]
        return self._length

    def __iter__(self) -> Iterator[Any]:
        self.drawn.clear()
        read = 0
        for batch, drawn in self.loader:
            if batch is None:
                break
            read += 1
            self.drawn.append(drawn)
            yield batch
        if read == 0 and self.batch_sampler.begun is not None and self.batch_sampler.begun.batch == 0:
            raise DataError("the training stream is empty: it must yield at least one sample.")

    def take(self) -> Drawn:
        """What was drawn for the batch that is about to be trained on."""
        return self.drawn.popleft()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the Trainer saves the position itself. With this it knows that the loader resumes there."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing; see :meth:`state_dict`."""


def _length_of(stream: Any) -> int | None:
    try:
        return len(stream)
    except (TypeError, NotImplementedError):
        return None
