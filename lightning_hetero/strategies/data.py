"""How a strategy gives each rank its part of the data."""

from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

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
        """Give the loader a sampler that follows the plan."""
        trainer = self._trainer
        sampler = getattr(dataloader, "sampler", None)
        sharded = not trainer._accelerator_connector.use_distributed_sampler or (
            isinstance(sampler, torch.utils.data.DistributedSampler) and sampler.num_replicas > 1
        )
        if trainer.training:
            return self.share.loaders.training(dataloader, sharded)
        assert trainer.state.stage is not None
        return self.share.loaders.evaluation(dataloader, sharded, trainer.state.stage.dataloader_prefix or "validation")

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
        fetcher = self._trainer.fit_loop._data_fetcher
        if fetcher is not None:  # it may be another one in each epoch
            fetcher._start_profiler, fetcher._stop_profiler = self._timer.fetching, self._timer.fetched
        return self._position()

    def _position(self) -> Position:
        fit = self._trainer.fit_loop
        epochs = fit.epoch_progress.current.processed  # type: ignore[attr-defined]
        batches = fit.epoch_loop.batch_progress.current.processed if fit.restarting else 0  # type: ignore[attr-defined]
        return Position(epochs, batches, self.share.step)
