"""Validation, test and prediction: every sample once, on one rank, and values that count by samples."""

from collections.abc import Iterator
from typing import Any

from lightning.pytorch.loops.fetchers import _DataFetcherWrapper
from lightning.pytorch.utilities.data import extract_batch_size

from lightning_hetero.strategies.membership import Membership
from lightning_hetero.strategies.replica_ddp import ReplicaDDP
from lightning_hetero.strategies.weights import StepWeight


class Evaluation(Membership):
    """Evaluates the bare module on this rank's part of the data."""

    def on_validation_start(self) -> None:
        """All ranks validate with the buffers of the replica's first, as DDP would."""
        super().on_validation_start()
        if isinstance(self.model, ReplicaDDP):
            self.model.share_buffers()

    def on_validation_end(self) -> None:
        """Validation is no part of a training step's time."""
        super().on_validation_end()
        self._timer.restart()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the bare module: ranks need not run the same number of batches, and DDP would wait for buffers."""
        return self._evaluate("val", "validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`validation_step`."""
        return self._evaluate("test", "test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`validation_step`."""
        return self._evaluate("predict", "predict_step", *args, **kwargs)

    def _evaluate(self, stage: str, name: str, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        source = args[0] if args else None
        if isinstance(source, _DataFetcherWrapper):  # the step fetches its batches by itself
            weight = StepWeight(self, _Fetched(source), self.lightning_module.trainer._results, infers=True)
        else:
            weight = StepWeight(self, lambda: _samples(source), self.lightning_module.trainer._results)
        with getattr(self.precision_plugin, f"{stage}_step_context")(), weight:
            return getattr(self.lightning_module, name)(*args, **kwargs)


class _Fetched:
    """The samples of the batch that a step fetches, once it has done so; unknown if it fetches another number."""

    def __init__(self, batches: _DataFetcherWrapper) -> None:
        self._fetcher, self._before = batches.data_fetcher, batches.fetched

    def __call__(self) -> float | None:
        return _samples(self._fetcher._batch) if self._fetcher.fetched == self._before + 1 else None


def _samples(batch: Any) -> float | None:
    """The samples in a batch as Lightning counts them; ``None`` if they are unknown."""
    if isinstance(batch, Iterator):  # to look into it would use it up
        return None
    try:
        return float(extract_batch_size(batch))
    except Exception:  # a class of the user's can do anything when it is looked into
        return None
