"""Exchanges of fragments: one after another, in the background if wanted, each mixed in some steps later."""

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_hetero.averaging.averager import Outcome, StepContext
from lightning_hetero.averaging.center import CenteredAverager, check_patterns
from lightning_hetero.averaging.fragments import Cut, Fragments
from lightning_hetero.averaging.low_bit import LowBitAverager
from lightning_hetero.averaging.pace import Pace
from lightning_hetero.averaging.rhythm import Rhythm
from lightning_hetero.checks import at_least_one, is_number
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
        lasted: how long its latest exchange lasted, in steps of this replica; NaN before.
        distance: of the replicas from the center, at its latest exchange; NaN before.
    """

    replica: Replica
    center: list[Tensor]
    snapshot: list[Tensor]
    mean: list[Tensor]
    feedback: Feedback | None
    lasted: float = math.nan
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
        tau: steps from one exchange of a fragment to its next; ``"auto"``: as few as their measured cost allows.
        tau_max: the largest tau that is chosen then.
        fragments: how many, or ``"blocks"``.
        delay: steps for which an exchange may last, in the background; 0: all wait for it.
        blend: the part of the way that replicas go to the center when an exchange has arrived.
    """

    tau: int | Literal["auto"]  # type: ignore[assignment]
    tau_max: int
    fragments: Fragments
    delay: int
    blend: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._cut = Cut(self.fragments)
        name, longest = ("tau_max", self.tau_max) if self.tau == "auto" else ("tau", self.tau)
        if type(self.delay) is not int or not 0 <= self.delay < longest:
            raise ConfigurationError(
                f"delay={self.delay!r} must be a whole number of optimizer steps, at least 0 (blocking) and less than "
                f"{name}={longest}: an exchange of a fragment must be over before its next one begins."
            )
        if not is_number(self.blend) or not 0 < self.blend <= 1:
            raise ConfigurationError(
                f"blend={self.blend!r} must be above 0 and at most 1: the part of the way that replicas go to the "
                "center when an exchange has arrived."
            )
        if self.delay:
            self.facts = replace(type(self).facts, blocking=False)  # type: ignore[misc]

    @override
    def check_tau(self) -> None:
        at_least_one("tau_max", self.tau_max)
        if self.tau != "auto":
            at_least_one("tau", self.tau, ", or 'auto'")

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
        self._arrived: list[int] = []  # fragments that have moved after the latest step
        self._sent: dict[int, Pending] = {}  # by fragment, in the order of their beginning
        self.feedback = self.residuals(self.center)
        self._parts = [self._part(vectors) for vectors in self.replica.fragments]
        self._rhythm = Rhythm(self.tau, self.delay, self.tau_max, len(self._parts))
        self._pace = Pace()
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
        return self._rhythm.beginning(step)

    def _arriving(self, step: int) -> list[int]:
        return [p for p, pending in self._sent.items() if step - pending.step >= self.delay]

    @override
    def due(self, context: StepContext) -> bool:
        return bool(self._arriving(context.step) if self.delay else self.beginning(context.step))

    @override
    def after_step(self, context: StepContext) -> Outcome | None:
        self._pace.pause()
        self._since += 1
        arriving = self._arriving(context.step)
        for p in arriving:
            self._arrive(p)
        told = self._rhythm.settle(context.step)
        for p in self.beginning(context.step):
            if p in self._sent:  # tau has become shorter
                self._arrive(p)
            self._begin(p, context)
            if not self.delay:
                self._arrive(p)
                arriving.append(p)
        self._arrived = arriving
        self._pace.resume()
        return Outcome(exchanged=bool(arriving), info=told) if arriving or told else None

    def _begin(self, p: int, context: StepContext) -> None:
        part = self._parts[p]
        part.snapshot = part.replica.pack(part.snapshot)
        weights, feedback = context.samples_per_replica, part.feedback
        own = Contribution(part.snapshot, weights, part.center, self.wire, feedback=feedback, payload=part.lasted)
        if self.delay:
            self._sent[p] = Pending(context.step, self.links.begin(own, part.mean, want="difference"))
            return
        began = time.perf_counter()
        self._sent[p] = Pending(context.step, self.links.exchange(own, part.mean, want="difference"))
        self._measured(part, time.perf_counter() - began)

    def _measured(self, part: Fragment, seconds: float) -> None:
        self._pace.exchanged(seconds)
        part.lasted = self._pace.lasted

    def _result(self, p: int) -> Average:
        """Wait for an exchange, but do not mix it in."""
        pending = self._sent[p]
        if isinstance(exchange := pending.average, Exchange):
            self._sent[p] = pending = pending._replace(average=exchange.result())
            self._measured(self._parts[p], exchange.seconds)
        assert isinstance(pending.average, Average)
        return pending.average

    def _arrive(self, p: int) -> None:
        """Let a fragment's center move, and its values follow."""
        average, part = self._result(p), self._parts[p]
        del self._sent[p]
        self._rhythm.measured(p, average.payloads)
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
        for p in list(self._sent):
            self._arrive(p)

    @override
    def finish(self, context: StepContext) -> Outcome | None:
        self.complete(context)
        return super().finish(context)

    @override
    def status(self, step: int) -> dict[str, float | str]:
        return {**super().status(step), **({"tau": self._rhythm.tau} if self._rhythm.auto else {})}

    @override
    def state_dict(self) -> dict[str, Any]:
        pending = []
        for p in list(self._sent):
            average = self._result(p)._asdict()
            pending.append({"fragment": p, "step": self._sent[p].step, "average": average})
        course = {"rhythm": self._rhythm.state_dict(), "arrived": self._arrived}
        return {**super().state_dict(), "since": self._since, "pending": pending, **course}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._since = state["since"]
        self._arrived = list(state.get("arrived", []))
        if "rhythm" in state:
            self._rhythm.load_state_dict(state["rhythm"])
        saved = state.get("pending", [])
        self._sent = {each["fragment"]: Pending(each["step"], Average(**each["average"])) for each in saved}

    # -- replicas that are lost --------------------------------------------------------------------

    @override
    def remains(self, kept: Sequence[int]) -> dict[str, Any]:
        self._sent = {}  # dropped by all; these fragments exchange tau steps later
        return super().remains(kept)

    @override
    def missed_exchange(self, context: StepContext) -> None:
        for p in self._arrived:  # the others' centers have moved, and are loaded
            self._follow(self._parts[p])
