"""DASO: rotating, asynchronous, stale mixing of nodes at an adaptive rate."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor
from typing_extensions import override

from lightning_hetero.averaging.averager import Averager, StepContext
from lightning_hetero.averaging.schedule import RateSchedule, phase
from lightning_hetero.comm.wire import Sum, Wire

Mixing = Literal["daso", "delta"]


class Exchange(NamedTuple):
    """An exchange under way.

    Attributes:
        step: optimizer step after which it began.
        wait: steps after which it is to be mixed in.
        turn: the global group that carries it.
        snapshot: this replica's values at its beginning; empty where only the active rank needs them.
        sum: on the active rank, the sum over replicas (its own values among them), scaled so that weights sum to P.
    """

    step: int
    wait: int
    turn: int
    snapshot: list[Tensor]
    sum: Sum | list[Tensor] | None


class DASOAverager(Averager):
    """Nodes average at every step of the warm-up and the cool-down, and exchange in the background between.

    In the cycling phase, every B steps the active global group (one rank of each node, rotating) begins to sum the
    nodes' parameters. W steps later it mixes what has arrived, S steps old, into what the node has become::

        daso:   x <- (2 S x + sum) / (2 S + P)
        delta:  x <- x + P / (2 S + P) (sum / P - snapshot)

    and tells its node. The paper's form (``daso``) takes the nodes' own steps since the snapshot partly back; the other
    keeps them.

    Source: DASO, Coquelin et al. 2021.

    Args:
        schedule: gives B and W.
        total: optimizer steps of the run.
        warmup: steps of the warm-up.
        cooldown: steps of the cool-down.
        mixing: the rule.
        wire: number format of background exchanges.
    """

    def __init__(
        self, schedule: RateSchedule, total: int, warmup: int, cooldown: int, mixing: Mixing, wire: Wire
    ) -> None:
        self.schedule, self.total, self.warmup, self.cooldown = schedule, total, warmup, cooldown
        self.mixing, self.wire = mixing, wire
        self._pending: Exchange | None = None
        self._turn = 0
        self._since = 0  # steps of the cycling phase since the last exchange began

    def phase(self, step: int) -> str:
        """The phase of an optimizer step."""
        return phase(step, self.total, self.warmup, self.cooldown)

    @override
    def due(self, context: StepContext) -> bool:
        if self.links.count == 1 or self.phase(context.step) != "cycling":
            return True
        return self._pending is not None and context.step - self._pending.step >= self._pending.wait

    @override
    def after_step(self, context: StepContext) -> None:
        if self.links.count == 1:
            return
        pending = self._pending
        cycling = self.phase(context.step) == "cycling"
        if pending is not None and (not cycling or context.step - pending.step >= pending.wait):
            self._mix(pending, context.step)
        if not cycling:
            self.replica.unpack(self.links.average(self.replica.pack(), context.planned))
            return
        self._since += 1
        if self._since >= self.schedule.every:
            self._begin(context)

    def _begin(self, context: StepContext) -> None:
        self._since = 0
        snapshot, total = [], None
        if self.links.takes_turn(self._turn):
            snapshot = [flat.cpu() for flat in self.replica.pack()]
            weight = context.planned[self.links.index] * self.links.count / sum(context.planned)
            total = self.links.begin_sum(self._turn, [flat * weight for flat in snapshot], self.wire)
        self._pending = Exchange(context.step, self.schedule.wait, self._turn, snapshot, total)
        self._turn = (self._turn + 1) % self.links.turns
        if self._pending.wait == 0:
            self._mix(self._pending, context.step)

    def _mix(self, exchange: Exchange, step: int) -> None:
        self._pending = None
        values = [flat.cpu() for flat in self.replica.pack()]
        if exchange.sum is not None:
            total = exchange.sum.wait() if isinstance(exchange.sum, Sum) else exchange.sum
            stale, count = step - exchange.step, self.links.count
            for value, sums, old in zip(values, total, exchange.snapshot, strict=True):
                value.copy_(mixed(self.mixing, value, sums, old, stale, count))
        self.links.tell_replica(exchange.turn, values)
        self.replica.unpack(values)

    @override
    def finish(self, planned: Sequence[int]) -> None:
        if self._pending is not None:
            self._mix(self._pending, self._pending.step + self._pending.wait)
        super().finish(planned)

    @override
    def state_dict(self) -> dict[str, Any]:
        pending = None
        if self._pending is not None:
            pending = self._pending._asdict()
            if isinstance(self._pending.sum, Sum):  # wait for the wire, but do not mix
                self._pending = self._pending._replace(sum=self._pending.sum.wait())
            pending["sum"] = self._pending.sum
        return {"schedule": self.schedule.state_dict(), "turn": self._turn, "since": self._since, "pending": pending}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state["schedule"])
        self._turn, self._since = state["turn"], state["since"]
        self._pending = None if state["pending"] is None else Exchange(**state["pending"])


def mixed(rule: Mixing, value: Tensor, total: Tensor, snapshot: Tensor, stale: int, count: int) -> Tensor:
    """What a replica's values become.

    Args:
        rule: see :class:`DASOAverager`.
        value: the replica's present values.
        total: sum over replicas, ``stale`` steps old, weights summing to ``count``.
        snapshot: the replica's own values at that time.
        stale: S, steps since then.
        count: P, replicas.
    """
    if rule == "daso":
        return ((2 * stale * value + total) / (2 * stale + count)).to(value.dtype)
    return (value + count / (2 * stale + count) * (total / count - snapshot)).to(value.dtype)
