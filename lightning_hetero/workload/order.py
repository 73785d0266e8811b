"""The global order of samples, cut into global batches; the same on every rank."""

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice, pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, RandomSampler, SequentialSampler
from typing_extensions import override

from lightning_hetero.errors import DataError


def shuffles_by_itself(loader: Any) -> bool:
    """Whether ``shuffle=True`` has made a sampler that Lightning does not know, as torchdata's loader does."""
    sampler = loader.sampler
    made = type(sampler).__module__.startswith("torchdata.") and type(sampler).__name__ == "RandomSampler"
    # Not of a type that can be imported here: torchdata need not be installed.
    return made and not sampler.replacement and sampler.num_samples == len(loader.dataset)


def has_own_batches(loader: Any) -> bool:
    """Whether a loader was given a ``batch_sampler`` and no ``batch_size``; a DataLoader then has no batch size."""
    return (loader.batch_sampler is not None and loader.batch_size is None) or makes_whole_batches(loader)


def makes_whole_batches(loader: Any) -> bool:
    """Whether a loader's dataset is given all indices of a batch: ``batch_size=None``, and a sampler of lists."""
    if loader.batch_size is not None or loader.batch_sampler is not None:
        return False
    if isinstance(sampler := loader.sampler, BatchSampler):
        return True
    if isinstance(sampler, (SequentialSampler, RandomSampler, DistributedSampler)) or not isinstance(sampler, Iterable):
        return False
    with seeded(0):  # which leaves the random states as they are
        return isinstance(next(iter(sampler), None), list | tuple)


class WholeBatches(Dataset):
    """A dataset that makes whole batches, for a loader with a ``batch_sampler``.

    Args:
        dataset: takes lists of indices.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[int]) -> Any:
        return self.dataset[indices]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not set yet: unpickling, copying
            raise AttributeError(name)
        return getattr(self.dataset, name)


def is_sharded(loader: Any) -> bool:
    """Whether one of a loader's samplers says that it yields this rank's part of the data."""
    batches = getattr(loader, "batch_sampler", None)
    own = getattr(loader, "sampler", None)
    samplers = (own, getattr(own, "sampler", None), batches, getattr(batches, "sampler", None))
    return any(isinstance(n := getattr(sampler, "num_replicas", None), int) and n > 1 for sampler in samplers)


class GlobalBatches(Protocol):
    """The global batches of one epoch."""

    sampler: Any  # has `set_epoch`, if the order depends on the epoch

    def __len__(self) -> int: ...

    def size(self, index: int) -> int | None:
        """Samples in batch ``index``; ``None`` if that is known only when it is drawn."""

    def draw(self, first: int) -> Iterator[list[int]]:
        """Yield the batches from index ``first`` on, as lists of dataset indices."""


class FixedBatches:
    """Global batches of ``batch_size`` consecutive samples of an order.

    Args:
        sampler: yields dataset indices, the same on every rank, and has a length.
        batch_size: samples in a global batch.
        drop_last: leave out the last batch if it is short.
    """

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last

    def __len__(self) -> int:
        full, tail = divmod(len(self.sampler), self.batch_size)
        return full + (tail > 0 and not self.drop_last)

    def size(self, index: int) -> int:
        """Samples in batch ``index``."""
        return min(self.batch_size, len(self.sampler) - index * self.batch_size)

    def draw(self, first: int) -> Iterator[list[int]]:
        """Yield the batches from index ``first`` on."""
        order = islice(self.sampler, first * self.batch_size, None)
        for _ in range(first, len(self)):
            yield list(islice(order, self.batch_size))


class EvenBatches(FixedBatches):
    """Batches of ``batch_size`` samples that hold them all, none with fewer samples than there are ranks.

    Evaluation uses them: all ranks run the same number of batches and yet see every sample exactly once. Where the last
    batch would be too small, all are as even as can be instead. Only where ``batch_size`` itself leaves each rank one
    sample, or little more, can a batch be larger than ``batch_size``, by less than one sample per rank.

    Args:
        sampler: yields dataset indices, the same on every rank, and has a length, at least ``world``.
        batch_size: most samples in a global batch, except as said above.
        world: number of ranks.
    """

    def __init__(self, sampler: Any, batch_size: int, world: int) -> None:
        super().__init__(sampler, batch_size, drop_last=False)
        full, last = divmod(len(sampler), batch_size)
        self._cut_evenly = 0 < last < world or batch_size < world
        self._count = max(1, min(full + (last > 0), len(sampler) // world))

    def __len__(self) -> int:
        return self._count

    @override
    def size(self, index: int) -> int:
        if not self._cut_evenly:
            return super().size(index)
        least, extra = divmod(len(self.sampler), len(self))
        return least + (index < extra)

    @override
    def draw(self, first: int) -> Iterator[list[int]]:
        order = islice(self.sampler, sum(self.size(i) for i in range(first)), None)
        for index in range(first, len(self)):
            yield list(islice(order, self.size(index)))


class GroupedBatches:
    """Global batches of ``world`` consecutive batches of a batch sampler of the user's.

    Args:
        batch_sampler: yields lists of dataset indices, the same on every rank, and has a length.
        world: number of its batches that make a global batch.
    """

    def __init__(self, batch_sampler: Any, world: int) -> None:
        self.sampler = batch_sampler
        self.world = world

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.world)

    def size(self, index: int) -> None:
        """Not known before the batch is drawn."""

    def draw(self, first: int) -> Iterator[list[int]]:
        """Yield the batches from index ``first`` on."""
        batches = iter(self.sampler)
        for index in range(len(self)):
            batch = [i for part in islice(batches, self.world) for i in part]
            if index >= first and batch:
                yield batch


class EvaluatedGroups(GroupedBatches):
    """Grouped batches of which none has fewer samples than there are ranks, so that all ranks run the same number.

    Where one would, all samples are cut again, into as many batches of equal size as can be.

    Raises:
        DataError: when they are drawn, if all of them together have fewer samples than there are ranks.
    """

    @override
    def draw(self, first: int) -> Iterator[list[int]]:
        batches = list(super().draw(0))
        if any(len(batch) < self.world for batch in batches):
            samples = [i for batch in batches for i in batch]
            if len(samples) < self.world:
                raise DataError(
                    f"an evaluation's batch sampler yields {len(samples)} samples for {self.world} ranks, so that some "
                    "rank would have none. Use fewer ranks or more data."
                )
            count = min(len(batches), len(samples) // self.world)
            edges = [len(samples) * i // count for i in range(count + 1)]
            batches = [samples[begin:end] for begin, end in pairwise(edges)]
        yield from batches[first:]


class AgreedOrder:
    """The user's own sampler; rank 0 decides its order for all ranks.

    A sampler may draw from the process's random state, which differs between ranks. It runs on rank 0 with the state
    seeded by the epoch, so that an interrupted epoch can be repeated, and its order is sent to the others.

    Args:
        sampler: yields dataset indices, or lists of them; has a length.
        broadcast: sends an object from rank 0 to all (collective).
        decides: whether this is rank 0, now.
        seed: of the first epoch.
    """

    def __init__(
        self, sampler: Iterable[Any], broadcast: Callable[[Any], Any], decides: Callable[[], bool], seed: int
    ) -> None:
        self.sampler, self._seed = sampler, seed
        self.agree_by(broadcast, decides)
        self._epoch = 0
        self._own_seeds: dict[int, int] = {}

    def agree_by(self, broadcast: Callable[[Any], Any], decides: Callable[[], bool]) -> None:
        """Agree among other ranks from now on; arguments like the constructor's."""
        self._broadcast, self._decides = broadcast, decides

    def set_epoch(self, epoch: int) -> None:
        """Let the order depend on the epoch."""
        self._epoch = epoch
        for owner in (self.sampler, getattr(self.sampler, "sampler", None)):
            if callable(set_epoch := getattr(owner, "set_epoch", None)):
                set_epoch(epoch)

    def _own_seed(self, generator: torch.Generator) -> int:
        """The seed that the user gave to a sampler's own generator."""
        return self._own_seeds.setdefault(id(generator), generator.initial_seed())

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        order: list[Any] | None = None
        while order is None:  # again if rank 0 was lost before it has told the others, and another rank decides now
            order = self._broadcast(self._decided() if self._decides() else None)
        return iter(order)

    def _decided(self) -> list[Any]:
        with seeded(self._seed + self._epoch):
            for owner in (self.sampler, getattr(self.sampler, "sampler", None)):
                if isinstance(own := getattr(owner, "generator", None), torch.Generator):
                    own.manual_seed(self._own_seed(own) + self._epoch)
            order = list(self.sampler)
        if len(order) > len(self):
            warnings.warn(
                f"{type(self.sampler).__name__} yields {len(order)} items, but its length says {len(self)}: the "
                "rest is not used. Let its `__len__` tell how many it yields.",
                stacklevel=3,
            )
        return order


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block with the global CPU random states of torch, NumPy and Python seeded, and restore them after it."""
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
