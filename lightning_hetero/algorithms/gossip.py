"""Gossip: replicas average in pairs, without a center and without a collective."""

from dataclasses import dataclass, field
from typing import Literal

from typing_extensions import override

from lightning_hetero.algorithms.base import StepContext
from lightning_hetero.algorithms.peers import GossipAverager, PairAverager, PushAverager
from lightning_hetero.algorithms.topologies import DIRECTED, MATCHINGS, Rule, rule_of
from lightning_hetero.argument_checks import at_least_one, one_of
from lightning_hetero.comm.all_reduce import in_chunks
from lightning_hetero.comm.staging import memory_like


@dataclass
class RoundGossipAverager(GossipAverager):
    """Options of gossip in rounds.

    Args:
        every_n_steps: optimizer steps from one round to the next.
        topology: for ``"pairwise"``: ``"random"`` (a new matching in each round), ``"ring"`` or ``"hypercube"``;
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
class MatchedAverager(RoundGossipAverager, PairAverager):
    """In each round replicas meet in pairs, and both move by half of their difference, or by weight.

    With ``overlap`` that is the difference before a step, added after it. All compute the pairs from the same list.

    Source: GossipGraD, Daily et al. 2018; of overlapped pairs AD-PSGD, Lian et al. 2018.
    """

    @override
    def before_step(self, context: StepContext) -> None:
        if self.overlap:
            self._offer(context, context.step + 1)

    @override
    def after_step(self, context: StepContext) -> None:
        if not self.overlap:
            self._offer(context, context.step)
        self.keep(self.client.meet(self._spare))
        self.move()

    def _offer(self, context: StepContext, step: int) -> None:
        round_number, since = divmod(step, self.every_n_steps)
        whom, _ = self.partners(self.rule, round_number)
        if whom and not since and not self.arrived:  # else a loss has broken this step after the exchange
            self.client.offer(self.pack(), self.weight(context), whom, round_number)


@dataclass
class DirectedAverager(RoundGossipAverager, PushAverager):
    """One way: ``x_i += sum_j (x_j - x_i) / (d + 1)`` over the ``d`` peers from which something has come in a round.

    With ``exchange="pull"`` messages go the other way: those that would receive send. If no message is lost, the sum
    of all values is kept, since on these topologies each replica sends as much as it gets. Unlike push-sum, this does
    not correct for messages that were lost, nor does it weight by samples: replicas tend to their plain mean.

    Source: GossipGraD, Daily et al. 2018.
    """

    @override
    def after_step(self, context: StepContext) -> None:
        round_number, since = divmod(context.step, self.every_n_steps)
        if since:
            return
        targets, sources = self.partners(self.rule, round_number)
        if self.exchange == "pull":
            targets, sources = sources, targets
        parts = self.client.parts(self.pack())
        self._spare = self._spare or [memory_like(old) for old in self.reference]
        moves, heard = [[move.zero_() for move in part] for part in self.client.parts(self._spare)], False
        for column, part in zip(self.client, parts, strict=True):
            column.lay_out(part)
            for peer in targets:
                column.send(peer, round_number, float(not self.restarted))
        for column, moved in zip(self.client, moves, strict=True):
            with column.receiving(round_number, sources) as pushes:
                # Late ones do not count: who has sent them has moved on.
                fresh = [push for push in pushes if push.round_number >= round_number and push.weight]
                for push in fresh:
                    for move, theirs, own in in_chunks(moved, push.vectors, column.outgoing):
                        away = theirs.to(move.dtype) - own.to(move.dtype)
                        move.add_(away, alpha=1 / (len(fresh) + (not self.restarted)))
                heard |= bool(fresh)
        self.restarted &= not heard
        self.replica.add(self.client.whole(moves, self._spare), 1.0)


@dataclass
class FirstComeAverager(PairAverager):
    """Whoever offers is paired with whoever else does; nobody waits, and training goes on meanwhile.

    Source: AD-PSGD, Lian et al. 2018, but with both sides choosing.

    Args:
        every_n_steps: at least so many optimizer steps lie between two offers.
    """

    every_n_steps: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one("every_n_steps", self.every_n_steps)

    @property
    @override
    def consensus_is_mean(self) -> bool:
        return False  # an exchange may have been completed meanwhile

    @override
    def after_step(self, context: StepContext) -> None:
        self.keep(self.client.poll(self._spare))
        self.move()
        if not self.client.offered and context.step % self.every_n_steps == 0:
            others = [peer for peer in range(self.links.count) if peer != self.links.index]
            self.client.offer(self.pack(), self.weight(context), others)
