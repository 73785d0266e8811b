"""Loaders that Lightning must leave as they are: with batch samplers of the user's, or sharded by the user."""

import copy
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.data import has_iterable_dataset
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    import lightning.pytorch as pl


def keep_batch_samplers(trainer: "pl.Trainer") -> None:
    """Let a Trainer pass batch samplers of the user's on to the strategy, instead of constructing them anew."""
    if type(trainer._data_connector) is _DataConnector:
        trainer._data_connector.__class__ = _Connector  # a class of ours and no bound function: copies of it work


def has_own_batches(loader: DataLoader) -> bool:
    """Whether a loader was given a ``batch_sampler`` and no ``batch_size``; a DataLoader then has no batch size."""
    return loader.batch_sampler is not None and loader.batch_size is None


def is_sharded(loader: Any) -> bool:
    """Whether one of a loader's samplers says that it yields this rank's part of the data."""
    batches = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    return any(isinstance(n := getattr(sampler, "num_replicas", None), int) and n > 1 for sampler in samplers)


class _Connector(_DataConnector):
    def _prepare_dataloader(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        decides = self.trainer._accelerator_connector.use_distributed_sampler  # not so if the user has sharded all
        if decides and isinstance(dataloader, DataLoader) and not has_iterable_dataset(dataloader):
            sharded = is_sharded(dataloader)
            if mode == RunningStage.PREDICTING and sharded:
                pass  # Lightning notes the indices of what is predicted
            elif sharded or has_own_batches(dataloader):
                loader = copy.copy(dataloader)  # the user's own stays as it is
                loader._iterator = None
                return loader
        return super()._prepare_dataloader(dataloader, shuffle, mode)
