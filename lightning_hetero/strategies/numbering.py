"""The numbers of this process among the ranks, as its launcher gave them and after ranks were lost."""

import csv
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_hetero.comm.job import Job
from lightning_hetero.comm.topology import interface_towards
from lightning_hetero.launch.environment import RenumberedEnvironment

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_hetero.strategies.base import HeteroStrategy


def interface(strategy: "HeteroStrategy") -> str:
    """This rank's address in the network of the job."""
    assert strategy.cluster_environment is not None
    return interface_towards(strategy.cluster_environment.main_address)


def launched(strategy: "HeteroStrategy") -> ClusterEnvironment:
    """What the launcher said about this process."""
    environment = strategy.cluster_environment
    assert environment is not None
    while isinstance(environment, RenumberedEnvironment):
        environment = environment.inner
    return environment


def renumber(strategy: "HeteroStrategy", rank: int, world: int) -> None:
    """Let this process have another number, among other ranks than were launched with it."""
    strategy.cluster_environment = RenumberedEnvironment(launched(strategy), rank, world)
    rank_zero_only.rank = rank  # type: ignore[attr-defined]


def take_number(strategy: "HeteroStrategy", job: Job) -> None:
    """Let this process have its new number, and the duties of rank zero if that is it."""
    first = not strategy.is_global_zero and job.view.rank == 0
    renumber(strategy, job.view.rank, job.view.world)
    if first:
        _go_on_logging(strategy.trainer)
        if strategy.trainer.training:
            _show_progress(strategy.trainer)


def _go_on_logging(trainer: "pl.Trainer") -> None:
    """Let loggers of files write on where the former rank zero has stopped, not from the beginning."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            path = Path(logger.log_dir) / "metrics.csv"
            with suppress(OSError), path.open(newline="") as file, warnings.catch_warnings():
                rows: list[Any] = [{name: x for name, x in row.items() if x} for row in csv.DictReader(file)]
                warnings.simplefilter("ignore")  # that the file is there already
                logger.experiment.metrics = rows


def _show_progress(trainer: "pl.Trainer") -> None:
    """Begin to show the progress of training on this rank, as if training and the epoch had just started."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ProgressBar):
            callback.enable()
            callback.on_train_start(trainer, trainer.lightning_module)
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
