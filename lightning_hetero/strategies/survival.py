"""What a strategy asks where a lost rank need not end the fit."""

import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from lightning_hetero.strategies.lost_samples import sentence

if TYPE_CHECKING:
    import torch.distributed as dist

    from lightning_hetero.comm.membership import Agreed
    from lightning_hetero.engine.view import View
    from lightning_hetero.strategies.growth import Growth

T = TypeVar("T")


@dataclass(frozen=True)
class Loss:
    """A change of who takes part.

    Attributes:
        view: number of the view since then.
        lost: of each lost rank, by the number that it had at first, how it was lost.
        ranks: that remain.
        replicas: that remain.
        seconds: for which this rank stood still: from the beginning of the step, exchange or collective that broke to
            when it could begin it again.
        samples: drawn for the lost ranks, and not trained on.
        bound: what that number is: ``""`` (exactly so many), ``"up to "`` or ``"at least "``.
        joined: ranks that have joined, by their numbers since then.
        step: the Trainer's ``global_step`` then.
        at: when this rank went on, by ``time.perf_counter()``.
    """

    view: int
    lost: dict[int, str]
    ranks: int
    replicas: int
    seconds: float
    samples: int
    step: int
    joined: tuple[int, ...] = ()
    at: float = field(default_factory=time.perf_counter, compare=False)
    bound: str = ""

    def warn(self, view: "View") -> None:
        """Tell the user who was lost, if anybody was.

        Args:
            view: since then, of this rank.
        """
        if not self.lost:
            return
        who = "; ".join(f"rank {id} {how}" for id, how in sorted(self.lost.items()))
        left = sentence(self.samples, self.bound, "that they had still to take")
        rest = f"{view.world} rank(s)" if view.ranks_leave else f"{view.count} replica(s) with {view.world} rank(s)"
        with suppress(UserWarning):  # also where warnings are errors
            warnings.warn(
                f"{who}. Training goes on with {rest} after step {self.step}; this rank, now number {view.rank}, stood "
                f"still for {self.seconds:.2f} s.{left}",
                stacklevel=4,
            )


class Survival:
    """What a strategy asks where a lost rank need not end the fit; here it does.

    Attributes:
        losses: the changes of who takes part, in this fit.
    """

    def __init__(self) -> None:
        self.losses: list[Loss] = []

    @property
    def growth(self) -> "Growth | None":
        """Lets other processes join, where that is possible."""
        return None

    @property
    def view(self) -> int | None:
        """The number of the view, while ranks may be lost; else ``None``."""
        return None

    @property
    def changing(self) -> bool:
        """Whether the ranks are about to agree on who remains."""
        return False

    @property
    def patience(self) -> float:
        """Seconds after which it is known that a rank is lost, while ranks may be lost; else 0."""
        return 0.0

    def begin(self) -> None:
        """Training starts (collective)."""

    def end(self) -> None:
        """Training has ended, on all ranks. Local, idempotent."""

    def pause(self) -> None:
        """Leave the fit, to begin it again with other ranks (collective)."""

    def remaining(self) -> "tuple[Agreed, int, dist.Store | None] | None":
        """Who is there still of those that have left the fit (collective over them).

        Returns:
            What they have agreed, the id of this rank, and the store with which they meet, if this rank hosts it;
            ``None`` if it was alone.
        """
        return None

    def failed(self, exception: BaseException) -> None:
        """This rank ends with an error."""

    def again(self, operation: Callable[[], T]) -> T:
        """The result of an operation that can be called again if it breaks."""
        return operation()

    def step(self, operation: Callable[[], T], left_out: Callable[[], T]) -> T:
        """Run an optimizer step.

        Args:
            operation: the step, which can be repeated if a gradient does not arrive.
            left_out: what to do instead if the other ranks have taken it.
        """
        return operation()

    def exchange(self, operation: Callable[[], T]) -> T | None:
        """Run what follows a step between replicas; nothing if the others have completed it."""
        return operation()
