"""Gossip: replicas average in pairs, without a center and without a collective."""

import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hetero.algorithms.base import Averager, Outcome, StepContext, Traits, zero_nonfinite_state
from lightning_hetero.algorithms.state import Own
from lightning_hetero.algorithms.topologies import DIRECTED, MATCHINGS, Rule, rule_of, sends
from lightning_hetero.argument_checks import at_least_one, is_number, one_of
from lightning_hetero.comm.compression import DTYPES, Wire, refuse_low_bit
from lightning_hetero.comm.gossip import (
    ANY,
    Endpoint,
    PairResult,
    PairTransport,
    PushTransport,
    ReceivedPush,
    connect_peers,
)
from lightning_hetero.comm.gossip_peers import EXCHANGE, PeerConnections
from lightning_hetero.comm.object_collectives import finite
from lightning_hetero.errors import ConfigurationError, NotFiniteError

T = TypeVar("T", PairTransport, PushTransport)
log = logging.getLogger("lightning_hetero")


@dataclass
class GossipAverager(Averager, Generic[T]):
    """Base of all forms of gossip: replicas wait for each other at the ends of epochs only.

    An exact average precedes validation and checkpoints, and ends the run.

    Args:
        wire: number format: ``"fp32"``; or ``"bf16"``, ``"fp16"``: differences from the initial values travel.
        deadline: seconds within which a peer must answer and a message arrive; otherwise the exchange is missed,
            counted and logged, and training goes on. At most a ninth of ``timeout`` counts, since an exchange in which
            all goes wrong takes as long as nine messages may take.
        seed: of what is drawn at random.

    Raises:
        ConfigurationError: a value that cannot work.

    Attributes:
        kind: ``T``, of transport, which leaders have.
        met: completed exchanges with each peer.
        missed: those that were not, by peer: late, frozen, dead, unreachable.
    """

    traits = Traits(lockstep=False, one_column=True, fresh_start="the values with which all have begun")
    kind: ClassVar[Any]

    wire: Wire = field(default="fp32", kw_only=True)
    deadline: float = field(default=30.0, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    met: Counter[int] = field(default_factory=Counter, init=False, repr=False)
    missed: Counter[int] = field(default_factory=Counter, init=False, repr=False)
    _transport: T | None = field(default=None, init=False, repr=False)
    _distance: float = field(default=0.0, init=False, repr=False)  # from the latest peer

    def __post_init__(self) -> None:
        if not is_number(self.deadline) or self.deadline <= 0:
            raise ConfigurationError(f"deadline={self.deadline!r} must be a number of seconds above 0.")
        if type(self.seed) is not int:
            raise ConfigurationError(f"seed={self.seed!r} must be a whole number.")
        refuse_low_bit(self.wire, "gossip rounds values, or weights, of which nothing may be left out")
        self.deadline = float(self.deadline)

    @override
    def prepare(self) -> Outcome | None:
        topology, groups = self.run.job
        limit = groups.timeout.total_seconds() / EXCHANGE
        self._endpoint = Endpoint(self.run.interface, topology.places[topology.rank].host, min(self.deadline, limit))
        narrow = DTYPES[self.wire]
        like = [old if narrow is None else torch.empty(old.numel(), dtype=narrow) for old in self.reference]
        self._transport = connect_peers(self.kind, self._endpoint, self.links, like)
        # What this replica lays out to be sent; its leader, who sends it, does so straight into the outbox.
        own = None if self._transport is None else self._transport.outbox.vectors
        self._outgoing = own or [torch.empty_like(value) for value in like]
        if self.links.count == 1:
            return Outcome(info="there is one replica, so nobody to gossip with: it trains alone.")
        return None

    @property
    def restart_values(self) -> list[Tensor]:
        """The values with which a replica that is not finite begins again."""
        return self.reference

    @property
    def peers(self) -> PeerConnections | None:
        """The transport's connections, on leaders."""
        return None if self._transport is None else self._transport.peers

    @override
    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    @override
    def due(self, context: StepContext) -> bool:
        return context.epoch_ends

    def broadcast(self, numbers: Sequence[float], vectors: Sequence[Tensor]) -> list[float]:
        """Give all ranks of the replica what its leader has: numbers, and vectors unless the first number is 0."""
        table = torch.tensor(numbers, dtype=torch.float64)
        self.links.broadcast(table)
        if table[0]:
            for vector in vectors:
                self.links.broadcast(vector)
        return table.tolist()

    def miss(self, peer: int) -> None:
        """Count an exchange with a peer that was not completed."""
        self.missed[peer] += 1
        level = logging.WARNING if self.missed[peer] == 1 else logging.INFO
        log.log(level, "Replica %d missed replica %d: late, frozen, dead or unreachable.", self.links.index, peer)

    def pack(self) -> list[Tensor]:
        """This replica's values. If they are not finite, it begins again, and exchanges: others wait for it.

        Raises:
            NotFiniteError: it may not begin again (``on_nan="error"``).
        """
        self._packed = self.replica.pack(self._packed)
        if not finite(self._packed):
            if not self.run.skip:
                raise NotFiniteError([self.links.index])
            self.replica.unpack(self.restart_values)
            zero_nonfinite_state(self.optimizers)
            self.links.traffic.skipped.append(self.links.index)
            self._packed = self.replica.pack(self._packed)
        return self._packed

    def lay_out(self, out: Sequence[Tensor]) -> None:
        """Write this replica's values where they are sent from, in the format of the wire.

        Raises:
            NotFiniteError: as for :meth:`pack` and :meth:`check_wire`.
        """
        for place, value, origin in zip(out, self.pack(), self.reference, strict=True):
            own = value.to("cpu", origin.dtype)
            place.copy_(own if self.wire == "fp32" else own - origin)
        self.check_wire(out)

    def distance_to_peer(self, theirs: Sequence[Tensor], own: Sequence[Tensor]) -> list[Tensor]:
        """Distance between a peer's values and this replica's."""
        return [
            their.to(origin.dtype) - mine.to(origin.dtype)
            for their, mine, origin in zip(theirs, own, self.reference, strict=True)
        ]

    def check_wire(self, laid_out: Sequence[Tensor]) -> None:
        """Before what is laid out travels: fp16 holds numbers up to 65504 only, and others would be poisoned.

        Raises:
            NotFiniteError: it is too large for the wire.
        """
        if self.wire == "fp16" and not finite(laid_out):
            raise NotFiniteError([self.links.index])

    @override
    def finish(self, context: StepContext) -> Outcome | None:
        super().finish(context)
        self.report()
        return None

    def report(self) -> None:
        """Let all know which replicas have met, and how often (collective)."""
        self.pairings = self.links.gather_of_replicas([self.met[peer] for peer in range(self.links.count)])

    @override
    def status(self, step: int) -> dict[str, float | str]:
        met = {f"met/replica{peer}": float(count) for peer, count in sorted(self.met.items())}
        return {"peer_distance": self._distance, "missed": sum(self.missed.values()), **met}


@dataclass
class PushAverager(GossipAverager[PushTransport]):
    """Base of one-way gossip: sends to some peers in each round, and takes what has come from others."""

    kind = PushTransport

    def send(self, peer: int, round_number: int, weight: float) -> bool:
        """Send what is laid out; whether it has gone (collective over the replica)."""
        began, sent = time.perf_counter(), None
        if self._transport is not None:
            sent = self._transport.push(peer, round_number, weight)
        gone, bytes_sent = self.broadcast([sent is not None, sent or 0], ())
        self._waited(began)
        if not gone:
            self.miss(peer)
            return False
        self.met[peer] += 1
        self.links.traffic.exchanges += 1
        self.links.traffic.bytes += int(bytes_sent)
        return True

    @contextmanager
    def receiving(self, round_number: int, sources: Sequence[int]) -> Iterator[list[ReceivedPush]]:
        """Pushes of a round, waiting for some peers (collective over the replica); valid within the block."""
        began = time.perf_counter()
        pushes = (
            [] if self._transport is None else self._transport.collect(round_number, sources, self._endpoint.deadline)
        )
        taken = []
        for i in range(int(self.broadcast([len(pushes)], ())[0])):
            push = pushes[i] if pushes else ReceivedPush(0, 0, 0.0, [torch.empty_like(sent) for sent in self._outgoing])
            weight, peer, then = self.broadcast([push.weight, push.peer, push.round_number], push.vectors)
            taken.append(ReceivedPush(int(peer), int(then), weight, push.vectors if weight else []))
        self._waited(began)
        for peer in set(sources) - {push.peer for push in taken if push.round_number == round_number}:
            self.miss(peer)
        yield taken
        if self._transport is not None:
            self._transport.recycle(pushes)

    def _waited(self, began: float) -> None:
        seconds = time.perf_counter() - began
        self.links.traffic.seconds += seconds
        self.links.traffic.exposed += seconds


@dataclass
class PairAverager(GossipAverager[PairTransport]):
    """A pair meets halfway, by weight: ``x_i += s_j / (s_i + s_j) (x_j' - x_i')``.

    ``x'`` are the values when each offered them. As both move by the same difference the weighted sum is kept exactly,
    though they may have taken steps since.
    """

    kind = PairTransport
    _offered: bool = field(default=False, init=False, repr=False)  # and not exchanged, as far as the replica knows

    @override
    def prepare(self) -> Outcome | None:
        outcome = super().prepare()
        self._offered = False
        self._theirs = [torch.empty_like(own) for own in self._outgoing]  # where other ranks than the leader get it
        return outcome

    def offer(self, context: StepContext, whom: Sequence[int], round_number: float) -> None:
        """Offer this replica's values to some peers."""
        self.lay_out(self._outgoing)
        self._weight, self._whom, self._offered = context.samples_per_replica[self.links.index], whom, True
        self._began = time.perf_counter()
        if self._transport is not None:
            self._transport.offer(self._weight, whom, round_number)

    def poll_offer(self, wait: float, withdraw: bool) -> PairResult | None:
        """The offer's result within so many seconds, on all ranks of the replica (collective over it).

        Args:
            wait: seconds.
            withdraw: the offer, if it has brought nothing.
        """
        swap = None
        if self._transport is not None:
            swap = self._transport.result(wait) or (self._transport.withdraw() if withdraw else None)
        vectors = self._theirs if swap is None else swap.vectors
        numbers = (0.0, 0.0, 0.0, 0.0) if swap is None else (1.0, swap.peer, swap.weight, swap.sent)
        well, peer, weight, sent = self.broadcast(numbers, vectors)
        return PairResult(int(peer), weight, vectors, int(sent)) if well else None

    def take(self, wait: float, withdraw: bool = True) -> bool:
        """Move by what the offer has brought; returns whether it has brought anything."""
        if (brought := self.offer_result(wait, withdraw)) is None:
            return False
        self.replica.add(*brought)
        return True

    def offer_result(self, wait: float, withdraw: bool = True) -> tuple[list[Tensor], float] | None:
        """The offer's result, as :meth:`difference` returns it, or ``None`` (collective over the replica).

        Args:
            wait: seconds.
            withdraw: the offer, if it has brought nothing.
        """
        began = time.perf_counter()
        swap = self.poll_offer(wait, withdraw)
        now = time.perf_counter()
        exposed = now - began if wait else 0.0
        if swap is None:
            self.links.traffic.exposed += exposed
            return None
        self.met[swap.peer] += 1
        self.links.traffic.add(swap.sent, now - self._began, exposed)
        return self.difference(swap)

    def difference(self, swap: PairResult) -> tuple[list[Tensor], float]:
        """Difference of the peer's offer from this one's, and the part of the way to go."""
        found = self.distance_to_peer(swap.vectors, self._outgoing)
        self._distance = math.sqrt(sum(float(vector.dot(vector)) for vector in found))
        return found, swap.weight / (swap.weight + self._weight) if swap.weight else 0.0


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
    """In each round replicas meet in pairs, and both move to their mean. All compute the pairs from the same list.

    Source: GoSGD, Blot et al. 2016; GossipGraD, Daily et al. 2018.
    """

    traits = replace(PairAverager.traits, one_column=False)

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
class DirectedAverager(RoundGossipAverager, PushAverager):
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
                self.replica.add(self.distance_to_peer(push.vectors, self._outgoing), 1 / (len(fresh) + 1))


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
        self._collect(0.0)
        self._add_arrived()
        if not self._offered and context.step % self.every_n_steps == 0:
            others = [peer for peer in range(self.links.count) if peer != self.links.index]
            self.offer(context, others, ANY)
        if self._transport is not None:
            for peer, count in list(self._transport.misses.items()):  # other threads add to it
                while self.missed[peer] < count:
                    self.miss(peer)

    def _collect(self, wait: float, withdraw: bool = False) -> None:
        """Keep what the offer has brought, if anything, until it is added (collective over the replica)."""
        if self._offered and not self.arrived and (brought := self.offer_result(wait, withdraw)) is not None:
            (self.arrived, self.arrived_part), self._offered = brought, False

    def _add_arrived(self) -> None:
        if self.arrived:
            self.replica.add(self.arrived, self.arrived_part)
            self.arrived = []

    @contextmanager
    def _pause_exchanges(self) -> Iterator[None]:
        """Exchange nothing meanwhile, so that all that one of a pair has counted the other has, too (collective)."""
        if self._transport is not None:
            self._transport.pause()
        try:
            yield
            self.links.gather(None)  # all have seen what they have, before anything changes
        finally:
            if self._transport is not None:
                self._transport.resume()

    @override
    def consensus(self, context: StepContext) -> list[Tensor]:
        with self._pause_exchanges():
            self._packed = self.replica.pack(self._packed)
            self._collect(0.0)
            for value, difference in zip(self._packed, self.arrived, strict=False):
                value.add_(difference.to(value.device, value.dtype), alpha=self.arrived_part)
            return self.links.average(self._packed, context.samples_per_replica, self.reference).mean

    @override
    def complete(self, context: StepContext) -> None:
        self._collect(0.0, withdraw=True)
        self._offered = False
        self._add_arrived()
        self.links.gather(None)  # nobody has anything on offer any more

    @override
    def before_save(self) -> None:
        with self._pause_exchanges():
            self._collect(0.0)

    @override
    def absorb_arrived(self, lost: Sequence[int]) -> None:
        if (peers := self.peers) is not None:
            for peer in lost:
                peers.lose(peer)
        self.before_save()  # exchanges that one of a pair has counted the other has, too
