"""What a strategy asks about replicas, and the answers where there is one replica only."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from lightning_hetero.averaging.averager import Outcome, Run


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

    windows: int  # optimizer steps since the start of the fit
    meetings: int  # exchanges between replicas that this one has completed, since its ranks have met

    def window_ended(self) -> None:
        """The optimizer has stepped; after :meth:`due`."""

    def exchange(self) -> Outcome | None:
        """What follows between replicas; after :meth:`window_ended`. It can be called again if it breaks."""

    def met(self) -> None:
        """The exchange is complete: where all replicas are here now, act on their reports."""

    def look(self, sanity_check: bool) -> list[Tensor] | None:
        """The values to validate; ``None``: those of the model (collective).

        Args:
            sanity_check: whether this is the sanity check, before training.
        """

    def hold(self, values: list[Tensor] | None) -> None:
        """Let the model hold what :meth:`look` has returned, until :meth:`release`."""

    def release(self) -> None:
        """Let the model hold this replica's own values again."""

    def close(self) -> None:
        """Let go of what the fit held; local, idempotent, also after an error."""

    @property
    def lockstep(self) -> bool:
        """Whether all replicas exchange after the same steps."""

    def go_on(self, former: Any, kept: Sequence[int], missed: bool, run: Run) -> None:
        """Go on in the midst of a fit, among the replicas that remain (collective over them).

        Args:
            former: what went on until now.
            kept: of each replica that remains, its index before.
            missed: whether the others have completed an exchange in which this replica lost its connections.
            run: what is known of the job and the fit now.
        """

    def abandon(self) -> None:
        """Drop what is under way between replicas: one was lost, and connections are broken. Local."""

    def take_over(self, former: Any) -> None:
        """Go on where another one of this kind has stopped, which was made from an earlier view, between two fits."""


class SingleReplica:
    """The engine of strategies with one replica, in which there is nothing to do between replicas.

    Args:
        report_every: batches from one exchange of reports to the next.
    """

    def __init__(self, report_every: int) -> None:
        self._report_every = report_every
        self.windows = self.meetings = 0

    def before_window(self) -> None:
        """See :class:`Engine`."""

    def due(self, batch: int, window_ends: bool, epoch_ends: bool) -> bool:
        """See :class:`Engine`."""
        return batch % self._report_every == 0

    def take_loss(self, loss: Tensor) -> None:
        """See :class:`Engine`."""

    def window_ended(self) -> None:
        """See :class:`Engine`."""
        self.windows += 1

    def exchange(self) -> Outcome | None:
        """See :class:`Engine`."""
        return None

    def met(self) -> None:
        """See :class:`Engine`."""

    def look(self, sanity_check: bool) -> list[Tensor] | None:
        """See :class:`Engine`."""
        return None

    def hold(self, values: list[Tensor] | None) -> None:
        """See :class:`Engine`."""

    def release(self) -> None:
        """See :class:`Engine`."""

    def close(self) -> None:
        """See :class:`Engine`."""

    lockstep = True

    def go_on(self, former: "SingleReplica", kept: Sequence[int], missed: bool, run: Run) -> None:
        """See :class:`Engine`."""

    def abandon(self) -> None:
        """See :class:`Engine`."""

    def take_over(self, former: "SingleReplica") -> None:
        """See :class:`Engine`."""
        self.windows = former.windows
