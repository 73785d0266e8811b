"""Batches of sizes that only their own rank knows: iterable datasets, and loaders that the user has sharded."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from lightning_hetero.errors import DataError
from lightning_hetero.workload.sampler import Drawn


class Tally(NamedTuple):
    """What all ranks have together at one step of a stream.

    Attributes:
        samples: samples in the batches of all ranks; NaN if a rank could not tell.
        alive: ranks that still have data.
        empty: ranks that had no data at all.
    """

    samples: float
    alive: float
    empty: float


class Stream:
    """Iterates over a loader in step with the other ranks, which learn its batch sizes as they come.

    A rank that has no more data repeats its last batch with weight 0 until all have ended: every sample counts
    exactly once, every rank runs the same number of steps, and nobody waits for a rank that has left.

    Args:
        loader: any iterable of batches. Attributes that are not found here are looked up on it.
        size_of: samples in a batch; raises if it cannot tell.
        exchange: sums (samples, alive, empty) over the ranks (collective).
    """

    def __init__(
        self, loader: Iterable[Any], size_of: Callable[[Any], float], exchange: Callable[[Tally], Tally]
    ) -> None:
        self.loader, self._size_of, self._exchange = loader, size_of, exchange
        self.drawn: deque[Drawn] = deque()

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet: unpickling, copying
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def _iterator(self) -> Any:  # Lightning resets a DataLoader's workers through this
        return getattr(self.loader, "_iterator", None)

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        if hasattr(self.loader, "_iterator"):
            self.loader._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        self.drawn.clear()
        end = object()
        batches = iter(self.loader)
        batch = current = end
        ended = False
        while True:
            current = end if ended else next(batches, end)
            ended = current is end
            samples, problem = self._measure(current) if not ended else (0.0, None)
            tally = self._exchange(Tally(samples, float(not ended), float(ended and batch is end)))
            if math.isnan(tally.samples):  # on every rank at once
                raise DataError(
                    "the number of samples in a training batch is unknown"
                    + (f": {problem}" if problem else " on another rank.")
                    + " Return tensors with the batch as their first dimension, or define `batch_weight(batch)` "
                    "on the LightningModule."
                )
            if tally.alive == 0:
                return
            if tally.empty:
                raise DataError(
                    f"{int(tally.empty)} rank(s) got no training batch at all while others did. Give every rank at "
                    "least one: check how the dataset is sharded."
                )
            batch = batch if ended else current
            self.drawn.append(Drawn(samples, tally.samples))
            yield batch

    def _measure(self, batch: Any) -> tuple[float, str | None]:
        try:
            return float(self._size_of(batch)), None
        except Exception as error:
            return float("nan"), str(error)


class SizedStream(Stream):
    """A :class:`Stream` with a known number of batches.

    Args:
        loader: iterates over this rank's batches.
        size_of: counts the samples of a batch.
        exchange: sums tallies over all ranks.
        length: batches until the last rank's stream ends.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        size_of: Callable[[Any], float],
        exchange: Callable[[Tally], Tally],
        length: int,
    ) -> None:
        super().__init__(loader, size_of, exchange)
        self._length = length

    def __len__(self) -> int:
        return self._length


class VaryingBatchSizes:
    """Batch sampler for an iterable dataset: asks it for this rank's share of samples, which may change by the step.

    Args:
        share: samples for this rank at a given step.
        step: first step of the pass; asked when an epoch begins.
    """

    def __init__(self, share: Callable[[int], int], step: Callable[[], int]) -> None:
        self._share, self._step = share, step
        self.next_step = 0

    def __iter__(self) -> Iterator[list[None]]:
        self.next_step = self._step()
        while True:
            share = max(self._share(self.next_step), 1)
            self.next_step += 1
            yield [None] * share
