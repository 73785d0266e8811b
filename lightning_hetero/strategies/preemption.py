"""Where a job that is asked to stop saves, and how SLURM is asked to start it again."""

import os
import subprocess
from pathlib import PurePath
from typing import TYPE_CHECKING

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import tensor

from lightning_hetero._lightning import environment_of, hpc_path
from lightning_hetero.strategies.resumable import keepers

if TYPE_CHECKING:
    import lightning.pytorch as pl


def path_to_save(trainer: "pl.Trainer") -> str | None:
    """Where to save the checkpoint to resume from; rank 0's word counts.

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
