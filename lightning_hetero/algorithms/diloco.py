"""Outer optimizer on the mean of the replicas' local steps, whole or in fragments: local SGD, DiLoCo, BMUF."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import Parameter, signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from typing_extensions import override

from lightning_hetero.algorithms.base import LowBitAverager, Outcome, ReplicaLoss, StepContext
from lightning_hetero.algorithms.center import CenteredAverager
from lightning_hetero.algorithms.schedules import TauSchedule
from lightning_hetero.algorithms.state import InFlight, Own, PendingExchange, Shared
from lightning_hetero.argument_checks import at_least_one, is_number, outer_rates
from lightning_hetero.comm.all_reduce import Average, Contribution, Exchange
from lightning_hetero.comm.compression import Feedback, check_wire
from lightning_hetero.comm.staging import memory_like
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.replicas.fragments import Fragments, partition
from lightning_hetero.replicas.outer_step import OuterStep, OuterSteps
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


@dataclass
class OuterAverager(LowBitAverager, CenteredAverager):
    """Every tau steps an outer optimizer moves the center by what the replicas have learned, and they go on from it.

    With weights ``w_i`` by samples::

        c   <- Outer(c, gradient = -sum_i w_i (x_i - c))
        x_i <- c

    With ``fragments`` parts of the model take turns, each with an outer optimizer of its own; with ``delay`` their
    exchanges pass in the background, and ``x_i <- (1 - blend) x_i + blend c`` comes as many steps later.

    With ``SGD(lr=1)`` as outer optimizer it is periodic averaging; with Nesterov's momentum DiLoCo; with heavy-ball
    momentum BMUF. Buffers, which have no gradients, take the mean.

    Between two outer steps the mean of the replicas is validated, saved and left at the end: it reads better than the
    center, and than the center after an outer step ahead of its time.

    Source: DiLoCo, Douillard et al. 2023, algorithm 1; Streaming DiLoCo, Douillard et al. 2025, algorithm 2.

    Args:
        tau: optimizer steps from one outer step to the next (H in the paper, where it is 500). ``"auto"``: as few as
            possible with exchanges that are hidden, or for which replicas wait at most 5% of the steps' time, as
            measured; it begins with 8.
        outer_lr: learning rate of the outer optimizer, which is SGD with Nesterov's momentum. Default: 0.7.
        outer_momentum: its momentum. Default: 0.9.
        outer: instead of these two: makes any other outer optimizer, given parameters.
        wire: number format of differences: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"int8"``, ``"int4"``, ``"2bit"``
            or ``"topk:0.02"``; sums are taken in fp32.
        tau_max: the largest tau that ``"auto"`` chooses. Default: 500.
        fragments: parts of the model that take turns: a number, of sizes as equal as its modules allow, or
            ``"blocks"``: one for each of its repeated blocks, such as a transformer's layers. Fragment p of P exchanges
            after the steps t with ``t mod tau = p tau / P``. Default: 1, the whole model at once.
        delay: optimizer steps for which an exchange may last, in the background; less than tau. Default: 0, all wait.
        blend: the part of the way that replicas go to the center when an exchange has arrived, above 0 and at most 1.
            (The paper's alpha is ``1 - blend``, 0.5 there.) Default: 1, all of it: steps within ``delay`` are given up.

    Raises:
        ConfigurationError: a value that cannot work; when training starts: more fragments than modules.

    Attributes:
        outer_steps: the outer optimizers, one of each fragment.
        rhythm: says which fragments begin their exchange after a step.
        at_center: whether an outer step has followed the latest step.
        pending: exchanges under way, one of a fragment at most.
        quiet: step up to which no exchange begins, since a replica was lost.
        lasted: of each fragment, how long its latest exchange lasted, in steps of this replica; NaN before.
        distances: of each fragment, that of the replicas from the center, at its latest exchange; NaN before.
    """

    traits = replace(
        CenteredAverager.traits, between="the mean of all replicas, and each such look costs as much as an exchange"
    )
    outer_steps = Shared[OuterSteps]()
    rhythm = Shared[TauSchedule](
        lambda averager: TauSchedule(averager.tau, averager.delay, averager.tau_max, len(averager.replica.fragments))
    )
    at_center = Shared[bool](True)
    pending = InFlight()
    quiet = Shared[int](0)
    lasted = Own[list[float]](lambda averager: [math.nan] * len(averager.replica.fragments))
    distances = Own[list[float]](lambda averager: [math.nan] * len(averager.replica.fragments))

    tau: int | Literal["auto"] = 50  # type: ignore[assignment]
    outer_lr: float | None = None
    outer_momentum: float | None = None
    outer: Callable[[Iterable], Optimizer] | None = None
    wire: str = "fp32"
    tau_max: int = field(default=500, kw_only=True)
    fragments: Fragments = field(default=1, kw_only=True)
    delay: int = field(default=0, kw_only=True)
    blend: float = field(default=1.0, kw_only=True)

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
        check_wire(self.wire)
        self._make = self._outer_optimizer()
        self._described = outer_optimizer_options(self._make, self.outer)
        if self.delay:
            self.traits = replace(type(self).traits, blocking=False)  # type: ignore[misc]

    def _outer_optimizer(self) -> Callable[[Iterable], Optimizer]:
        if self.outer is not None:
            if (self.outer_lr, self.outer_momentum) != (None, None):
                raise ConfigurationError(
                    f"outer={self.outer!r} brings options of its own: outer_lr={self.outer_lr!r}, outer_momentum="
                    f"{self.outer_momentum!r} would have no effect. Leave them out, or outer."
                )
            return self.outer
        lr = 0.7 if self.outer_lr is None else self.outer_lr
        momentum = 0.9 if self.outer_momentum is None else self.outer_momentum
        outer_rates(lr, momentum)
        return partial(SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)

    @override
    def options(self) -> dict[str, Any]:
        return {**super().options(), "outer": self._described}

    @override
    def prepare(self) -> Outcome | None:
        self._parts = [self._part(vectors) for vectors in self.replica.fragments]
        self._packed = []  # its memory is that of the fragments' snapshots
        self.outer_steps = OuterSteps([OuterStep(self._make, part.replica, part.center) for part in self._parts])
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
        self.outer_steps.of_fragments[pending.fragment].take(average.difference)
        self._follow(part)
        if not average.healthy[self.links.index]:
            self.restart_from(self.center)
        self.commits, self.at_center = self.commits + 1, True

    def _follow(self, part: Fragment) -> None:
        if self.blend == 1:
            part.replica.unpack(part.center)
        else:
            part.replica.move_towards(part.center, self.blend)

    @override
    def status(self, step: int) -> dict[str, float | str]:
        return {**super().status(step), **({"tau": self.rhythm.tau} if self.rhythm.auto else {})}

    @override
    def after_restore(self, loss: ReplicaLoss | None = None) -> None:
        if loss is None:
            return
        if self.delay:  # others may have begun an exchange already, and dropped it, which this replica has yet to begin
            self.quiet = max(self.links.gather(loss.context.step))
        for part, vectors in zip(self._parts, self.replica.fragments, strict=True):
            if not all(map(torch.equal, part.center, loss.former["reference"][vectors])):
                self._follow(part)  # it has moved without this replica
        self.at_center = False  # replicas may be steps apart

    @override
    def on_missed(self, step: int) -> Literal["adopt", "keep"]:
        return "keep"  # after_restore lets replicas follow what has moved without them


def outer_optimizer_options(make: Callable[[Iterable], Optimizer], given: object) -> tuple[str, dict[str, Any]]:
    """An outer optimizer in builtins: its class and its defaults.

    Args:
        make: makes it, of parameters.
        given: the option, for messages.

    Raises:
        ConfigurationError: it cannot take an outer step.
    """
    try:
        made = make([nn.Parameter(torch.zeros(2, 2))])
    except Exception as error:
        raise ConfigurationError(f"outer={given!r} does not make an optimizer of parameters: {error}") from error
    if not isinstance(made, Optimizer):
        raise ConfigurationError(f"outer={given!r} made a {type(made).__name__}, not a torch.optim.Optimizer.")
    if signature(made.step).parameters["closure"].default is Parameter.empty:
        raise ConfigurationError(
            f"outer={given!r}: {type(made).__name__} must evaluate the loss again, which an outer step cannot. Use "
            "another optimizer."
        )
    return type(made).__name__, made.defaults
