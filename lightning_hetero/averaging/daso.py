"""DASO: rotating, asynchronous, stale mixing of nodes at an adaptive rate."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hetero.averaging.averager import Averager, StepContext
from lightning_hetero.averaging.pace import Pace
from lightning_hetero.averaging.schedule import RateSchedule, phase
from lightning_hetero.comm.all_reduce import Average, Contribution, Want
from lightning_hetero.comm.links import Exchange, ReplicaLinks
from lightning_hetero.comm.replica import Replica
from lightning_hetero.comm.wire import Wire

Mixing = Literal["daso", "delta"]
WANT: dict[Mixing, Want] = {"daso": "mean", "delta": "away"}  # of an exchange


class Pending(NamedTuple):
    """An exchange that has not been mixed in yet.

    Attributes:
        step: optimizer step after which it began.
        wait: steps after which it is to be mixed in.
        average: what the exchange brings, or has brought.
    """

    step: int
    wait: int
    average: Exchange | Average


class DASOAverager(Averager):
    """Nodes average at every step of the warm-up and the cool-down, and exchange in the background between.

    In the cycling phase, every B steps the active global group (one rank of each node, rotating) begins to average the
    nodes' parameters, and tells its nodes. W steps later all mix what has arrived, S steps old, into what they have
    become::

        daso:   x <- (2 S x + P mean) / (2 S + P)
        delta:  x <- x + P / (2 S + P) (mean - snapshot)

    The paper's form (``daso``) takes the nodes' own steps since the snapshot partly back; the other keeps them.

    Source: DASO, Coquelin et al. 2021.

    Args:
        schedule: gives B and W.
        total: optimizer steps of the run.
        warmup: steps of the warm-up.
        cooldown: steps of the cool-down.
        mixing: the rule.
        wire: number format of background exchanges.
    """

    blocking = False

    def __init__(
        self, schedule: RateSchedule, total: int, warmup: int, cooldown: int, mixing: Mixing, wire: Wire
    ) -> None:
        self.schedule, self.total, self.warmup, self.cooldown = schedule, total, warmup, cooldown
        self.mixing, self.wire = mixing, wire
        self._pending: Pending | None = None
        self._turn = 0
        self._since = 0  # steps of the cycling phase since the last exchange began
        self._step = 0  # the latest step
        self._pace = Pace()
        self._snapshot: list[Tensor] | None = None  # memory for the next exchange
        self._mean: list[Tensor] = []  # likewise

    @override
    def setup(self, replica: Replica, links: ReplicaLinks, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
        super().setup(replica, links, optimizers)
        links.prepare()

    def phase(self, step: int) -> str:
        """The phase of an optimizer step."""
        return phase(step, self.total, self.warmup, self.cooldown)

    @override
    def due(self, context: StepContext) -> bool:
        if self.phase(context.step) != "cycling":
            return True
        if self._pending is None:
            return self.schedule.wait == 0 and self._since + 1 >= self.schedule.every
        return context.step - self._pending.step >= self._pending.wait

    @override
    def after_step(self, context: StepContext) -> None:
        self._step = context.step
        self._pace.pause()
        cycling = self.phase(context.step) == "cycling"
        if self._pending is not None and (not cycling or context.step - self._pending.step >= self._pending.wait):
            self._mix(context.step)
        if not cycling:
            self.meet(context.samples_per_replica)
        else:
            self._since += 1
            # When B has just been halved, an exchange may still be under way for longer than the new B.
            if self._since >= self.schedule.every and self._pending is None:
                self._begin(context)
        self._pace.resume()

    def _begin(self, context: StepContext) -> None:
        self._snapshot = self.replica.pack(self._snapshot)
        self._mean = self._mean or [torch.empty_like(old) for old in self.reference]
        samples, turn = context.samples_per_replica, self._turn
        own = Contribution(self._snapshot, samples, self.reference, self.wire, self._pace.lasted)
        exchange = self.links.begin(own, self._mean, turn, WANT[self.mixing])
        self._pending = Pending(context.step, self.schedule.wait, exchange)
        self._since, self._turn = 0, (turn + 1) % self.links.turns
        if self._pending.wait == 0:
            self._mix(context.step)

    def _mix(self, step: int) -> None:
        average = self._arrived()
        assert self._pending is not None
        stale, self._pending = step - self._pending.step, None
        self.schedule.measured(average.payloads)
        if average.healthy[self.links.index]:
            mix(self.mixing, self.replica, average, stale, self.links.count)
            self._mean = self.refer_to(average)
        else:
            self._mean = self.adopt(average)

    def _arrived(self) -> Average:
        """Wait for the wire, but do not mix."""
        assert self._pending is not None
        exchange = self._pending.average
        if isinstance(exchange, Exchange):
            average = exchange.result()
            self._pace.exchanged(exchange.seconds)
            self._pending = self._pending._replace(average=average)
            return average
        return exchange

    @override
    def finish(self, samples_per_replica: Sequence[int]) -> None:
        if self._pending is not None:
            self._mix(self._step)
        super().finish(samples_per_replica)

    @override
    def status(self, step: int) -> dict[str, float | str]:
        return {"phase": self.phase(step), "global_every": self.schedule.every, "wait": self.schedule.wait}

    @override
    def state_dict(self) -> dict[str, Any]:
        pending = None
        if self._pending is not None:
            average = self._arrived()._asdict()
            pending = {**self._pending._asdict(), "average": average}
        counts = {"turn": self._turn, "since": self._since, "step": self._step}
        return {**super().state_dict(), "schedule": self.schedule.state_dict(), **counts, "pending": pending}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.schedule.load_state_dict(state["schedule"])
        self._turn, self._since, self._step = state["turn"], state["since"], state["step"]
        pending = state["pending"]
        self._pending = None if pending is None else Pending(**{**pending, "average": _loaded(pending["average"])})


def _loaded(saved: dict[str, Any]) -> Average:
    """An average from a checkpoint; version 0.1 called payloads notes, and knew no difference."""
    values = {"difference": [], **saved}
    values.setdefault("payloads", values.pop("notes", None))
    return Average(**values)


def mix(rule: Mixing, replica: Replica, average: Average, stale: int, count: int) -> None:
    """Mix a stale average into a replica's values.

    Args:
        rule: see :class:`DASOAverager`.
        replica: whose values change.
        average: ``stale`` steps old.
        stale: S, steps since then.
        count: P, replicas.
    """
    part = count / (2 * stale + count)
    if rule == "daso":
        replica.approach(average.mean, part)
    else:
        replica.add(average.away, part)
