"""Passes: where a rank has more samples of a batch than it takes at once, its loader makes several batches of them."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from lightning_hetero.batching.shares import passes
from lightning_hetero.errors import DataError

T = TypeVar("T")


class Passes(list[Any]):
    """The batches of one rank in one step, in the order in which it runs them, each as ``collate_fn`` makes it."""


def even_sizes(samples: int, count: int) -> list[int]:
    """Sizes of as many passes, as even as can be."""
    return [samples * (i + 1) // count - samples * i // count for i in range(count)]


class CollateWhole:
    """Collates each of a rank's batches of the user's batch sampler by itself.

    Args:
        collate: the user's ``collate_fn``; takes what the dataset gives for a batch.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, batches: list[Any]) -> Any:
        """A batch, or the :class:`Passes` if there are several."""
        return self.collate(batches[0]) if len(batches) == 1 else Passes(map(self.collate, batches))


class CollateInPasses:
    """Collates a rank's samples as the user's loader does, in as many batches as it takes passes.

    Args:
        collate: the user's ``collate_fn``; takes a list of samples.
        limit: most samples in one pass.
    """

    def __init__(self, collate: Callable[[Any], Any], limit: int) -> None:
        self.collate, self.limit = collate, limit

    def __call__(self, samples: Any) -> Any:
        """A batch, or the :class:`Passes` if there are several."""
        count = passes(len(samples), self.limit) if isinstance(samples, list) else 1  # others are made in one piece
        if count == 1:
            return self.collate(samples)
        return Passes(self.collate(part) for part in in_passes(samples, count))


def in_passes(samples: Sequence[T], count: int) -> list[list[T]]:
    """Samples of one rank, cut into so many passes of nearly the same size."""
    ends = [*accumulate(even_sizes(len(samples), count))]
    return [list(samples[begin:end]) for begin, end in pairwise([0, *ends])]


def batches_of(batch: Any, count: int | None = None) -> Sequence[Any]:
    """The batches of a rank in one step: several, or the only one.

    Args:
        batch: as the loader gives it.
        count: passes that the rank is to run, if that is known.

    Raises:
        DataError: the batch could not be cut into as many.
    """
    batches = batch if isinstance(batch, Passes) else [batch]
    if count is not None and len(batches) != count:
        raise DataError(
            f"a rank's part of a batch is to be run in {count} passes, and its dataset makes it in {len(batches)}. Let "
            "its `__getitems__` return a list of samples, of which `collate_fn` makes a batch; or raise max_batch_size."
        )
    return batches
