"""Push-sum gossip: each replica gives a part of its values away, with the same part of its weight."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hetero.algorithms.base import StepContext
from lightning_hetero.algorithms.peers import PushAverager
from lightning_hetero.algorithms.state import Own, VectorStart
from lightning_hetero.algorithms.topologies import DIRECTED, Rule, rule_of
from lightning_hetero.argument_checks import at_least_one
from lightning_hetero.comm.gossip import ReceivedPush

_LEAST = 1e-3  # weight below which nothing is given away: values would lose their digits
_MOST = 4.0  # times max(s, 1) that a step counts, for one with a low weight that hears from others


@dataclass
class PushSumAverager(PushAverager):
    """Stochastic gradient push, with weights ``s`` by samples.

    At first ``x = s z`` and ``w = s``, and in each round, with the ``s`` of the plan in force::

        x <- x + s (z_after - z_before)       what the model ``z`` has learned since
        x <- P x;  w <- P w                   P is column-stochastic: everyone keeps as large a part as it sends to each
        z <- x / w

    The weight travels with the values, and both are the sender's until the other has them. So the sums of ``x`` and
    ``w``, over all replicas and what has come to them, are kept on directed and irregular graphs, too, and whatever is
    late or lost; what comes late counts then.

    A step moves the model by ``s / w`` times itself. In rounds that all keep up with, ``w`` tends to 1. But a replica
    that lags behind, after it was frozen, could give again and again and get nothing, and its steps would be blown up.
    So after a round in which nothing came, though others were to send, a replica is *alone*: until something comes it
    gives nothing, and ``s / w`` counts as ``max(s, 1)`` at most; otherwise as ``4 max(s, 1)`` at most. Being alone it
    sends pushes of weight 0, so that two who are alone hear from each other and go on.

    Source: SGP, Assran et al. 2019, algorithm 1.

    Args:
        every_n_steps: optimizer steps from one round to the next.
        topology: ``"one_peer_exponential"``, ``"exponential"``, ``"ring"``, ``"random"`` or ``"hypercube"``.

    Attributes:
        rule: the topology as a function.
        weight: ``w``; 0 before the first round, and where no samples were taken and nothing has come yet.
        x: ``x``, as vectors.
        alone: whether nothing came in the latest round in which something should have.
    """

    weight = Own[float](0.0)
    x = Own[list[Tensor]](VectorStart(lambda averager: averager.weight))
    alone = Own[bool](False)

    every_n_steps: int = 1
    topology: str = "one_peer_exponential"
    rule: Rule = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one("every_n_steps", self.every_n_steps)
        self.rule = rule_of(self.topology, DIRECTED, "push-sum")

    @override
    def after_step(self, context: StepContext) -> None:
        round_number, since = divmod(context.step, self.every_n_steps)
        if since:
            return
        self._learn(self.pack(), context.samples_per_replica)
        targets, sources = self.partners(self.rule, round_number)
        self._give(targets, round_number)
        with self.client.receiving(round_number, sources) as pushes:
            self.alone = bool(sources) and not pushes
            self._take(pushes)
        self.replica.unpack(self._unbiased())

    def _unbiased(self) -> list[Tensor]:
        """``z``."""
        return [x / self.weight for x in self.x] if self.weight else self._packed

    def _learn(self, values: Sequence[Tensor], samples_per_replica: Sequence[int]) -> None:
        """``x += s (z_after - z_before)``, where ``values`` are ``z_after``."""
        z = [value.to("cpu", x.dtype) for value, x in zip(values, self.x, strict=True)]
        s = samples_per_replica[self.links.index] * len(samples_per_replica) / sum(samples_per_replica)
        if not self.weight:
            self.weight = s
            for x, value in zip(self.x, z, strict=True):
                torch.mul(value, s, out=x)
        else:
            s = min(s, (1.0 if self.alone else _MOST) * max(s, 1.0) * self.weight)
            for x, value in zip(self.x, z, strict=True):
                x.add_(value - x / self.weight, alpha=s)

    def _give(self, to: Sequence[int], round_number: int) -> None:
        part = 0.0 if self.alone or self.weight < _LEAST else self.weight / (len(to) + 1)
        self.client.lay_out((x / (len(to) + 1) for x in self.x), part)
        for _ in [peer for peer in to if self.client.send(peer, round_number, part)]:
            self._add(self.client.outgoing, part, -1)

    def _take(self, pushes: Sequence[ReceivedPush]) -> None:
        for push in pushes:
            self._add(push.vectors, push.weight, 1)

    def _add(self, vectors: Sequence[Tensor], weight: float, sign: int) -> None:
        if not weight:
            return
        for x, vector, origin in zip(self.x, vectors, self.reference, strict=True):
            x.add_(vector.to(x.dtype), alpha=sign)
            if self.wire != "fp32":
                x.add_(origin, alpha=sign * weight)
        self.weight += sign * weight

    @override
    def consensus(self, context: StepContext) -> list[Tensor]:
        kept = [x.clone() for x in self.x], self.weight
        self._packed = self.replica.pack(self._packed)  # as it is: who is not finite is left out below, or an error
        self._learn(self._packed, context.samples_per_replica)
        self._take(self.client.waiting())
        mean = self.links.average(self._unbiased(), self.links.gather_of_replicas(self.weight), self.reference).mean
        self.x, self.weight = kept
        return mean

    @override
    def finish(self, context: StepContext) -> None:
        self.replica.unpack(self.consensus(context))
        self.report()

    @override
    def complete(self, context: StepContext) -> None:
        self._learn(self.pack(), context.samples_per_replica)
        self._take(self.client.waiting(remove=True))
        self.replica.unpack(self._unbiased())

    @override
    def status(self, step: int) -> dict[str, float | str]:
        return {**super().status(step), "weight": self.weight}
