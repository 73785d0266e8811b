"""Gossip: replicas average in pairs, without a center and without a collective."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor
from typing_extensions import override

from lightning_hetero.algorithms.base import StepContext
from lightning_hetero.algorithms.peers import GossipAverager, PairAverager, PushAverager
from lightning_hetero.algorithms.state import Own
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
        if (met := self.client.meet(self._spare)) is not None:
            self.replica.add(*met)
            self.restarted = False

    def _offer(self, context: StepContext, step: int) -> None:
        round_number, since = divmod(step, self.every_n_steps)
        whom, _ = self.partners(self.rule, round_number)
        if whom and not since:
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

    Attributes:
        arrived: difference from a peer that an exchange has brought, and that is yet to be added; empty: none.
        arrived_part: the part of it to add.
    """

    arrived = Own[list[Tensor]](lambda averager: [])
    arrived_part = Own[float](0.0)

    every_n_steps: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one("every_n_steps", self.every_n_steps)

    @override
    def after_step(self, context: StepContext) -> None:
        self._collect()
        self._move()
        if not self.client.offered and context.step % self.every_n_steps == 0:
            others = [peer for peer in range(self.links.count) if peer != self.links.index]
            self.client.offer(self.pack(), self.weight(context), others)

    def _collect(self, withdraw: bool = False) -> None:
        """Keep what the offer has brought, if anything, until replicas move by it (collective over the replica)."""
        if not self.arrived and (brought := self.client.poll(self._spare, withdraw)) is not None:
            self.arrived, self.arrived_part = brought

    def _move(self) -> None:
        if self.arrived:
            self.replica.add(self.arrived, self.arrived_part)
            self.arrived, self.restarted = [], False

    @override
    def consensus(self, context: StepContext) -> list[Tensor]:
        self.before_save()
        self._packed = self.replica.pack(self._packed)
        for value, difference in zip(self._packed, self.arrived, strict=False):
            value.add_(difference.to(value.device, value.dtype), alpha=self.arrived_part)
        return self.links.average(self._packed, self.counted(context).samples_per_replica, self.reference).mean

    @override
    def complete(self, context: StepContext) -> None:
        self._collect(withdraw=True)
        self._move()
        self.links.gather(None)  # nobody has anything on offer any more

    @override
    def before_save(self, lost: Sequence[int] | None = None) -> None:
        super().before_save(lost)
        with self.client.paused():  # exchanges that one of a pair has counted the other has, too
            self._collect(withdraw=self.links.in_columns is not None)  # some columns may have exchanged, others not
