"""How a strategy saves and loads checkpoints."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_hetero.comm.agreement import gather
from lightning_hetero.errors import CheckpointError
from lightning_hetero.strategies import random_states
from lightning_hetero.strategies.checkpoint import REPLICAS, add_plan, readable, restore_plan
from lightning_hetero.strategies.checkpoint_io import AtomicCheckpointIO
from lightning_hetero.strategies.data import Data
from lightning_hetero.strategies.preemption import path_to_save, requeue, say_where


class Saving(Data):
    """Adds the plan and random states to checkpoints, and never leaves a part of one under its final name."""

    _random_states: dict[str, Any] | None = None  # to restore once training starts

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """Writes and reads the files; the user's own plugin, if one was given."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):  # such as AsyncCheckpointIO
            self._checkpoint_io.checkpoint_io = AtomicCheckpointIO()  # kept only if it wraps none yet
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        """Use another plugin."""
        self._checkpoint_io = io

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Add the plan to the checkpoint, which any strategy can load, and write it.

        Raises:
            CheckpointError: on every rank, if it cannot be written.
        """
        if self.topology is not None:
            add_plan(checkpoint, self.share)
            if not self._alone():
                random_states.gather_into(checkpoint)
        with self._told_to_all():
            super().save_checkpoint(checkpoint, filepath, storage_options)
        self._timer.restart()

    @contextmanager
    def _told_to_all(self) -> Iterator[None]:
        """An error in the block is raised on every rank (collective)."""
        problem: Exception | None = None
        try:
            yield
        except Exception as error:
            problem = error
        everyone = [] if self._alone() else gather(None if problem is None else str(problem), "a checkpoint's fate")
        if problem is not None:
            raise problem
        for rank, text in enumerate(everyone):
            if text is not None:
                raise CheckpointError(f"rank {rank} could not save: {text}")

    def _save_and_stop(self) -> None:
        """Save what a job that is asked to stop can be resumed from; all ranks have done the same steps (collective).

        Raises:
            CheckpointError: on every rank, if it cannot be written.
        """
        trainer = self._trainer
        path = self.broadcast(path_to_save(trainer) if self.is_global_zero else None)
        if path is not None:
            trainer.save_checkpoint(path)
            with self._told_to_all():  # no process ends before this is done
                if isinstance(self.checkpoint_io, AsyncCheckpointIO):
                    self.checkpoint_io.teardown()  # waits until the file is whole
                requeue(trainer)
        say_where(path)
        self.share.listen()  # leave nothing in flight
        self._all_stop = True

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with readable(checkpoint_path):  # Lightning passes `weights_only` from 2.6 on
            return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers, and the plan if the number of ranks is what it was."""
        super().load_optimizer_state_dict(checkpoint)
        assert self.topology is not None
        restore_plan(checkpoint, self.share, self.topology.rank)
        self._random_states = random_states.find(checkpoint)
        self._restore_replicas(checkpoint)

    def _restore_replicas(self, checkpoint: Mapping[str, Any]) -> None:
        """Here there is one replica: what a checkpoint holds of several is left out, with a warning."""
        if (saved := checkpoint.get(REPLICAS)) is not None:
            rank_zero_warn(
                f"The checkpoint was saved by {saved['strategy']}, this is {type(self).__name__}. Training starts from "
                "the checkpoint's weights, the consensus of its replicas, with the optimizer state of the first one."
            )
