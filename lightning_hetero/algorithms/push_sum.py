"""Push-sum gossip: each replica gives a part of its values away, with the same part of its weight."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hetero.algorithms.base import StepContext
from lightning_hetero.algorithms.peers import PushAverager
from lightning_hetero.algorithms.state import Own, VectorStart
from lightning_hetero.algorithms.topologies import DIRECTED, Rule, rule_of
from lightning_hetero.argument_checks import at_least_one
from lightning_hetero.comm.gossip import ReceivedPush
from lightning_hetero.comm.gossip_client import PushClient

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
        weights: ``w``, of each column of ranks; 0 before the first round, and where no samples were taken and nothing
            has come yet.
        x: ``x``, as vectors.
        alone: of each column, whether nothing came in the latest round in which something should have.
    """

    weights = Own[list[float]](lambda averager: [0.0] * max(len(averager.links.columns), 1))
    x = Own[list[Tensor]](VectorStart(lambda averager: averager.weights[0]))
    alone = Own[list[bool]](lambda averager: [False] * max(len(averager.links.columns), 1))

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
        held = self._learned(self.x, self.pack(), context.samples_per_replica)
        targets, sources = self.partners(self.rule, round_number)
        for column, client in zip(held, self.client, strict=True):
            self._give(column, client, targets, round_number)
        for column, client in zip(held, self.client, strict=True):
            with client.receiving(round_number, sources) as pushes:
                column.alone = bool(sources) and not pushes
                self._take(column, pushes)
        self._keep(held)
        self.replica.unpack(self._unbiased(held))

    def _held(self, vectors: Sequence[Tensor]) -> list["_Column"]:
        """Values and weights of this replica in each column, if ``vectors`` are ``x``."""
        parts = zip(self.client.parts(vectors), self.client.parts(self.reference), strict=True)
        return [_Column(*each) for each in zip(*zip(*parts, strict=True), self.weights, self.alone, strict=True)]

    def _keep(self, held: Sequence["_Column"]) -> None:
        self.client.put([column.x for column in held], self.x)
        self.weights, self.alone = [column.weight for column in held], [column.alone for column in held]

    def _unbiased(self, held: Sequence["_Column"]) -> list[Tensor]:
        """``z``."""
        parts = self.client.parts(self._packed)
        z = [[x / each.weight for x in each.x] if each.weight else part for each, part in zip(held, parts, strict=True)]
        whole = z[0] if self.client.cut is None else [torch.empty_like(x) for x in self.x]
        self.client.put(z, whole)
        return whole

    def _learned(self, x: Sequence[Tensor], z: Sequence[Tensor], samples_per_replica: Sequence[int]) -> list["_Column"]:
        """Values and weights after ``x += s (z_after - z_before)``, where ``z`` are ``z_after``."""
        held = self._held(x)
        own = [value.to("cpu", old.dtype) for value, old in zip(z, x, strict=True)]
        share = samples_per_replica[self.links.index] * len(samples_per_replica) / sum(samples_per_replica)
        for column, part in zip(held, self.client.parts(own), strict=True):
            column.learn(part, share)
        return held

    def _give(self, column: "_Column", client: PushClient, to: Sequence[int], round_number: int) -> None:
        part = 0.0 if column.alone or column.weight < _LEAST else column.weight / (len(to) + 1)
        client.lay_out((x / (len(to) + 1) for x in column.x), part)
        for _ in [peer for peer in to if client.send(peer, round_number, part)]:
            column.add(client.outgoing, part, -1, self.wire)

    def _take(self, column: "_Column", pushes: Sequence[ReceivedPush]) -> None:
        for push in pushes:
            column.add(push.vectors, push.weight, 1, self.wire)

    @override
    def take_mail(self) -> None:
        held = self._held(self.x)
        for number, *push in self.mail:
            self._take(held[number], [ReceivedPush(*push)])
        self._keep_evenly(held)

    def _keep_evenly(self, held: Sequence["_Column"]) -> None:
        """Keep ``z``, with one weight for all columns: values are about to be in other ones."""
        if all(column.weight for column in held):
            mean = sum(column.weight for column in held) / len(held)
            for column in held:
                for x in column.x if column.weight != mean else ():
                    x.mul_(mean / column.weight)
                column.weight = mean
        self._keep(held)

    @override
    def after_loss(self, former: Mapping[str, Any], step: int, context: StepContext) -> None:
        columns = max(len(self.links.columns), 1)
        if len(self.weights) != columns or columns > 1:
            self.weights, self.alone = [self.weights[0]] * columns, [any(self.alone)] * columns

    @override
    def consensus(self, context: StepContext) -> list[Tensor]:
        self._packed = self.replica.pack(self._packed)  # as it is: who is not finite is left out below, or an error
        held = self._learned([x.clone() for x in self.x], self._packed, context.samples_per_replica)
        for column, pushes in zip(held, self.client.waiting(), strict=True):
            self._take(column, pushes)
        weights = self.links.gather_in_columns([column.weight for column in held])
        if self.client.cut is None:
            return self.links.average(self._unbiased(held), weights[0], self.reference).mean
        # Replicas have other weights in each column: so the differences from the reference are weighted here.
        parts = [
            [x + (1 - column.weight) * old for x, old in zip(column.x, column.origin, strict=True)] for column in held
        ]
        values = [torch.empty_like(x) for x in self.x]
        self.client.put(parts, values)
        average = self.links.average(values, [1] * self.links.count, self.reference)
        means = self.client.parts(average.mean)
        for column, mean, of_replicas in zip(held, means, weights, strict=True):
            counted = [weight for weight, healthy in zip(of_replicas, average.healthy, strict=True) if healthy]
            for value, old in zip(mean, column.origin, strict=True):
                value.sub_(old).mul_(len(counted) / sum(counted)).add_(old)
        self.client.put(means, average.mean)
        return average.mean

    @override
    def complete(self, context: StepContext) -> None:
        held = self._learned(self.x, self.pack(), context.samples_per_replica)
        for column, pushes in zip(held, self.client.waiting(remove=True), strict=True):
            self._take(column, pushes)
        self._keep_evenly(held)
        self.replica.unpack(self._unbiased(held))

    @override
    def status(self, step: int) -> dict[str, float | str]:
        return {**super().status(step), "weight": self.weights[0]}


@dataclass
class _Column:
    """Values and weight of a replica in a column of ranks.

    Attributes:
        x: ``x``, as vectors.
        origin: what all replicas have begun with.
        weight: ``w``.
        alone: whether nothing came in the latest round in which something should have.
    """

    x: list[Tensor]
    origin: list[Tensor]
    weight: float
    alone: bool

    def learn(self, z: Sequence[Tensor], share: float) -> None:
        """``x += s (z_after - z_before)``.

        Args:
            z: ``z_after``.
            share: ``s`` by the plan in force.
        """
        if not self.weight:
            self.weight = share
            for x, value in zip(self.x, z, strict=True):
                torch.mul(value, share, out=x)
            return
        s = min(share, (1.0 if self.alone else _MOST) * max(share, 1.0) * self.weight)
        for x, value in zip(self.x, z, strict=True):
            x.add_(value - x / self.weight, alpha=s)

    def add(self, vectors: Sequence[Tensor], weight: float, sign: int, wire: str) -> None:
        """Add what has come, or take away what has gone.

        Args:
            vectors: as they travel.
            weight: that travels with them; 0: nothing does.
            sign: 1 or -1.
            wire: on others than ``"fp32"`` differences from the origin travel.
        """
        if not weight:
            return
        for x, vector, origin in zip(self.x, vectors, self.origin, strict=True):
            x.add_(vector.to(x.dtype), alpha=sign)
            if wire != "fp32":
                x.add_(origin, alpha=sign * weight)
        self.weight += sign * weight
