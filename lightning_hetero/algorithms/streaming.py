"""Base of algorithms that exchange a model in fragments, one after another, all replicas at once."""

import math
import time
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hetero.algorithms.base import LowBitAverager, Outcome, ReplicaLoss, StepContext
from lightning_hetero.algorithms.center import CenteredAverager
from lightning_hetero.algorithms.schedules import TauSchedule
from lightning_hetero.algorithms.state import InFlight, Own, PendingExchange, Shared
from lightning_hetero.argument_checks import at_least_one, is_number
from lightning_hetero.comm.all_reduce import Average, Contribution, Exchange
from lightning_hetero.comm.compression import Feedback
from lightning_hetero.comm.staging import memory_like
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.replicas.fragments import Fragments, partition
from lightning_hetero.replicas.vectors import Replica


@dataclass
class Fragment:
    """Part of a model during a fit: its values, its center, and its exchange.

    Attributes:
        replica: this rank's values of it.
        center: its part of the center, in the center's own memory.
        snapshot: memory for what is sent.
        mean: memory for what arrives.
        feedback: what low-bit messages of it have left out, if there are any.
    """

    replica: Replica
    center: list[Tensor]
    snapshot: list[Tensor]
    mean: list[Tensor]
    feedback: Feedback | None


class StreamingAverager(LowBitAverager, CenteredAverager):
    """Fragment p of P exchanges after the steps t with ``t mod tau = p tau / P``; each moves a center of its own.

    With the whole model as one fragment, no delay and ``blend=1`` all replicas meet every tau steps.

    Attributes:
        tau: steps from one exchange of a fragment to its next; ``"auto"``: as few as their measured cost allows.
        tau_max: the largest tau that is chosen then.
        fragments: how many, or ``"blocks"``.
        delay: steps for which an exchange may last, in the background; 0: all wait for it.
        blend: the part of the way that replicas go to the center when an exchange has arrived.
        rhythm: says which fragments begin their exchange after a step.
        at_center: whether a fragment has moved after the latest step.
        pending: exchanges under way, one of a fragment at most.
        quiet: step up to which no exchange begins, since a replica was lost.
        lasted: of each fragment, how long its latest exchange lasted, in steps of this replica; NaN before.
        distances: of each fragment, that of the replicas from the center, at its latest exchange; NaN before.
    """

    rhythm = Shared[TauSchedule](
        lambda averager: TauSchedule(averager.tau, averager.delay, averager.tau_max, len(averager.replica.fragments))
    )
    at_center = Shared[bool](True)
    pending = InFlight()
    quiet = Shared[int](0)
    lasted = Own[list[float]](lambda averager: [math.nan] * len(averager.replica.fragments))
    distances = Own[list[float]](lambda averager: [math.nan] * len(averager.replica.fragments))

    tau: int | Literal["auto"]  # type: ignore[assignment]
    tau_max: int
    fragments: Fragments
    delay: int
    blend: float

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one("tau_max", self.tau_max)
        if self.tau != "auto":
            at_least_one("tau", self.tau, ", or 'auto'")
        self._cut = partition(self.fragments)
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
            self.traits = replace(type(self).traits, blocking=False)  # type: ignore[misc]

    @override
    def prepare(self) -> Outcome | None:
        self._parts = [self._part(vectors) for vectors in self.replica.fragments]
        self._packed = []  # its memory is that of the fragments' snapshots
        if self.delay:
            self.links.prepare()
        return None

    def _part(self, vectors: slice) -> Fragment:
        center = self.center[vectors]
        mean = [memory_like(old) for old in center]
        feedback = None if self.feedback is None else self.feedback.part(vectors)
        return Fragment(self.replica.part(vectors), center, self._packed[vectors], mean, feedback)

    @property
    def center(self) -> list[Tensor]:
        """``c``, which every rank keeps up to date."""
        return self.last_center

    @property
    @override
    def uses_center(self) -> bool:
        # Then all replicas are where the center is.
        return self.at_center and self.blend == 1 and len(self._parts) == 1

    # -- steps -------------------------------------------------------------------------------------

    def beginning(self, step: int) -> list[int]:
        """The fragments with an exchange that begins after a step."""
        return self.rhythm.beginning(step) if step > self.quiet else []

    @override
    def due(self, context: StepContext) -> bool:
        # By the step alone: what is under way differs between replicas that are steps apart when another one is lost.
        return context.step > self.delay and bool(self.rhythm.beginning(context.step - self.delay))

    @override
    def after_step(self, context: StepContext) -> Outcome | None:
        self.at_center = False
        arriving = [pending for pending in self.pending if context.step >= pending.due]
        self.arrive_all(arriving, context.step)
        told = self.rhythm.settle(context.step)
        beginning = self.beginning(context.step)
        overtaken = [pending for pending in self.pending if pending.fragment in beginning]  # tau has become shorter
        self.arrive_all(overtaken, context.step)
        for p in beginning:
            self._begin(p, context)
        if not self.delay:
            self.arrive_all(arriving := self.pending, context.step)
        return Outcome(exchanged=bool(arriving), info=told) if arriving or told else None

    def _begin(self, p: int, context: StepContext) -> None:
        part = self._parts[p]
        part.snapshot, copied = part.replica.snapshot(part.snapshot)
        weights = context.samples_per_replica
        own = Contribution(
            part.snapshot, weights, part.center, self.wire, self.lasted[p], part.feedback, copied, part.replica.layout
        )
        if self.delay:
            average: Exchange | Average = self.links.begin(own, part.mean, want="difference")
        else:
            copied()
            began = time.perf_counter()
            average = self.links.exchange(own, part.mean, want="difference")
            self._measured(p, time.perf_counter() - began)
        arrival = partial(self._measured, p)
        self.pending = [*self.pending, PendingExchange(context.step, self.delay, average, p, arrival)]

    def _measured(self, p: int, seconds: float) -> None:
        self.lasted[p] = self.run.in_steps(seconds)

    @override
    def arrive(self, pending: PendingExchange, step: int) -> None:
        """Let a fragment's center move, and its values follow."""
        average, part = pending.result(), self._parts[pending.fragment]
        self.rhythm.measured(pending.fragment, average.payloads)
        self.distances[pending.fragment] = average.displacement  # RMS over the replicas
        self._distance = math.hypot(*(each for each in self.distances if not math.isnan(each)))
        self.move(pending.fragment, average.difference)
        self._follow(part)
        if not average.healthy[self.links.index]:
            self.restart_from(self.center)
        self.commits, self.at_center = self.commits + 1, True

    def _follow(self, part: Fragment) -> None:
        if self.blend == 1:
            part.replica.unpack(part.center)
        else:
            part.replica.move_towards(part.center, self.blend)

    @abstractmethod
    def move(self, p: int, difference: list[Tensor]) -> None:
        """Move a fragment's center.

        Args:
            p: number of the fragment.
            difference: the replicas' mean minus the center, as vectors that may be overwritten.
        """

    @override
    def status(self, step: int) -> dict[str, float | str]:
        return {**super().status(step), **({"tau": self.rhythm.tau} if self.rhythm.auto else {})}

    @override
    def after_restore(self, loss: ReplicaLoss | None = None) -> None:
        if loss is None:
            return
        for part, vectors in zip(self._parts, self.replica.fragments, strict=True):
            if not all(map(torch.equal, part.center, loss.former["reference"][vectors])):
                self._follow(part)  # it has moved without this replica
        self.at_center = False  # replicas may be steps apart
        if self.delay:  # others may have begun an exchange already, and dropped it, which this replica has yet to begin
            self.quiet = max(self.links.gather(loss.context.step))

    @override
    def on_missed(self, step: int) -> Literal["adopt", "keep"]:
        return "keep"  # after_restore lets replicas follow what has moved without them
