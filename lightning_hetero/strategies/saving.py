"""How a strategy's checkpoints are written, and an error of one rank reaches all."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins import AsyncCheckpointIO

from lightning_hetero._lightning import WrappingCheckpointIO
from lightning_hetero.comm.agreement import gather
from lightning_hetero.errors import CheckpointError
from lightning_hetero.strategies.checkpoint_io import AtomicCheckpointIO
from lightning_hetero.strategies.preemption import path_to_save, requeue, say_where

if TYPE_CHECKING:
    from lightning_hetero.strategies.base import HeteroStrategy


def atomic(io: CheckpointIO | None) -> CheckpointIO:
    """The user's plugin, if there is one, or ours; a plugin that wraps another one gets ours to wrap."""
    if io is None:
        return AtomicCheckpointIO()
    if isinstance(io, WrappingCheckpointIO):  # such as AsyncCheckpointIO
        io.checkpoint_io = AtomicCheckpointIO()  # kept only if it wraps none yet
    return io


@contextmanager
def told_to_all(alone: bool) -> Iterator[None]:
    """An error in the block is raised on every rank (collective).

    Args:
        alone: whether there is nobody to tell.

    Raises:
        CheckpointError: another rank could not save.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    everyone = [] if alone else gather(None if problem is None else str(problem), "a checkpoint's fate")
    if problem is not None:
        raise problem
    for rank, text in enumerate(everyone):
        if text is not None:
            raise CheckpointError(f"rank {rank} could not save: {text}")


def save_to_resume(strategy: "HeteroStrategy") -> None:
    """Save what a job that is asked to stop can be resumed from; all ranks have done the same steps (collective).

    Raises:
        CheckpointError: on every rank, if it cannot be written.
    """
    trainer = strategy.trainer
    path = strategy.broadcast(path_to_save(trainer) if strategy.is_global_zero else None)
    if path is not None:
        trainer.save_checkpoint(path)
        with told_to_all(alone=False):  # no process ends before this is done
            if isinstance(strategy.checkpoint_io, AsyncCheckpointIO):
                strategy.checkpoint_io.teardown()  # waits until the file is whole
            requeue(trainer)
    say_where(path)
