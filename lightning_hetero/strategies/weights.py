"""How much this rank counts in a mean over ranks, while one of its steps runs."""

from collections.abc import Callable
from typing import Any

from lightning_hetero.strategies.collectives import Collectives


class StepWeight:
    """While a step runs, means over ranks weigh this rank by its samples.

    What ``self.log(..., batch_size=n)`` says about one value goes before what is known about the step.

    Args:
        strategy: the one that reduces.
        samples: this rank's samples in the step, ``None`` if they are unknown; asked only if something is reduced.
        results: the Trainer's collection of logged values, if the step can log.
        infers: tell Lightning these samples where the user has given no ``batch_size``. Where a step fetches its own
            batches, Lightning would look into the batch of the step before.
    """

    def __init__(
        self,
        strategy: Collectives,
        samples: Callable[[], float | None],
        results: Any | None = None,
        infers: bool = False,
    ) -> None:
        self._strategy, self._samples, self._results, self._infers = strategy, samples, results, infers

    def __enter__(self) -> None:
        self._strategy._step_samples = self._samples
        if self._results is not None:
            self._results.log = self._log

    def __exit__(self, *_: object) -> None:
        self._strategy._step_samples = None
        if self._results is not None:
            del self._results.log

    def _log(self, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
        if batch_size is None and self._infers and (samples := self._samples()) is not None:
            batch_size = int(samples)
        if batch_size is not None:
            given = float(batch_size)
            self._strategy._step_samples = lambda: given
        results: Any = self._results
        try:
            type(results).log(results, *args, batch_size=batch_size, **kwargs)
        finally:
            self._strategy._step_samples = self._samples
