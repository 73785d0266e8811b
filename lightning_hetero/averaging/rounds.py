"""Gossip in rounds: in each round all replicas know which of them exchange with each other."""

from dataclasses import dataclass, field
from typing import Literal

from typing_extensions import override

from lightning_hetero.averaging.averager import StepContext
from lightning_hetero.averaging.gossip import GossipAverager, PairAverager, PushAverager
from lightning_hetero.averaging.mixing import DIRECTED, MATCHINGS, Rule, rule_of, sends
from lightning_hetero.checks import at_least_one, one_of


@dataclass
class Rounds(GossipAverager):
    """The options of gossip in rounds.

    Args:
        every_n_steps: optimizer steps from one round to the next.
        topology: for ``"pairwise"``: ``"random"`` (a matching drawn anew in each round), ``"ring"`` or ``"hypercube"``;
            for ``"push"`` and ``"pull"`` also ``"one_peer_exponential"`` and ``"exponential"``. Any number of replicas
            will do.
        exchange: ``"pairwise"``, ``"push"`` or ``"pull"``.
        overlap: a pair exchanges in the background of a step what it had before it; ``False``: after the step.

    Attributes:
        rule: the topology as a function.
    """

    every_n_steps: int = 1
    topology: str = "random"
    exchange: Literal["pairwise", "push", "pull"] = "pairwise"
    overlap: bool = True
    rule: Rule = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one("every_n_steps", self.every_n_steps)
        one_of("exchange", self.exchange, ("pairwise", "push", "pull"))
        known = MATCHINGS if self.exchange == "pairwise" else DIRECTED
        self.rule = rule_of(self.topology, known, f"exchange={self.exchange!r}")
        one_of("overlap", self.overlap, (True, False))


@dataclass
class MatchedAverager(Rounds, PairAverager):
    """In each round replicas meet in pairs, and both move to their mean. All compute the pairs from the same list.

    Source: GoSGD, Blot et al. 2016; GossipGraD, Daily et al. 2018.
    """

    @override
    def before_step(self, context: StepContext) -> None:
        if self.overlap and (context.step + 1) % self.every_n_steps == 0:
            self._offer((context.step + 1) // self.every_n_steps, context)

    @override
    def after_step(self, context: StepContext) -> None:
        if context.step % self.every_n_steps:
            return
        if not self.overlap:
            self._offer(context.step // self.every_n_steps, context)
        if self._offered:
            self._offered = False
            if not self.take(self._endpoint.deadline):
                self.miss(self._whom[0])

    def _offer(self, round_number: int, context: StepContext) -> None:
        if whom := sends(self.rule, range(self.links.count), round_number, self.seed)[self.links.index]:
            self.offer(context, whom, round_number)


@dataclass
class DirectedAverager(Rounds, PushAverager):
    """One way: ``x_i += sum_j (x_j - x_i) / (d + 1)`` over the ``d`` peers from which something has come in a round.

    With ``exchange="pull"`` messages go the other way: those that would receive send. If no message is lost, the sum
    of all values is kept, because each replica sends as much as it gets. Unlike push-sum, this has no weights, and does
    not correct for messages that were lost.

    Source: GossipGraD, Daily et al. 2018.
    """

    @override
    def after_step(self, context: StepContext) -> None:
        if context.step % self.every_n_steps:
            return
        round_number, me = context.step // self.every_n_steps, self.links.index
        to = sends(self.rule, range(self.links.count), round_number, self.seed)
        targets, sources = to[me], tuple(peer for peer, others in to.items() if me in others)
        if self.exchange == "pull":
            targets, sources = sources, targets
        self.lay_out(self._outgoing)
        for peer in targets:
            self.send(peer, round_number, 1.0)
        with self.receiving(round_number, sources) as pushes:
            fresh = [push for push in pushes if push.round_number >= round_number]  # others' values have long moved on
            for push in fresh:
                self.replica.add(self.apart(push.vectors, self._outgoing), 1 / (len(fresh) + 1))
