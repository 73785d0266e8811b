"""Base of gossip: what replicas that exchange with each other, without a center, have in common."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor
from typing_extensions import override

from lightning_hetero.algorithms.base import Averager, Outcome, ReplicaLoss, StepContext, Traits
from lightning_hetero.algorithms.state import Own
from lightning_hetero.algorithms.topologies import Rule, sends
from lightning_hetero.argument_checks import is_number
from lightning_hetero.comm.compression import Wire, refuse_low_bit
from lightning_hetero.comm.gossip import ReceivedPush
from lightning_hetero.comm.gossip_client import Endpoint, PairClient, PushClients, pair_client
from lightning_hetero.comm.gossip_peers import EXCHANGE
from lightning_hetero.comm.staging import memory_like
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.replicas.optimizer_states import zero_nonfinite_state

T = TypeVar("T", PairClient, PushClients)


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
        connect: makes :attr:`client`.
        client: exchanges with the peers of this replica, since :meth:`prepare`.
        met: completed exchanges with each peer.
        missed: those that were not, by peer: late, frozen, dead, unreachable.
        restarted: whether this replica has begun again with the first values, since its own were not finite, and has
            heard of no other one since. Until then its values do not count.
    """

    traits = Traits(lockstep=False, fresh_start="the values with which all have begun, until it hears of another one")
    restarted = Own[bool](False)
    connect: ClassVar[Any]

    wire: Wire = field(default="fp32", kw_only=True)
    deadline: float = field(default=30.0, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    met: Counter[int] = field(default_factory=Counter, init=False, repr=False)
    missed: Counter[int] = field(default_factory=Counter, init=False, repr=False)
    client: T = field(init=False, repr=False)

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
        endpoint = Endpoint(self.run.interface, topology.places[topology.rank].host, min(self.deadline, limit))
        self.client = self.connect(endpoint, self.links, self.reference, self.wire, self.met, self.missed)
        if self.links.count == 1:
            return Outcome(info="there is one replica, so nobody to gossip with: it trains alone.")
        return None

    @override
    def close(self) -> None:
        if hasattr(self, "client"):  # not if it could not be made
            self.client.close()

    @property
    def restart_values(self) -> list[Tensor]:
        """The values with which a replica that is not finite begins again."""
        return self.reference

    def pack(self) -> list[Tensor]:
        """This replica's values. If they are not finite, it begins again, and exchanges: others wait for it.

        Raises:
            NotFiniteError: it may not begin again (``on_nan="error"``).
        """
        self._packed = self.replica.pack(self._packed)
        if not self.is_finite(self._packed):
            values = self.restart_values
            self.replica.unpack(values)
            zero_nonfinite_state(self.optimizers)
            self._packed, self.restarted = self.replica.pack(self._packed), values is self.reference
        return self._packed

    def counted(self, context: StepContext) -> StepContext:
        """The facts without the samples of replicas that have :attr:`restarted` (collective)."""
        if not self.run.skip:
            return context
        restarted = self.links.gather_of_replicas(self.restarted)
        samples = [0 if again else n for again, n in zip(restarted, context.samples_per_replica, strict=True)]
        return context._replace(samples_per_replica=samples) if any(samples) else context

    @property
    @override
    def consensus_is_mean(self) -> bool:
        ours = GossipAverager.consensus, PairAverager.consensus  # nothing has arrived at the end of a step
        return type(self).consensus in ours and not self.run.skip

    @override
    def consensus(self, context: StepContext) -> list[Tensor]:
        return super().consensus(self.counted(context))

    def partners(self, rule: Rule, round_number: int) -> tuple[Sequence[int], Sequence[int]]:
        """The peers to which this replica sends in a round, and those that send to it."""
        to = sends(rule, range(self.links.count), round_number, self.seed)
        return to[self.links.index], [peer for peer, others in to.items() if self.links.index in others]

    @override
    def due(self, context: StepContext) -> bool:
        return context.epoch_ends

    @override
    def finish(self, context: StepContext) -> None:
        self.replica.unpack(self.consensus(context))
        # All learn which replicas have met, and how often.
        self.pairings = self.links.gather_of_replicas([self.met[peer] for peer in range(self.links.count)])

    @override
    def before_save(self, lost: Sequence[int] | None = None) -> None:
        if lost is not None:
            self.client.lose(lost, self.links)

    @override
    def after_restore(self, loss: ReplicaLoss | None = None) -> None:
        if loss is None:
            return
        for counts in (self.met, self.missed):  # in place: the client counts on
            of_survivors = {peer: counts[former] for peer, former in enumerate(loss.kept) if former in counts}
            counts.clear()
            counts.update(of_survivors)

    @override
    def status(self, step: int) -> dict[str, float | str]:
        met = {f"met/replica{peer}": float(count) for peer, count in sorted(self.met.items())}
        return {"peer_distance": self.client.distance, "missed": sum(self.missed.values()), **met}


@dataclass
class PairAverager(GossipAverager[PairClient]):
    """A pair meets halfway, by weight: ``x_i += s_j / (s_i + s_j) (x_j' - x_i')``.

    ``x'`` are the values when each offered them. As both move by the same difference the weighted sum is kept exactly,
    though they may have taken steps since.

    Attributes:
        arrived: difference from a peer that an exchange has brought, and that is yet to be added; empty: none.
        arrived_part: the part of it to add.
    """

    connect = staticmethod(pair_client)
    arrived = Own[list[Tensor]](lambda averager: [])
    arrived_part = Own[float](0.0)

    def weight(self, context: StepContext) -> float:
        """``s_i`` of the values that were packed."""
        return 0.0 if self.restarted else context.samples_per_replica[self.links.index]

    @override
    def prepare(self) -> Outcome | None:
        self._spare = [memory_like(old) for old in self.reference]  # for differences from peers
        return super().prepare()

    def keep(self, brought: tuple[list[Tensor], float] | None) -> None:
        """Keep what an offer has brought, if anything, until this replica moves by it."""
        if brought is not None:
            self.arrived, self.arrived_part = brought

    def move(self) -> None:
        """Move by what has arrived, if anything."""
        if self.arrived:
            self.replica.add(self.arrived, self.arrived_part)
            self.restarted &= not self.arrived_part  # a peer that has begun again itself does not count
            self.arrived = []

    @override
    def consensus(self, context: StepContext) -> list[Tensor]:
        self.before_save()
        self._packed = self.replica.pack(self._packed)
        for value, difference in zip(self._packed, self.arrived, strict=False):
            value.add_(difference.to(value.device, value.dtype), alpha=self.arrived_part)
        return self.links.average(self._packed, self.counted(context).samples_per_replica, self.reference).mean

    @override
    def complete(self, context: StepContext) -> None:
        self.keep(self.client.poll(self._spare, withdraw=True))
        self.move()
        self.links.gather(None)  # nobody has anything on offer any more

    @override
    def before_save(self, lost: Sequence[int] | None = None) -> None:
        super().before_save(lost)
        with self.client.paused():  # exchanges that one of a pair has counted the other has, too
            # At a loss offers end. And of several columns some may have exchanged, others not.
            self.keep(self.client.poll(self._spare, lost is not None or self.links.in_columns is not None))


@dataclass
class PushAverager(GossipAverager[PushClients]):
    """Base of one-way gossip: sends to some peers in each round, and takes what has come from others.

    Attributes:
        mail: pushes that had come and were not taken in yet when the state was last saved, or a replica was lost; each
            after the number of its column.
    """

    connect = PushClients
    mail = Own[list[tuple]](lambda averager: [])

    @override
    def before_save(self, lost: Sequence[int] | None = None) -> None:
        super().before_save(lost)  # what was lost with a replica is lost, but not what has come from it
        self.mail = [(number, *push) for number, pushes in enumerate(self.client.waiting()) for push in pushes]
        if lost is not None:
            self.take_mail()

    @override
    def after_restore(self, loss: ReplicaLoss | None = None) -> None:
        super().after_restore(loss)
        if loss is not None:  # peers have other numbers now
            self.mail = [(number, -1, *push) for number, _, *push in self.mail]
        self.client.restore([(number, ReceivedPush(*push)) for number, *push in self.mail])

    def take_mail(self) -> None:
        """Take in :attr:`mail` after a loss, or let it wait: here it waits, and is dropped where columns change."""
        if self.client.cut is not None:
            self.mail = []
