"""Push-sum gossip: each gives parts of what it has away, with as large a part of its weight."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hetero.averaging.averager import StepContext
from lightning_hetero.averaging.gossip import PushAverager
from lightning_hetero.averaging.mixing import Rule, sends
from lightning_hetero.comm.gossip.introduction import Place
from lightning_hetero.comm.gossip.pushing import Push
from lightning_hetero.comm.links import ReplicaLinks
from lightning_hetero.comm.replica import Replica
from lightning_hetero.comm.wire import Wire


class PushSumAverager(PushAverager):
    """Stochastic gradient push, with weights ``s`` by samples.

    At first ``x = s z`` and ``w = s``, and in each round, with the ``s`` of the plan in force::

        x <- x + s (z_after - z_before)       what the model ``z`` has learned since
        x <- P x;  w <- P w                   P is column-stochastic: everyone keeps as large a part as it sends to each
        z <- x / w

    The weight travels with the values, and both are the sender's until the other has them. So the sums of ``x`` and
    ``w`` are kept on directed and irregular graphs, too, and whatever is late or lost; what comes late counts then.

    Source: SGP, Assran et al. 2019, algorithm 1.

    Args:
        every: as for :class:`~lightning_hetero.averaging.gossip.GossipAverager`.
        rule: who sends to whom.
        seed: of what is drawn at random.
        wire: as for :class:`~lightning_hetero.averaging.gossip.GossipAverager`.
        place: likewise.
        skip: likewise.
    """

    def __init__(self, every: int, rule: Rule, seed: int, wire: Wire, place: Place, skip: bool) -> None:
        super().__init__(every, wire, place, skip)
        self.rule, self.seed = rule, seed
        self._weight = 0.0  # w; 0 before the first round, and where no samples were taken and nothing has come yet

    @override
    def setup(self, replica: Replica, links: ReplicaLinks, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
        super().setup(replica, links, optimizers)
        self._x = [torch.zeros_like(origin) for origin in self.reference]

    @override
    def exchange(self, context: StepContext) -> None:
        if context.step % self.every == 0:
            self._learn(self.pack(), context.planned)
            turn = context.step // self.every
            to = sends(self.rule, range(self.links.count), turn, self.seed)
            self._give(to[self.links.index], turn)
            sources = [peer for peer, targets in to.items() if self.links.index in targets]
            with self.receiving(turn, sources) as pushes:
                for push in pushes:
                    self._add(push.vectors, push.weight, 1)
            self.replica.unpack(self._unbiased())

    def _unbiased(self) -> list[Tensor]:
        """``z``."""
        return [x / self._weight for x in self._x] if self._weight else self._packed

    def _learn(self, values: Sequence[Tensor], planned: Sequence[int]) -> None:
        """``x += s (z_after - z_before)``, where ``values`` are ``z_after``."""
        z = [value.to("cpu", x.dtype) for value, x in zip(values, self._x, strict=True)]
        samples = planned[self.links.index] * len(planned) / sum(planned)  # s
        if not self._weight:
            self._weight = samples
            for x, value in zip(self._x, z, strict=True):
                torch.mul(value, samples, out=x)
        else:
            for x, value in zip(self._x, z, strict=True):
                x.add_(value - x / self._weight, alpha=samples)

    def _give(self, to: Sequence[int], turn: int) -> None:
        part = self._weight / (len(to) + 1)
        for own, x, origin in zip(self._outgoing, self._x, self.reference, strict=True):
            own.copy_(x / (len(to) + 1) if self.wire == "fp32" else x / (len(to) + 1) - part * origin)
        self.check_wire(self._outgoing)
        gone = [peer for peer in to if self.send(peer, turn, part)]
        for _ in gone:
            self._add(self._outgoing, part, -1)

    def _add(self, vectors: Sequence[Tensor], weight: float, sign: int) -> None:
        for x, vector, origin in zip(self._x, vectors, self.reference, strict=True):
            x.add_(vector.to(x.dtype), alpha=sign)
            if self.wire != "fp32":
                x.add_(origin, alpha=sign * weight)
        self._weight += sign * weight

    @override
    def consensus(self, planned: Sequence[int]) -> list[Tensor]:
        self.links.gather(None)  # nothing is on its way any more
        kept = [x.clone() for x in self._x], self._weight
        self._packed = self.replica.pack(self._packed)  # as it is: who is not finite is left out below, or an error
        self._learn(self._packed, planned)
        for push in [] if self._transport is None else self._transport.waiting():
            self._add(push.vectors, push.weight, 1)
        weights = [weight for weight, leads in self.links.gather((self._weight, self.links.leads)) if leads]
        mean = self.links.average(self._unbiased(), weights, self.reference).mean
        self._x, self._weight = kept
        return mean

    @override
    def finish(self, planned: Sequence[int]) -> None:
        self.replica.unpack(self.consensus(planned))
        self.report()

    @override
    def status(self, step: int) -> dict[str, float | str]:
        return {**super().status(step), "weight": self._weight}

    @override
    def state_dict(self) -> dict[str, Any]:
        self.links.gather(None)
        arrived = [] if self._transport is None else self._transport.waiting()
        pushes = [tuple(push) for push in arrived]
        own = {"x": self._x, "weight": self._weight, "arrived": pushes}
        return {**super().state_dict(), **own}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for x, saved in zip(self._x, state["x"], strict=True):
            x.copy_(saved)
        self._weight = state["weight"]
        if self._transport is not None:
            self._transport.put([Push(*push) for push in state["arrived"]])
