"""DASO: rotating, asynchronous, stale mixing of nodes at an adaptive rate."""

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from typing_extensions import override

from lightning_hetero.algorithms.base import LowBitAverager, Outcome, StepContext, Traits
from lightning_hetero.algorithms.schedules import Phases, RateSchedule
from lightning_hetero.algorithms.state import InFlight, Own, PendingExchange, Shared
from lightning_hetero.argument_checks import at_least_one, one_of
from lightning_hetero.comm.all_reduce import Average, AveragePart, Contribution
from lightning_hetero.comm.compression import check_wire
from lightning_hetero.comm.staging import memory_like
from lightning_hetero.replicas.vectors import Replica

Mixing = Literal["daso", "delta"]
AVERAGE_PART: dict[Mixing, AveragePart] = {"daso": "mean", "delta": "away"}  # of an exchange


@dataclass
class DASOAverager(LowBitAverager):
    """Nodes average at every step of the warm-up and the cool-down, and exchange in the background between.

    Each node is a replica. In the cycling phase, every B steps the active global group (one rank of each node, in turn)
    begins to average the parameters of the P nodes in the background, and broadcasts the mean within each node. W steps
    later all mix what has arrived, S steps old, into what they have become. States of optimizers are not exchanged::

        daso:   x <- (2 S x + P mean) / (2 S + P)
        delta:  x <- x + P / (2 S + P) (mean - snapshot)

    The mean is weighted by samples. The paper's form (``daso``) takes the nodes' own steps since the snapshot partly
    back; the other keeps them. B and W are halved whenever the training loss stalls; where B is 1 already, B becomes
    ``max_global_every``, and W a quarter of that.

    Source: DASO, Coquelin et al. 2021.

    Args:
        warmup: length of the warm-up: a fraction of the run (float), optimizer steps (int), or ``"4 epochs"``. Where
            nobody knows the length of the run, any fraction is 100 steps.
        cooldown: length of the cool-down: a fraction, optimizer steps, or epochs, as for ``warmup``. Where nobody knows
            the length of the run, a fraction is none.
        global_every: first B, in optimizer steps.
        wait: first W, in optimizer steps; 0 is blocking; at most B. ``"auto"``: always the smallest that hides an
            exchange as measured, at most B.
        max_global_every: B after a plateau at B = 1.
        patience: checks of the loss without progress that make a plateau.
        threshold: relative fall of the loss that counts as progress.
        schedule_every_n_steps: optimizer steps between two checks of the loss. Default: an epoch.
        monitor: a logged metric to watch instead of the training loss; smaller is better.
        mixing: ``"daso"``, the paper's rule, or ``"delta"``, which keeps the nodes' progress since the exchange began.
        wire: number format of background exchanges: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"int8"``, ``"int4"`` or
            ``"topk:0.02"``; sums are taken in fp32.

    Raises:
        ConfigurationError: a value that cannot work.

    Attributes:
        schedule: gives B and W.
        last_launch: optimizer step after which the latest exchange of the cycling phase began; 0: none has.
        turn: how many of these have begun, which says whose turn it is to exchange.
        pending: the exchange under way.
        lasted: how long the latest exchange lasted, in steps of this rank; NaN before.
        epoch_ended: whether an epoch has ended with the latest step.
    """

    traits = Traits(blocking=False)
    schedule = Shared[RateSchedule](lambda averager: averager.first_schedule())
    last_launch = Shared[int](0)
    turn = Shared[int](0)
    pending = InFlight()
    lasted = Own[float](math.nan)
    epoch_ended = Shared[bool](False)

    warmup: float | int | str = 0.1
    cooldown: float | int | str = 0.1
    global_every: int = 4
    wait: int | Literal["auto"] = 1
    max_global_every: int = 8
    patience: int = 2
    threshold: float = 0.05
    schedule_every_n_steps: int | None = None
    monitor: str | None = None
    mixing: Mixing = "daso"
    wire: str = "fp32"

    def __post_init__(self) -> None:
        self.first_schedule()  # raises now
        one_of("mixing", self.mixing, ("daso", "delta"))
        check_wire(self.wire)
        Phases.of_run(math.inf, 10, **self._parts())  # raises now
        if self.schedule_every_n_steps is not None:
            at_least_one("schedule_every_n_steps", self.schedule_every_n_steps, ", or None")

    def _parts(self) -> dict[str, float | int | str]:
        return {"warmup": self.warmup, "cooldown": self.cooldown}

    def first_schedule(self) -> RateSchedule:
        """B and W as the options say.

        Raises:
            ConfigurationError: a value that cannot work.
        """
        return RateSchedule(self.global_every, self.wait, self.max_global_every, self.patience, self.threshold)

    @override
    def prepare(self) -> Outcome | None:
        self.links.prepare()
        self._phases = Phases()
        self._sent: list[Tensor] = []  # by the exchange under way
        if self.links.count == 1:
            return Outcome(info="there is one node, so no global network: it trains as hetero_ddp would.")
        asked = dict.fromkeys(self._parts(), 0) if self.run.fast_dev_run else self._parts()
        self._phases = Phases.of_run(*self.run.length(), **asked)
        return Outcome(info=self._phases.assumed(**asked))

    def phase(self, step: int) -> str:
        """The phase of an optimizer step."""
        return self._phases.of_step(step)

    @override
    def due(self, context: StepContext) -> bool:
        if self.phase(context.step) != "cycling":
            return True
        if self.pending:
            return context.step >= self.pending[0].due
        return self.schedule.wait == 0 and self._begins(context.step)

    def _begins(self, step: int) -> bool:
        """Whether B steps of the cycling phase have passed since the latest exchange began."""
        return step - max(self.last_launch, self._phases.warmup) >= self.schedule.every

    @override
    def before_step(self, context: StepContext) -> None:
        if self.epoch_ended:  # only now is all known that the epoch has logged
            if self.monitor is not None and self.schedule_every_n_steps is None:
                self._update_rate(context)
            self.epoch_ended = False  # only now: what breaks is called again

    @override
    def after_step(self, context: StepContext) -> None:
        cycling = self.phase(context.step) == "cycling"
        if self.pending and (not cycling or context.step >= self.pending[0].due):
            self.complete(context)
        if not cycling:
            self.adopt(self.average(context))
        # When B has just been halved, an exchange may still be under way for longer than the new B.
        elif self._begins(context.step) and not self.pending:
            self._begin(context)
        self.epoch_ended, steps = context.epoch_ends, self.schedule_every_n_steps
        looks = context.epoch_ends and self.monitor is None if steps is None else context.step % steps == 0
        if looks:
            self._update_rate(context)

    def _update_rate(self, context: StepContext) -> None:
        """Show the schedule the loss, or the metric to monitor, of all ranks (collective)."""
        cycling = self.phase(context.step) == "cycling"
        if self.monitor is None:
            loss: float | None = context.training_loss()  # also where it does not count: the next look begins here
        else:
            loss = context.metric(self.monitor) if cycling else None
        if cycling and loss is not None:
            self.schedule.observe_loss(loss)

    def _begin(self, context: StepContext) -> None:
        self._sent, copied = self.replica.snapshot(self._packed or None)
        out = self._spare or [memory_like(old) for old in self.reference]
        self._packed, self._spare = [], []  # their memory is in use until the mean is there
        weights = context.samples_per_replica
        payload = self.lasted  # all learn how long exchanges have lasted
        own = Contribution(self._sent, weights, self.reference, self.wire, payload, self.feedback, copied)
        exchange = self.links.begin(own, out, self.turn % self.links.members, AVERAGE_PART[self.mixing])
        pending = PendingExchange(context.step, self.schedule.wait, exchange, on_arrival=self._measured)
        self.last_launch, self.turn, self.pending = context.step, self.turn + 1, [pending]
        if self.schedule.wait == 0:
            self.complete(context)

    def _measured(self, seconds: float) -> None:
        self.lasted = self.run.in_steps(seconds)

    @override
    def arrive(self, pending: PendingExchange, step: int) -> None:
        average = pending.result()
        self.schedule.measured(average.payloads)
        if average.healthy[self.links.index]:
            mix(self.mixing, self.replica, average, step - pending.step, self.links.count)
        else:
            self.apply_mean(average)
        self._packed, self._spare = self._sent, self.set_reference(average)

    @override
    def status(self, step: int) -> dict[str, float | str]:
        return {"phase": self.phase(step), "global_every": self.schedule.every, "wait": self.schedule.wait}

    @override
    def on_missed(self, step: int) -> Literal["adopt", "keep"]:
        return "keep" if self.phase(step) == "cycling" else "adopt"  # in cycling, replicas differ after an exchange too


def mix(rule: Mixing, replica: Replica, average: Average, stale: int, count: int) -> None:
    """Mix a stale average into a replica's values.

    Args:
        rule: see :class:`DASOAverager`.
        replica: its values change.
        average: ``stale`` steps old.
        stale: S, steps since then.
        count: P, replicas.
    """
    part = count / (2 * stale + count)
    if rule == "daso":
        replica.move_towards(average.mean, part)
    else:
        replica.add(average.away, part)
