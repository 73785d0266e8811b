"""Makes batches of any size from the samples of the training data, without taking any of them from the fit."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.workload.order import FixedBatches
from lightning_hetero.workload.sampler import ShareSampler
from lightning_hetero.workload.shared_stream import SharedStreamLoader


class TrialBatches:
    """Batches of the samples with which the first global batch begins (made by all ranks together).

    The loaders' own ``collate_fn`` makes them, in a worker process if the loaders have workers.

    Args:
        loaders: of the fit, with the samplers of the strategy.

    Attributes:
        total: samples in a global batch, of all loaders together.
        unit: samples by which batches grow; more than 1 where several loaders keep their proportions.

    Raises:
        UnsupportedError: the data do not allow it.
    """

    def __init__(self, loaders: CombinedLoader) -> None:
        flat, self._structure = tree_flatten(loaders.iterables)
        self._parts = [_part(loader) for loader in flat]
        self.total = sum(part.size for part in self._parts)
        self.unit = self.total // math.gcd(*(part.size for part in self._parts))

    def of(self, samples: int) -> Any:
        """A batch of so many samples, a multiple of the unit."""
        batches = [part.batch(samples * part.size // self.total) for part in self._parts]
        return tree_unflatten(batches, self._structure)

    def sizes(self, samples: int) -> dict[int, int]:
        """The sizes of such a batch and of its parts, each with that of the global batch or part."""
        parts = {samples * part.size // self.total: part.size for part in self._parts}
        return {**parts, samples: self.total}


class _Part:
    """A loader's part of a batch.

    Args:
        loader: like the one to be made.
        data: the samples.
        size: samples of the loader's global batch.
    """

    def __init__(self, loader: Any, data: "_Head | _Chosen", size: int) -> None:
        self.size, self._loader, self._data = size, loader, data

    def batch(self, samples: int) -> Any:
        """A batch of so many samples."""
        like = self._loader
        names = ("worker_init_fn", "timeout", "multiprocessing_context") if like.num_workers else ()
        loader = DataLoader(
            **self._data.first(samples),
            collate_fn=like.collate_fn,
            num_workers=min(1, like.num_workers),
            generator=torch.Generator(),
            **{name: getattr(like, name) for name in names},
        )
        return next(iter(loader))


class _Chosen:
    """Samples of a map-style dataset.

    Args:
        dataset: of the user's.
        indices: of the samples.
    """

    def __init__(self, dataset: Any, indices: Sequence[Any]) -> None:
        self._dataset, self._indices = dataset, indices

    def first(self, samples: int) -> dict[str, Any]:
        """What a DataLoader is to be given."""
        return {"dataset": self._dataset, "batch_sampler": [list(islice(cycle(self._indices), samples))]}


class _Head(IterableDataset):
    """The first samples of a stream that can be read again, and again if it has too few.

    Args:
        stream: of the user's.
        samples: how many to yield.
    """

    def __init__(self, stream: Iterable[Any], samples: int = 0) -> None:
        self._stream, self._samples = stream, samples

    def __iter__(self) -> Iterator[Any]:
        return islice(cycle(self._stream), self._samples)

    def first(self, samples: int) -> dict[str, Any]:
        """What a DataLoader is to be given."""
        return {"dataset": _Head(self._stream, samples), "batch_size": samples}


def _part(loader: Any) -> _Part:
    if isinstance(loader, SharedStreamLoader):
        return _Part(loader.like, _Head(loader.stream.dataset), loader.batch_sampler.batch_size)  # type: ignore[attr-defined]
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, ShareSampler) and isinstance(sampler.batches, FixedBatches):
        indices = next(sampler.batches.draw(0))
        return _Part(loader, _Chosen(loader.dataset, indices), sampler.batches.batch_size)
    raise UnsupportedError(
        "max_batch_size='auto' tries batches of several sizes before training starts. It needs a map-style dataset "
        "with a batch_size, or a SharedStream: samples of other streams cannot be read twice, and a batch sampler of "
        "yours says itself how large batches are. Give max_batch_size as numbers."
    )
