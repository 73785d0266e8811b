"""What a strategy asks about replicas, and the answers where there is one replica only."""

from typing import Any, Protocol

from torch import Tensor

from lightning_hetero.averaging.averager import Outcome


class Engine(Protocol):
    """What a strategy asks about replicas. A window is an optimizer step with all the batches that it takes in."""

    def before_window(self) -> None:
        """A window is about to begin: before its first forward pass. Asked again within a window it does nothing."""

    def due(self, batch: int, window_ends: bool, epoch_ends: bool) -> bool:
        """Whether the ranks exchange reports after this batch; to be asked once per batch, alike on all ranks.

        Args:
            batch: batches done, this one included.
            window_ends: whether an optimizer has stepped after it.
            epoch_ends: whether it is the last of its epoch.
        """

    def take_loss(self, loss: Tensor) -> None:
        """Take in the loss of a batch, the mean over its samples."""

    def after_window(self) -> Outcome | None:
        """The optimizer has stepped; after :meth:`due`."""

    def hold(self, sanity_check: bool) -> None:
        """Let the model hold what is to be validated until :meth:`release` (collective).

        Args:
            sanity_check: whether this is the sanity check, before training.
        """

    def release(self) -> None:
        """Let the model hold this replica's own values again."""

    def close(self) -> None:
        """Let go of what the fit held; local, idempotent, also after an error."""

    def take_over(self, former: Any) -> None:
        """Go on where another one of this kind has stopped, which was made from an earlier view, between two fits."""


class SingleReplica:
    """The engine of strategies with one replica, in which there is nothing to do between replicas.

    Args:
        report_every: batches from one exchange of reports to the next.
    """

    def __init__(self, report_every: int) -> None:
        self._report_every = report_every

    def before_window(self) -> None:
        """See :class:`Engine`."""

    def due(self, batch: int, window_ends: bool, epoch_ends: bool) -> bool:
        """See :class:`Engine`."""
        return batch % self._report_every == 0

    def take_loss(self, loss: Tensor) -> None:
        """See :class:`Engine`."""

    def after_window(self) -> Outcome | None:
        """See :class:`Engine`."""
        return None

    def hold(self, sanity_check: bool) -> None:
        """See :class:`Engine`."""

    def release(self) -> None:
        """See :class:`Engine`."""

    def close(self) -> None:
        """See :class:`Engine`."""

    def take_over(self, former: "SingleReplica") -> None:
        """See :class:`Engine`."""
