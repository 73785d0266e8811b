"""Validation, test and prediction: every sample once, on one rank, and values that count by samples."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.data import extract_batch_size

from lightning_hetero.strategies.collectives import Collectives
from lightning_hetero.strategies.membership import Membership
from lightning_hetero.strategies.replica_ddp import ReplicaDDP


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

    def _evaluate(self, stage: str, name: str, *args: Any, **kwargs: Any) -> Any:
        def samples() -> float:
            return float(extract_batch_size(args[0]))

        with getattr(self.precision_plugin, f"{stage}_step_context")(), StepSamples(self, samples):
            return getattr(self.lightning_module, name)(*args, **kwargs)


class StepSamples:
    """While a step runs, means weigh this rank by its samples.

    Args:
        strategy: whose ``reduce`` is meant.
        samples: this rank's samples in the step, asked only if something is reduced.
    """

    def __init__(self, strategy: Collectives, samples: Callable[[], float]) -> None:
        self._strategy, self._samples = strategy, samples

    def __enter__(self) -> None:
        self._strategy._step_samples = self._samples

    def __exit__(self, *_: object) -> None:
        self._strategy._step_samples = None
