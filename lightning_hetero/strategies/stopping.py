"""The checkpoint of a job that is asked to stop: where it is saved, and how the next start finds it."""

import os
import subprocess
from abc import abstractmethod
from pathlib import PurePath
from typing import TYPE_CHECKING

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import tensor

from lightning_hetero.lightning_compat import environment_of, hpc_path
from lightning_hetero.strategies.saving import raise_on_all_ranks

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Resumable(Checkpoint):
    """A callback that keeps checkpoints in a folder of its own, and goes on from the newest one by itself."""

    @abstractmethod
    def path_to_stop_at(self, trainer: "pl.Trainer") -> str:
        """The path at which a job that is asked to stop saves, so that the next start finds it."""

    @abstractmethod
    def complete(self) -> None:
        """Wait until nothing is written any more on this rank; problems are for the next save to tell."""


def keepers(trainer: "pl.Trainer") -> list[Resumable]:
    """Such callbacks of a Trainer."""
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, Resumable)]


def path_to_save(trainer: "pl.Trainer") -> str | None:
    """The path at which to save the checkpoint to resume from; rank 0's word counts.

    Under SLURM the name by which Lightning finds it at the next start. Else in the folder of a callback that goes on by
    itself, if there is one; or a name beside ``last.ckpt`` which ``ckpt_path="last"`` finds, as long as it is the
    newest. ``None`` if the Trainer has been told not to save.
    """
    if getattr(trainer, "fast_dev_run", False):
        return None
    if SLURMEnvironment.detect():
        return hpc_path(trainer)
    for resumable in keepers(trainer):
        return resumable.path_to_stop_at(trainer)
    models = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    for keeper in sorted(models, key=lambda keeper: not keeper.save_last):
        if keeper.dirpath is not None:
            progress = {"epoch": tensor(trainer.current_epoch), "step": tensor(trainer.global_step)}
            last = keeper.format_checkpoint_name({**trainer.callback_metrics, **progress}, keeper.CHECKPOINT_NAME_LAST)
            return last.removesuffix(keeper.FILE_EXTENSION) + "-sigterm" + keeper.FILE_EXTENSION
    return os.path.join(trainer.default_root_dir, "last-sigterm.ckpt") if trainer.checkpoint_callbacks else None


def say_where(path: str | None, trainer: "pl.Trainer") -> None:
    """Tell the user where the checkpoint is."""
    if path is None:
        rank_zero_info("SIGTERM: stopped. Nothing was saved: the Trainer has no checkpoint callback.")
    elif PurePath(path).name.startswith("hpc_ckpt_"):
        rank_zero_info(f"SIGTERM: stopped, and saved {path}, with which the next start goes on.")
    elif keepers(trainer):
        rank_zero_info(f"SIGTERM: stopped, and saved {path}. The same command goes on from there.")
    else:
        rank_zero_info(f"SIGTERM: stopped, and saved {path}. Go on with ckpt_path={path!r}, or ckpt_path='last'.")


def requeue(trainer: "pl.Trainer") -> None:
    """Put the SLURM job back in the queue, unless ``SLURMEnvironment(auto_requeue=False)``; on rank 0."""
    environment = environment_of(trainer)
    if not trainer.is_global_zero or not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return
    array, job = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_JOB_ID")
    name = job if array is None else f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if name is None:
        return
    command = ["scontrol", "requeue", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        problem = done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem is None:
        rank_zero_info(f"SLURM job {name} is in the queue again. To cancel it for good: `scancel {name}` once more.")
    else:
        rank_zero_warn(f"SLURM job {name} could not be put back in the queue by `{' '.join(command)}`: {problem}.")


def save_to_resume(trainer: "pl.Trainer") -> None:
    """Save what a job that is asked to stop can be resumed from; all ranks have done the same steps (collective).

    Raises:
        CheckpointError: on every rank, if it cannot be written.
    """
    for keeper in keepers(trainer):
        keeper.complete()  # or an older checkpoint would be written last, and be taken for the newest
    path = trainer.strategy.broadcast(path_to_save(trainer) if trainer.is_global_zero else None)
    if path is not None:
        trainer.save_checkpoint(path)
        with raise_on_all_ranks(alone=False):  # no process ends before this is done
            if isinstance(io := trainer.strategy.checkpoint_io, AsyncCheckpointIO):
                io.teardown()  # waits until the file is whole
            requeue(trainer)
    say_where(path, trainer)
