"""Base of gossip: what replicas that exchange with each other, without a center, have in common."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor
from typing_extensions import override

from lightning_hetero.algorithms.base import Averager, Outcome, StepContext, Traits, zero_nonfinite_state
from lightning_hetero.algorithms.state import Own
from lightning_hetero.algorithms.topologies import Rule, sends
from lightning_hetero.argument_checks import is_number
from lightning_hetero.comm.compression import Wire, refuse_low_bit
from lightning_hetero.comm.gossip import ReceivedPush
from lightning_hetero.comm.gossip_client import Endpoint, PairClient, PushClient
from lightning_hetero.comm.gossip_peers import EXCHANGE
from lightning_hetero.errors import ConfigurationError

T = TypeVar("T", PairClient, PushClient)


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
        kind: class of :attr:`client`.
        client: exchanges with the peers of this replica, since :meth:`prepare`.
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
        self.client = self.kind(endpoint, self.links, self.reference, self.wire, self.met, self.missed)
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
        super().finish(context)
        self.report()

    def report(self) -> None:
        """Let all know which replicas have met, and how often (collective)."""
        self.pairings = self.links.gather_of_replicas([self.met[peer] for peer in range(self.links.count)])

    @override
    def absorb_arrived(self, lost: Sequence[int]) -> None:
        self.client.lose(lost, self.links)
        for counts in (self.met, self.missed):  # in place: the client counts on
            of_survivors = [count for peer, count in sorted(counts.items()) if peer not in lost]
            numbers = [peer - sum(gone < peer for gone in lost) for peer in sorted(counts) if peer not in lost]
            counts.clear()
            counts.update(dict(zip(numbers, of_survivors, strict=True)))
        self.before_save()

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

    kind = PairClient


@dataclass
class PushAverager(GossipAverager[PushClient]):
    """Base of one-way gossip: sends to some peers in each round, and takes what has come from others.

    Attributes:
        mail: pushes that had come and were not taken in yet when the state was last saved, or a replica was lost.
    """

    kind = PushClient
    mail = Own[list[tuple]](lambda averager: [])

    @override
    def before_save(self) -> None:
        self.mail = [tuple(push) for push in self.client.waiting()]

    @override
    def after_restore(self) -> None:
        self.client.restore([ReceivedPush(*push) for push in self.mail])

    @override
    def absorb_arrived(self, lost: Sequence[int]) -> None:
        super().absorb_arrived(lost)  # what was lost with a replica is lost, but not what has come from it
        self.mail = [(-1, *push[1:]) for push in self.mail]  # peers have other numbers now
