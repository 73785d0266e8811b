"""DASO: rotating, asynchronous, stale mixing of nodes at an adaptive rate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hetero.algorithms.base import LowBitAverager, Outcome, StepContext, Traits
from lightning_hetero.algorithms.schedules import ExchangeTimer, RateSchedule, phase, steps_of
from lightning_hetero.comm.all_reduce import Average, AveragePart, Contribution, Exchange
from lightning_hetero.comm.compression import check_wire
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.option_checks import at_least_one, one_of
from lightning_hetero.replicas.vectors import LayoutChange, Replica

Mixing = Literal["daso", "delta"]
AVERAGE_PART: dict[Mixing, AveragePart] = {"daso": "mean", "delta": "away"}  # of an exchange


class PendingExchange(NamedTuple):
    """Exchange that has not been mixed in yet.

    Attributes:
        step: optimizer step after which it began.
        wait: steps after which it is to be mixed in.
        average: what the exchange brings, or has brought.
    """

    step: int
    wait: int
    average: Exchange | Average


@dataclass
class DASOAverager(LowBitAverager):
    """Nodes average at every step of the warm-up and the cool-down, and exchange in the background between.

    In the cycling phase, every B steps the active global group (one rank of each node, rotating) begins to average the
    nodes' parameters, and tells its nodes. W steps later all mix what has arrived, S steps old, into what they have
    become::

        daso:   x <- (2 S x + P mean) / (2 S + P)
        delta:  x <- x + P / (2 S + P) (mean - snapshot)

    The paper's form (``daso``) takes the nodes' own steps since the snapshot partly back; the other keeps them. B and W
    are halved whenever the training loss stalls, and start over from the rarest exchange.

    Source: DASO, Coquelin et al. 2021.

    Args:
        warmup: length of the warm-up: a fraction of the run (float), optimizer steps (int), or ``"4 epochs"``. Where
            nobody knows the length of the run, any fraction is 100 steps.
        cooldown: length of the cool-down: a fraction, optimizer steps, or epochs, as for ``warmup``. Where nobody knows
            the length of the run, a fraction is none.
        global_every: first B, in optimizer steps.
        wait: first W, in optimizer steps; 0 is blocking; at most B. ``"auto"``: always the smallest that hides an
            exchange as measured, at most B.
        max_global_every: largest B.
        patience: looks at the loss without progress that make a plateau.
        threshold: relative fall of the loss that counts as progress.
        schedule_every_n_steps: optimizer steps between two looks at the loss. Default: an epoch.
        monitor: a logged metric to watch instead of the training loss; smaller is better.
        mixing: ``"daso"``, the paper's rule, or ``"delta"``, which keeps the nodes' progress since the exchange began.
        wire: number format of background exchanges: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"int8"``, ``"int4"`` or
            ``"topk:0.02"``; sums are taken in fp32.

    Raises:
        ConfigurationError: a value that cannot work.

    Attributes:
        schedule: gives B and W.
    """

    traits = Traits(blocking=False, supports_unfreezing=True)
    common = ("schedule",)

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
    schedule: RateSchedule = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.schedule = RateSchedule(self.global_every, self.wait, self.max_global_every, self.patience, self.threshold)
        one_of("mixing", self.mixing, ("daso", "delta"))
        check_wire(self.wire)
        for name in ("warmup", "cooldown"):
            steps_of(name, getattr(self, name), 100, 10)  # raises now
        if self.schedule_every_n_steps is not None:
            at_least_one("schedule_every_n_steps", self.schedule_every_n_steps, ", or None")

    @override
    def prepare(self) -> Outcome | None:
        self.links.prepare()
        self.feedback = self.residuals(self.reference)
        self._phases = 0.0, 0, 0  # optimizer steps of the run, of its warm-up, of its cool-down
        self._pending: PendingExchange | None = None
        self._done = 0  # the latest step of which all that follows it is done
        self._broken = False  # within what follows a step
        self._member = self._since = 0  # steps of the cycling phase since the last exchange began
        self._timer = ExchangeTimer()
        self._snapshot: list[Tensor] | None = None  # memory for the next exchange
        self._mean: list[Tensor] = []  # memory for the next exchange
        self._epoch_ended = False  # with the latest step
        if self.links.count == 1:
            return Outcome(info="there is one node, so no global network: it trains as hetero_ddp would.")
        total, per_epoch = self.run.length()
        lengths = {name: steps_of(name, getattr(self, name), total, per_epoch) for name in ("warmup", "cooldown")}
        if self.run.fast_dev_run:
            lengths = dict.fromkeys(lengths, 0)
        if sum(lengths.values()) > total:
            raise ConfigurationError(
                f"warmup and cooldown take {lengths} of {total} optimizer steps: leave some between."
            )
        self._phases = total, lengths["warmup"], lengths["cooldown"]
        asked = {name: getattr(self, name) for name in lengths}
        parts = [f"{name}={part}" for name, part in asked.items() if isinstance(part, float) and part]
        if math.isinf(total) and parts:
            return Outcome(
                info=f"{' and '.join(parts)} of the run, of which nobody knows the length: the warm-up takes "
                f"{lengths['warmup']} optimizer steps, the cool-down {lengths['cooldown']}. Give steps to change that."
            )
        return None

    def phase(self, step: int) -> str:
        """The phase of an optimizer step."""
        return phase(step, *self._phases)

    @override
    def due(self, context: StepContext) -> bool:
        if self.phase(context.step) != "cycling":
            return True
        if self._pending is None:
            return self.schedule.wait == 0 and self._since + 1 >= self.schedule.every
        return context.step - self._pending.step >= self._pending.wait

    @override
    def before_step(self, context: StepContext) -> None:
        if self._epoch_ended:  # only now is all known that the epoch has logged
            self._epoch_ended = False
            if self.monitor is not None and self.schedule_every_n_steps is None:
                self._update_rate(context)

    @override
    def after_step(self, context: StepContext) -> None:
        self._timer.step_ended()
        self._broken = True
        cycling = self.phase(context.step) == "cycling"
        if self._pending is not None and (not cycling or context.step - self._pending.step >= self._pending.wait):
            self._mix(context.step)
        if not cycling:
            self.adopt(self.average(context))
        else:
            self._since += 1
            # When B has just been halved, an exchange may still be under way for longer than the new B.
            if self._since >= self.schedule.every and self._pending is None:
                self._begin(context)
        self._timer.step_begins()
        self._done, self._broken = context.step, False
        self._epoch_ended, steps = context.epoch_ends, self.schedule_every_n_steps
        by_epoch = context.epoch_ends and self.monitor is None
        if by_epoch if steps is None else context.step % steps == 0:
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
        self._snapshot = self.replica.pack(self._snapshot)
        self._mean = self._mean or [torch.empty_like(old) for old in self.reference]
        samples, member = context.samples_per_replica, self._member
        own = Contribution(self._snapshot, samples, self.reference, self.wire, self._timer.lasted, self.feedback)
        exchange = self.links.begin(own, self._mean, member, AVERAGE_PART[self.mixing])
        self._pending = PendingExchange(context.step, self.schedule.wait, exchange)
        self._since, self._member = 0, (member + 1) % self.links.members
        if self._pending.wait == 0:
            self._mix(context.step)

    def _mix(self, step: int) -> None:
        average = self._await_wire()
        assert self._pending is not None
        stale, self._pending = step - self._pending.step, None
        self.schedule.measured(average.payloads)
        if average.healthy[self.links.index]:
            mix(self.mixing, self.replica, average, stale, self.links.count)
        else:
            self.apply_mean(average)
        self._mean = self.set_reference(average)

    def _await_wire(self) -> Average:
        """Wait for the wire, but do not mix."""
        assert self._pending is not None
        exchange = self._pending.average
        if isinstance(exchange, Exchange):
            average = exchange.result()
            self._timer.exchanged(exchange.seconds)
            self._pending = self._pending._replace(average=average)
            return average
        return exchange

    @override
    def finish(self, context: StepContext) -> Outcome | None:
        self.complete(context)
        return super().finish(context)

    @override
    def complete(self, context: StepContext) -> None:
        if self._pending is not None:
            self._mix(context.step)

    @override
    def status(self, step: int) -> dict[str, float | str]:
        return {"phase": self.phase(step), "global_every": self.schedule.every, "wait": self.schedule.wait}

    @override
    def state_dict(self) -> dict[str, Any]:
        pending = None
        if self._pending is not None:
            average = self._await_wire()._asdict()
            pending = {**self._pending._asdict(), "average": average}
        counts = {"turn": self._member, "since": self._since}
        return {**super().state_dict(), "schedule": self.schedule.state_dict(), **counts, "pending": pending}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.schedule.load_state_dict(state["schedule"])
        self._member, self._since = state["turn"], state["since"]
        self._epoch_ended = state.get("epoch_ended", False)
        pending = state["pending"]
        self._pending = (
            None if pending is None else PendingExchange(**{**pending, "average": Average(**pending["average"])})
        )

    @override
    def state_after_loss(self, kept: Sequence[int]) -> dict[str, Any]:
        self._pending, self._before = None, (self._done, self._broken)
        return {**super().state_after_loss(kept), "epoch_ended": self._epoch_ended}

    @override
    def continue_after_loss(self, state: dict[str, Any], context: StepContext) -> None:
        super().continue_after_loss(state, context)
        # Replicas may be steps apart: all begin their next exchange at the step at which the furthest one does.
        own, _ = self._before
        done, since, member = max(self.links.gather((own, self._since, self._member)))
        behind = sum(self.phase(step) == "cycling" for step in range(own + 1, done + 1))
        self._since, self._member = since - behind, member

    @override
    def missed_exchange(self, context: StepContext) -> None:
        if self.phase(context.step) != "cycling":  # else replicas differ after an exchange as well
            super().missed_exchange(context)
        elif self._before[1]:  # what follows this step is not repeated
            self._since += 1

    @override
    def load_common(self, state: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state["schedule"])  # an exchange under way is dropped

    @override
    def remap_state(self, state: dict[str, Any], layout_change: LayoutChange) -> dict[str, Any]:
        return {**super().remap_state(state, layout_change), "epoch_ended": self._epoch_ended}


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
        replica.approach(average.mean, part)
    else:
        replica.add(average.away, part)
