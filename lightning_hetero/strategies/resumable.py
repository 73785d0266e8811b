"""What a strategy asks of a callback that keeps checkpoints to start again from."""

from abc import abstractmethod
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import Checkpoint

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Resumable(Checkpoint):
    """A callback that keeps checkpoints in a folder of its own, and goes on from the newest one by itself."""

    @abstractmethod
    def path_to_stop_at(self, trainer: "pl.Trainer") -> str:
        """Where a job that is asked to stop saves, so that the next start finds it."""

    @abstractmethod
    def complete(self) -> None:
        """Wait until nothing is written any more on this rank; problems are for the next save to tell."""


def keepers(trainer: "pl.Trainer") -> list[Resumable]:
    """Such callbacks of a Trainer."""
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, Resumable)]
