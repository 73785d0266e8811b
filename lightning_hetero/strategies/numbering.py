"""This process's rank: as the launcher gave it, and after ranks were lost."""

import csv
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import CSVLogger

from lightning_hetero.launch.environment import RenumberedEnvironment

if TYPE_CHECKING:
    import lightning.pytorch as pl


def launched(environment: ClusterEnvironment) -> ClusterEnvironment:
    """The launcher's environment of this process, before it got another number."""
    while isinstance(environment, RenumberedEnvironment):
        environment = environment.inner
    return environment


def continue_logs(trainer: "pl.Trainer") -> None:
    """Let loggers of files write on where the former rank zero has stopped, not from the beginning."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            path = Path(logger.log_dir) / "metrics.csv"
            with suppress(OSError), path.open(newline="") as file, warnings.catch_warnings():
                rows: list[Any] = [{name: x for name, x in row.items() if x} for row in csv.DictReader(file)]
                warnings.simplefilter("ignore")  # that the file is there already
                logger.experiment.metrics = rows


def show_progress(trainer: "pl.Trainer") -> None:
    """Begin to show the progress of training on this rank, as if training and the epoch had just started."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ProgressBar):
            callback.enable()
            callback.on_train_start(trainer, trainer.lightning_module)
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
