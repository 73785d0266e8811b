"""Push-sum gossip: each replica gives a part of its values away, with the same part of its weight."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hetero.algorithms.base import ReplicaLoss, StepContext
from lightning_hetero.algorithms.peers import PushAverager
from lightning_hetero.algorithms.state import Own, VectorStart
from lightning_hetero.algorithms.topologies import DIRECTED, Rule, rule_of
from lightning_hetero.argument_checks import at_least_one
from lightning_hetero.comm.all_reduce import in_chunks
from lightning_hetero.comm.gossip import ReceivedPush
from lightning_hetero.comm.gossip_client import PushClient

_LEAST = 1e-3  # weight below which nothing is given away: values would lose their digits
_MOST = 4.0  # times max(s, 1) that a step counts, for one with a low weight that hears from others


@dataclass
class WeightedColumn:
    """Values ``z`` of a replica in a column of ranks, times the weight that travels with them.

    Attributes:
        x: ``x = w z``, as vectors.
        origin: what all replicas have begun with.
        weight: ``w``.
        alone: whether nothing came in the latest round in which something should have.
        wire: number format; on others than ``"fp32"`` differences from the origin travel.
    """

    x: list[Tensor]
    origin: list[Tensor]
    weight: float
    alone: bool
    wire: str

    def take(self, pushes: Sequence[ReceivedPush]) -> None:
        """Add what has come."""
        for push in pushes:
            self.add(push.vectors, push.weight, 1)

    def add(self, vectors: Sequence[Tensor], weight: float, sign: int) -> None:
        """Add what has come, or take away what has gone.

        Args:
            vectors: as they travel.
            weight: that travels with them; 0: nothing does.
            sign: 1 or -1.
        """
        if not weight:
            return
        for x, vector, origin in in_chunks(self.x, vectors, self.origin):
            x.add_(vector.to(x.dtype), alpha=sign)
            if self.wire != "fp32":
                x.add_(origin, alpha=sign * weight)
        self.weight += sign * weight

    def set_weight(self, weight: float) -> None:
        """Keep ``z`` under another weight."""
        for x in self.x if self.weight != weight else ():
            x.mul_(weight / self.weight)
        self.weight = weight


@dataclass
class PushSumAverager(PushAverager):
    """Stochastic gradient push, with weights ``s`` by samples.

    At first ``x = s z`` and ``w = s``, and in each round, with the ``s`` of the plan in force::

        x <- x + s (z_after - z_before)       what the model ``z`` has learned since
        x <- P x;  w <- P w                   P is column-stochastic: everyone keeps as large a part as it sends to each
        z <- x / w

    The weight travels with the values, and both are the sender's until the other has them. So the sums of ``x`` and
    ``w``, over all replicas and what has come to them, are kept on directed and irregular graphs, too, and whatever is
    late or lost; what comes late counts then. After the loss of a replica the weights of the others are scaled to
    the sum of their shares: else their steps would have another size from then on.

    A step moves the model by ``s / w`` times itself. In rounds that all keep up with, ``w`` tends to 1. But a replica
    that lags behind, after it was frozen, could give again and again and get nothing, and its steps would be blown up.
    So after a round in which nothing came, though others were to send, a replica is *alone*: until something comes it
    gives nothing, and ``s / w`` counts as ``max(s, 1)`` at most; otherwise as ``4 max(s, 1)`` at most. Being alone it
    sends pushes of weight 0, so that two who are alone hear from each other and go on.

    Replicas with shards of unequal size exchange parts of their values with different ranks, in columns. In each a
    message may be lost by itself, so each has a weight of its own.

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

    traits = replace(PushAverager.traits, fresh_start="its values of the latest round")
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

    @property
    @override
    def restart_values(self) -> list[Tensor]:
        return self.unbiased(self.held(self.x)) if all(self.weights) else self.reference

    @override
    def after_step(self, context: StepContext) -> None:
        round_number, since = divmod(context.step, self.every_n_steps)
        if since:
            return
        held = self.learned(self.x, self.pack(), context.samples_per_replica)
        targets, sources = self.partners(self.rule, round_number)
        try:
            for column, client in zip(held, self.client, strict=True):
                self._give(column, client, targets, round_number)
            for column, client in zip(held, self.client, strict=True):
                with client.receiving(round_number, sources) as pushes:
                    column.alone = bool(sources) and not pushes
                    column.take(pushes)
        finally:  # a loss may break it, and it is called again: the values, their weight and the model belong together
            self.keep(held)
            self.replica.unpack(self.unbiased(held))

    def learned(
        self, x: Sequence[Tensor], z: Sequence[Tensor], samples_per_replica: Sequence[int]
    ) -> list[WeightedColumn]:
        """Each column after ``x += s (z_after - z_before)``, if these are ``x`` and ``z_after``."""
        held = self.held(x)
        share = samples_per_replica[self.links.index] * len(samples_per_replica) / sum(samples_per_replica)
        for column, part in zip(held, self.client.parts(z), strict=True):
            self._learn(column, part, share)
        return held

    def _learn(self, column: WeightedColumn, z: Sequence[Tensor], share: float) -> None:
        if not column.weight:
            column.weight = share
            for x, value in in_chunks(column.x, z):
                torch.mul(value.to(x.dtype), share, out=x)
            return
        s = min(share, (1.0 if column.alone else _MOST) * max(share, 1.0) * column.weight)
        for x, value in in_chunks(column.x, z):
            x.add_(value - x / column.weight, alpha=s)

    def _give(self, column: WeightedColumn, client: PushClient, to: Sequence[int], round_number: int) -> None:
        part = 0.0 if column.alone or column.weight < _LEAST else column.weight / (len(to) + 1)
        client.lay_out(column.x, part, len(to) + 1)
        for peer in to:
            if client.send(peer, round_number, part):
                column.add(client.outgoing, part, -1)

    def held(self, x: Sequence[Tensor]) -> list[WeightedColumn]:
        """Values and weight of this replica in each column, if these are ``x``."""
        parts = self.client.parts(x), self.client.parts(self.reference)
        return [WeightedColumn(*each, self.wire) for each in zip(*parts, self.weights, self.alone, strict=True)]

    def keep(self, held: Sequence[WeightedColumn]) -> None:
        """Take what columns hold into the state."""
        self.x = self.client.whole([column.x for column in held], self.x)
        self.weights, self.alone = [column.weight for column in held], [column.alone for column in held]

    def _keep_evenly(self, held: Sequence[WeightedColumn]) -> None:
        """Keep ``z``, with one weight for all columns: values are about to be in other ones."""
        if all(column.weight for column in held):
            mean = sum(column.weight for column in held) / len(held)
            for column in held:
                column.set_weight(mean)
        self.keep(held)

    def unbiased(self, held: Sequence[WeightedColumn], wide: bool = False) -> list[Tensor]:
        """``z = x / w``, in the place of what was packed.

        Args:
            held: of each column.
            wide: in the dtype of ``x``, which may be wider than the model's.
        """
        z = [flat.to(x.dtype) for flat, x in zip(self._packed, self.x, strict=True)] if wide else self._packed
        parts = self.client.parts(z)
        for column, part in zip(held, parts, strict=True):
            for value, x in in_chunks(part, column.x) if column.weight else ():
                value.copy_(x / column.weight)
        return self.client.whole(parts, z)

    @override
    def consensus(self, context: StepContext) -> list[Tensor]:
        self._packed = self.replica.pack(self._packed)  # as it is: who is not finite is left out below, or an error
        held = self.learned([x.clone() for x in self.x], self._packed, context.samples_per_replica)
        for column, pushes in zip(held, self.client.waiting(), strict=True):
            column.take(pushes)
        weights = self.links.gather_in_columns([column.weight for column in held])
        if self.client.cut is None:
            return self.links.average(self.unbiased(held, wide=True), weights[0], self.reference).mean
        # Replicas have other weights in each column: so the differences from the reference are weighted here.
        moved = [
            [x + (1 - column.weight) * old for x, old in zip(column.x, column.origin, strict=True)] for column in held
        ]
        average = self.links.average(self.client.whole(moved), [1] * self.links.count, self.reference)
        means = self.client.parts(average.mean)
        for column, mean, of_replicas in zip(held, means, weights, strict=True):
            counted = [weight for weight, healthy in zip(of_replicas, average.healthy, strict=True) if healthy]
            for value, old in zip(mean, column.origin, strict=True):
                value.sub_(old).mul_(len(counted) / sum(counted)).add_(old)
        return self.client.whole(means, average.mean)

    @override
    def complete(self, context: StepContext) -> None:
        held = self.learned(self.x, self.pack(), context.samples_per_replica)
        for column, pushes in zip(held, self.client.waiting(remove=True), strict=True):
            column.take(pushes)
        self._keep_evenly(held)
        self.replica.unpack(self.unbiased(held))

    @override
    def finish(self, context: StepContext) -> None:
        super().finish(context)
        held = self.held(self.x)
        for column, part in zip(held, self.client.parts(self.pack()), strict=True):
            for x, z in zip(column.x, part, strict=True):  # from which a fit that goes on begins
                x.copy_(z).mul_(column.weight)
        self.keep(held)

    @override
    def take_mail(self) -> None:
        held = self.held(self.x)
        before = [z.clone() for z in self.unbiased(held, wide=True)]
        for number, *push in self.mail:
            held[number].take([ReceivedPush(*push)])
            held[number].alone = False
        moved = [z - old for z, old in zip(self.unbiased(held, wide=True), before, strict=True)]
        self.replica.add(moved, 1.0)  # else the next round would take the mail back: it compares the model with z
        self._keep_evenly(held)
        self.mail = []

    @override
    def after_restore(self, loss: ReplicaLoss | None = None) -> None:
        super().after_restore(loss)
        if loss is not None:
            columns = max(len(self.links.columns), 1)
            self.weights, self.alone = [self.weights[0]] * columns, [any(self.alone)] * columns
            held, samples = self.held(self.x), loss.context.samples_per_replica
            for column, weights in zip(held, self.links.gather_in_columns(self.weights), strict=True):
                counted = sum(n for n, weight in zip(samples, weights, strict=True) if weight)
                if counted and column.weight:
                    column.set_weight(column.weight * counted * len(samples) / sum(samples) / sum(weights))
            self.keep(held)

    @override
    def status(self, step: int) -> dict[str, float | str]:
        return {**super().status(step), "weight": self.weights[0]}
