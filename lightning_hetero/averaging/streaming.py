"""Exchanges of fragments: one after another, in the background if wanted, each mixed in some steps later."""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_hetero.averaging.averager import Outcome, StepContext
from lightning_hetero.averaging.center import CenteredAverager, check_patterns
from lightning_hetero.averaging.fragments import Cut, Fragments, beginning
from lightning_hetero.averaging.low_bit import LowBitAverager
from lightning_hetero.checks import is_number
from lightning_hetero.comm.all_reduce import Average, Contribution
from lightning_hetero.comm.encodings import Feedback
from lightning_hetero.comm.links import Exchange
from lightning_hetero.comm.replica import Replica
from lightning_hetero.errors import ConfigurationError


@dataclass
class Fragment:
    """A part of the model in the midst of a fit.

    Attributes:
        replica: this rank's values of it.
        center: its part of the center, in the center's own memory.
        snapshot: memory for what is sent.
        mean: memory for what arrives.
        feedback: what low-bit messages of it have left out, if there are any.
        distance: of the replicas from the center, at its latest exchange; NaN before.
    """

    replica: Replica
    center: list[Tensor]
    snapshot: list[Tensor]
    mean: list[Tensor]
    feedback: Feedback | None
    distance: float = math.nan


class Pending(NamedTuple):
    """An exchange that has begun, and has not been mixed in yet.

    Attributes:
        step: optimizer step after which it began.
        average: what the exchange brings, or has brought.
    """

    step: int
    average: Exchange | Average


class StreamingAverager(LowBitAverager, CenteredAverager):
    """Fragment p of P exchanges after the steps t with ``t mod tau = p tau / P``; each moves a center of its own.

    With the whole model as one fragment, no delay and ``blend=1`` all replicas meet every tau steps.

    Attributes:
        fragments: how many, or ``"blocks"``.
        delay: steps for which an exchange may last, in the background; 0: all wait for it.
        blend: the part of the way that replicas go to the center when an exchange has arrived.
    """

    fragments: Fragments
    delay: int
    blend: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._cut = Cut(self.fragments)
        if type(self.delay) is not int or not 0 <= self.delay < self.tau:
            raise ConfigurationError(
                f"delay={self.delay!r} must be a whole number of optimizer steps, at least 0 (blocking) and less than "
                f"tau={self.tau}: an exchange of a fragment must be over before its next one begins."
            )
        if not is_number(self.blend) or not 0 < self.blend <= 1:
            raise ConfigurationError(
                f"blend={self.blend!r} must be above 0 and at most 1: the part of the way that replicas go to the "
                "center when an exchange has arrived."
            )
        if self.delay:
            self.facts = replace(type(self).facts, blocking=False)  # type: ignore[misc]

    @override
    def make_replica(self, module: nn.Module, settle: Callable[[], None] | None = None) -> Replica:
        cut = None if self.fragments == 1 else self._cut
        replica = Replica(module, settle, self.exclude, self.packed, cut=cut)
        check_patterns(self.exclude, replica.names)
        return replica

    @override
    def prepare(self) -> Outcome | None:
        super().prepare()
        self._since = 0  # steps since a fragment has last moved
        self._pending: dict[int, Pending] = {}  # by fragment, in the order of their beginning
        self.feedback = self.residuals(self.center)
        self._parts = [self._part(vectors) for vectors in self.replica.fragments]
        if self.delay:
            self.links.prepare()
        return None

    def _part(self, vectors: slice) -> Fragment:
        center = self.center[vectors]
        snapshot = [torch.empty_like(flat) for flat in self._packed[vectors]]
        mean = [torch.empty_like(old) for old in center]
        feedback = None if self.feedback is None else self.feedback.part(vectors)
        return Fragment(self.replica.part(vectors), center, snapshot, mean, feedback)

    @property
    def center(self) -> list[Tensor]:
        """``c``, which every rank keeps up to date."""
        return self.known

    @property
    @override
    def leads(self) -> bool:
        return self._since == 0 and self.blend == 1 and len(self._parts) == 1  # all replicas are where the center is

    # -- steps -------------------------------------------------------------------------------------

    def beginning(self, step: int) -> list[int]:
        """The fragments with an exchange that begins after a step."""
        return beginning(step, self.tau, len(self._parts))

    def _arriving(self, step: int) -> list[int]:
        return [p for p, pending in self._pending.items() if step - pending.step >= self.delay]

    @override
    def due(self, context: StepContext) -> bool:
        return bool(self._arriving(context.step) if self.delay else self.beginning(context.step))

    @override
    def after_step(self, context: StepContext) -> Outcome | None:
        self._since += 1
        arriving = self._arriving(context.step)
        for p in arriving:
            self._arrive(p)
        for p in self.beginning(context.step):
            self._begin(p, context)
            if not self.delay:
                self._arrive(p)
                arriving.append(p)
        return Outcome(exchanged=True) if arriving else None

    def _begin(self, p: int, context: StepContext) -> None:
        part = self._parts[p]
        part.snapshot = part.replica.pack(part.snapshot)
        weights, feedback = context.samples_per_replica, part.feedback
        own = Contribution(part.snapshot, weights, part.center, self.wire, feedback=feedback)
        exchange = self.links.begin if self.delay else self.links.exchange
        self._pending[p] = Pending(context.step, exchange(own, part.mean, want="difference"))

    def _result(self, p: int) -> Average:
        """Wait for an exchange, but do not mix it in."""
        pending = self._pending[p]
        if isinstance(pending.average, Exchange):
            self._pending[p] = pending = pending._replace(average=pending.average.result())
        assert isinstance(pending.average, Average)
        return pending.average

    def _arrive(self, p: int) -> None:
        """Let a fragment's center move, and its values follow."""
        average, part = self._result(p), self._parts[p]
        del self._pending[p]
        part.distance = average.displacement  # RMS over the replicas
        self._distance = math.hypot(*(each.distance for each in self._parts if not math.isnan(each.distance)))
        self.move(p, average.difference)
        self._follow(part)
        if not average.healthy[self.links.index]:
            self.begin_again(self.center)
        self._moved, self._since = True, 0

    def _follow(self, part: Fragment) -> None:
        if self.blend == 1:
            part.replica.unpack(part.center)
        else:
            part.replica.approach(part.center, self.blend)

    @abstractmethod
    def move(self, p: int, difference: list[Tensor]) -> None:
        """Move a fragment's center.

        Args:
            p: number of the fragment.
            difference: the replicas' mean minus the center, as vectors that may be overwritten.
        """

    # -- what others see ---------------------------------------------------------------------------

    @override
    def complete(self, context: StepContext) -> None:
        for p in list(self._pending):
            self._arrive(p)

    @override
    def finish(self, context: StepContext) -> Outcome | None:
        self.complete(context)
        return super().finish(context)

    @override
    def state_dict(self) -> dict[str, Any]:
        pending = []
        for p in list(self._pending):
            average = self._result(p)._asdict()
            pending.append({"fragment": p, "step": self._pending[p].step, "average": average})
        return {**super().state_dict(), "since": self._since, "pending": pending}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._since = state["since"]
        saved = state.get("pending", [])
        self._pending = {each["fragment"]: Pending(each["step"], Average(**each["average"])) for each in saved}

    # -- replicas that are lost --------------------------------------------------------------------

    @override
    def remains(self, kept: Sequence[int]) -> dict[str, Any]:
        self._pending = {}  # dropped by all; these fragments exchange tau steps later
        return super().remains(kept)

    @override
    def missed_exchange(self, context: StepContext) -> None:
        for p in self.beginning(context.step - self.delay):  # the others' centers have moved, and are loaded
            self._follow(self._parts[p])
