"""Base of gossip: what replicas that exchange with each other, without a center, have in common."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor
from typing_extensions import override

from lightning_hetero.algorithms.base import Averager, Outcome, ReplicaLoss, StepContext, Traits
from lightning_hetero.algorithms.state import Own, VectorStart
from lightning_hetero.algorithms.topologies import Rule, sends
from lightning_hetero.argument_checks import is_number
from lightning_hetero.comm.all_reduce import in_chunks
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
    """

    traits = Traits(lockstep=False, fresh_start="the values with which all have begun")
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
            self.replica.unpack(self.restart_values)
            zero_nonfinite_state(self.optimizers)
            self._packed = self.replica.pack(self._packed)
        return self._packed

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
    """

    connect = staticmethod(pair_client)

    @override
    def prepare(self) -> Outcome | None:
        self._spare = [memory_like(old) for old in self.reference]  # for differences from peers
        return super().prepare()


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
        if lost is not None and self.client.cut is not None:  # columns will have other values
            self.take_mail()
            self.mail = []

    @override
    def after_restore(self, loss: ReplicaLoss | None = None) -> None:
        super().after_restore(loss)
        if loss is not None:  # peers have other numbers now
            self.mail = [(number, -1, *push) for number, _, *push in self.mail]
        self.client.restore([(number, ReceivedPush(*push)) for number, *push in self.mail])

    def take_mail(self) -> None:
        """Take in what can still be used of :attr:`mail`."""


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


class WeightedPushAverager(PushAverager):
    """Base of one-way gossip of values ``z`` as ``x = w z``, with a weight that travels along.

    Replicas with shards of unequal size exchange parts of their values with different ranks, in columns. In each a
    message may be lost by itself, so each has a weight of its own.

    Attributes:
        weights: ``w``, of each column of ranks; 0 before the first round, and where no samples were taken and nothing
            has come yet.
        x: ``x``, as vectors.
        alone: of each column, whether nothing came in the latest round in which something should have.
    """

    weights = Own[list[float]](lambda averager: [0.0] * max(len(averager.links.columns), 1))
    x = Own[list[Tensor]](VectorStart(lambda averager: averager.weights[0]))
    alone = Own[list[bool]](lambda averager: [False] * max(len(averager.links.columns), 1))

    @abstractmethod
    def learn(self, column: WeightedColumn, z: Sequence[Tensor], share: float) -> None:
        """Take in what the model has learned since: ``x += s (z_after - z_before)``.

        Args:
            column: a weight of 0 has not begun yet.
            z: ``z_after``.
            share: ``s`` by the plan in force.
        """

    def learned(
        self, x: Sequence[Tensor], z: Sequence[Tensor], samples_per_replica: Sequence[int]
    ) -> list[WeightedColumn]:
        """Each column after :meth:`learn`, if these are ``x`` and ``z_after``."""
        held = self.held(x)
        share = samples_per_replica[self.links.index] * len(samples_per_replica) / sum(samples_per_replica)
        for column, part in zip(held, self.client.parts(z), strict=True):
            self.learn(column, part, share)
        return held

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
        moved = [z - old for z, old in zip(self.unbiased(held, wide=True), before, strict=True)]
        self.replica.add(moved, 1.0)  # else the next round would take the mail back: it compares the model with z
        self._keep_evenly(held)

    @override
    def after_restore(self, loss: ReplicaLoss | None = None) -> None:
        super().after_restore(loss)
        if loss is not None:
            columns = max(len(self.links.columns), 1)
            self.weights, self.alone = [self.weights[0]] * columns, [any(self.alone)] * columns

    @override
    def status(self, step: int) -> dict[str, float | str]:
        return {**super().status(step), "weight": self.weights[0]}
