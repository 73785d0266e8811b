"""How a strategy gives each rank its part of the data."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.strategies.connector import is_sharded
from lightning_hetero.strategies.evaluation import Evaluation
from lightning_hetero.strategies.guards import samples_in
from lightning_hetero.strategies.workshare import Workshare
from lightning_hetero.workload.sampler import Position
from lightning_hetero.workload.timer import StepTimer

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Data(Evaluation):
    """Replaces samplers by those that follow the plan, and knows where in an epoch the Trainer stands."""

    share: Workshare  # once the ranks have met
    _timer: StepTimer

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # Lightning's samplers yield the global order, which this strategy's samplers cut up.
        return {"num_replicas": 1, "rank": 0}

    def process_dataloader(self, dataloader: object) -> object:
        """Give the loader a sampler that follows the plan.

        Raises:
            UnsupportedError: nothing is running.
        """
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        stage = None if trainer is None else trainer.state.stage
        if trainer is None or stage is None or self.topology is None:
            raise UnsupportedError(
                "a dataloader was to be set up while no fit, validation, test or prediction is running. Its parts "
                "follow from where a run stands, and all ranks set it up together: pass it to one of these."
            )
        sharded = not trainer._accelerator_connector.use_distributed_sampler or is_sharded(dataloader)
        if trainer.training:
            return self.share.loaders.training(dataloader, sharded)
        return self.share.loaders.evaluation(dataloader, sharded, stage.dataloader_prefix or "validation")

    @property
    def _trainer(self) -> "pl.Trainer":
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _samples_in(self, batch: Any) -> float:
        """Samples in a batch of a stream, whose size nobody has planned."""
        if callable(getattr(self.lightning_module, "batch_weight", None)):
            return 1.0  # the user's own weights count
        return samples_in(batch)

    def _begin_pass(self) -> Position:
        self.share.begin_pass()
        return self._position()

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch; from the first of an epoch on the timer sees how long the next one takes to fetch."""
        fetcher = self._trainer.fit_loop._data_fetcher if self.lightning_module is not None else None
        if fetcher is not None and not isinstance(fetcher._start_profiler, _Both):  # the Trainer sets its own anew
            start, stop = fetcher._start_profiler, fetcher._stop_profiler
            fetcher._start_profiler, fetcher._stop_profiler = (
                _Both(start, self._timer.fetching),
                _Both(self._timer.fetched, stop),
            )
        return super().batch_to_device(batch, device, dataloader_idx)

    def _position(self) -> Position:
        fit = self._trainer.fit_loop
        epochs = fit.epoch_progress.current.processed  # type: ignore[attr-defined]
        batches = fit.epoch_loop.batch_progress.current.processed if fit.restarting else 0  # type: ignore[attr-defined]
        return Position(epochs, batches, self.share.step)

    def _where(self) -> str:
        """Which step runs, for messages."""
        batch = self._trainer.fit_loop.epoch_loop.batch_idx
        return f"step {self._trainer.global_step + 1} (epoch {self._trainer.current_epoch}, batch {batch})"


class _Both:
    """Calls one function, then another."""

    def __init__(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        self._first, self._second = first, second

    def __call__(self) -> None:
        self._first()
        self._second()
