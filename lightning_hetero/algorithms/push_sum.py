"""Push-sum gossip: each replica gives a part of its values away, with the same part of its weight."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hetero.algorithms.base import StepContext
from lightning_hetero.algorithms.peers import WeightedColumn, WeightedPushAverager
from lightning_hetero.algorithms.topologies import DIRECTED, Rule, rule_of
from lightning_hetero.argument_checks import at_least_one
from lightning_hetero.comm.all_reduce import in_chunks
from lightning_hetero.comm.gossip_client import PushClient

_LEAST = 1e-3  # weight below which nothing is given away: values would lose their digits
_MOST = 4.0  # times max(s, 1) that a step counts, for one with a low weight that hears from others


@dataclass
class PushSumAverager(WeightedPushAverager):
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
    """

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
        held = self.learned(self.x, self.pack(), context.samples_per_replica)
        targets, sources = self.partners(self.rule, round_number)
        for column, client in zip(held, self.client, strict=True):
            self._give(column, client, targets, round_number)
        for column, client in zip(held, self.client, strict=True):
            with client.receiving(round_number, sources) as pushes:
                column.alone = bool(sources) and not pushes
                column.take(pushes)
        self.keep(held)
        self.replica.unpack(self.unbiased(held))

    @override
    def learn(self, column: WeightedColumn, z: Sequence[Tensor], share: float) -> None:
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
        for _ in [peer for peer in to if client.send(peer, round_number, part)]:
            column.add(client.outgoing, part, -1)
