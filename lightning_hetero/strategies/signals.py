"""SIGTERM, agreed upon."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import lightning.pytorch as pl


class StopRequest:
    """Stops the Trainer on all ranks at the same step once any rank has received SIGTERM.

    Lightning broadcasts a flag before every batch, which makes all ranks wait for rank 0 each time, and broadcasts
    within the signal's handler, whenever that happens to run. Here the handler only raises a flag, which travels with
    the ranks' reports.

    Args:
        trainer: whose handlers are replaced; before it registers them.
    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        self.requested = False
        self._trainer = trainer
        nothing: Callable[[], None] = lambda: None  # noqa: E731
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = nothing  # type: ignore[method-assign]
        trainer._signal_connector._sigterm_notifier_fn = self._notify  # type: ignore[method-assign]

    def heed(self) -> None:
        """Some rank has been asked to stop: let the Trainer stop after this batch."""
        self._trainer._signal_connector.received_sigterm = True

    def _notify(self, signum: int | signal.Signals, _: FrameType | None) -> None:
        launcher = self._trainer.strategy.launcher
        if not self.requested and launcher is not None:
            launcher.kill(signum)
        self.requested = True
