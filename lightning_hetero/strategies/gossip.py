"""`hetero_gossip`, `hetero_gossip_push_sum`, `hetero_gossip_async`: replicas average with each other."""

from abc import abstractmethod
from typing import Any, Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_hetero.averaging.averager import Averager
from lightning_hetero.averaging.directed import DirectedAverager
from lightning_hetero.averaging.gossip import GossipAverager
from lightning_hetero.averaging.mixing import DIRECTED, MATCHINGS, rule_of
from lightning_hetero.averaging.pairwise import FirstComeAverager, MatchedAverager
from lightning_hetero.averaging.push_sum import PushSumAverager
from lightning_hetero.checks import at_least_one, is_number, one_of
from lightning_hetero.comm.address import interface_towards
from lightning_hetero.comm.gossip.introduction import Endpoint
from lightning_hetero.comm.gossip.peers import EXCHANGE
from lightning_hetero.comm.topology import ReplicaKind, Topology
from lightning_hetero.comm.wire import DTYPES, Wire
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.strategies.replica import ReplicaStrategy


class GossipBase(ReplicaStrategy):
    """Base of the gossip strategies: replicas wait for each other at the ends of epochs only.

    An exact average of all precedes validation and checkpoints, and ends the run.

    Args:
        every_n_steps: optimizer steps from one exchange to the next.
        wire: number format: ``"fp32"``, ``"bf16"`` or ``"fp16"``; in 16 bits differences from the initial values
            travel.
        replica: what trains apart from the others: each ``"rank"``, or each ``"node"``, whose ranks then average
            gradients at every step.
        deadline: seconds within which a peer must answer and a message arrive; otherwise the exchange is missed,
            counted and logged, and training goes on. At most a ninth of ``timeout`` counts, since an exchange in which
            all goes wrong takes as long as nine messages may take.
        seed: of what is drawn at random.
        **kwargs: further options, those of :class:`~lightning_hetero.strategies.replica.ReplicaStrategy`.

    Raises:
        ConfigurationError: a value that cannot work.
    """

    def __init__(
        self,
        every_n_steps: int = 1,
        wire: Wire = "fp32",
        replica: ReplicaKind = "rank",
        deadline: float = 30.0,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        at_least_one("every_n_steps", every_n_steps)
        if not is_number(deadline) or deadline <= 0:
            raise ConfigurationError(f"deadline={deadline!r} must be a number of seconds above 0.")
        if type(seed) is not int:
            raise ConfigurationError(f"seed={seed!r} must be a whole number.")
        one_of("wire", wire, tuple(DTYPES))
        one_of("replica", replica, ("rank", "node"))
        self.every_n_steps, self.wire, self.replica = every_n_steps, wire, replica
        self.deadline, self.seed = float(deadline), seed
        super().__init__(**kwargs)

    @override
    def algorithm_options(self) -> dict[str, Any]:
        names = ("every_n_steps", "wire", "replica", "deadline", "seed")
        return {**super().algorithm_options(), **{name: getattr(self, name) for name in names}}

    @override
    def replicas(self, topology: Topology) -> tuple[tuple[int, ...], ...]:
        return topology.replicas(self.replica)

    @override
    def make_averager(self) -> Averager:
        assert self.topology is not None
        assert self.cluster_environment is not None
        if self.engine.view.count == 1:
            rank_zero_info(f"{type(self).__name__}: there is one replica, so nobody to gossip with: it trains alone.")
        interface = interface_towards(self.cluster_environment.main_address)
        deadline = min(self.deadline, self.options.timeout.total_seconds() / EXCHANGE)
        endpoint = Endpoint(interface, self.topology.places[self.topology.rank].host, deadline)
        return self.make_gossip(endpoint, self.on_nan == "skip")

    @abstractmethod
    def make_gossip(self, endpoint: Endpoint, skip: bool) -> GossipAverager:
        """The form of gossip, of this strategy's options."""


class GossipStrategy(GossipBase):
    """Replicas average in rounds, with few others each time.

    ``exchange="pairwise"``: who meets whom is a matching, and a pair meets halfway, by the samples that each takes:
    ``x_i += s_j / (s_i + s_j) (x_j' - x_i')``. ``"push"`` and ``"pull"``: each sends to others, or gets from them, and
    takes the mean with what has come.

    Source: gossip between unlike processors, Georgiev and Gurov 2019; the rules are those of GoSGD, Blot et al. 2016,
    and GossipGraD, Daily et al. 2018.

    Args:
        every_n_steps: optimizer steps from one round to the next.
        topology: for ``"pairwise"``: ``"random"`` (a matching drawn anew in each round), ``"ring"`` or ``"hypercube"``;
            for ``"push"`` and ``"pull"`` also ``"one_peer_exponential"`` and ``"exponential"``. Any number of replicas
            will do.
        exchange: ``"pairwise"``, ``"push"`` or ``"pull"``.
        overlap: a pair exchanges in the background of a step what it had before it; ``False``: after the step.
        wire: number format: ``"fp32"``, ``"bf16"`` or ``"fp16"``; in 16 bits differences from the initial values
            travel.
        **kwargs: further options, those of :class:`~lightning_hetero.strategies.gossip.GossipBase`.

    Raises:
        ConfigurationError: a value that cannot work.
    """

    def __init__(
        self,
        every_n_steps: int = 1,
        topology: str = "random",
        exchange: Literal["pairwise", "push", "pull"] = "pairwise",
        overlap: bool = True,
        wire: Wire = "fp32",
        **kwargs: Any,
    ) -> None:
        one_of("exchange", exchange, ("pairwise", "push", "pull"))
        pairwise = exchange == "pairwise"
        self.rule = rule_of(topology, MATCHINGS if pairwise else DIRECTED, f"exchange={exchange!r}")
        one_of("overlap", overlap, (True, False))
        self.graph, self.exchange, self.overlap = topology, exchange, overlap
        super().__init__(every_n_steps, wire, **kwargs)

    @override
    def algorithm_options(self) -> dict[str, Any]:
        own = {"topology": self.graph, "exchange": self.exchange, "overlap": self.overlap}
        return {**super().algorithm_options(), **own}

    @override
    def make_gossip(self, endpoint: Endpoint, skip: bool) -> GossipAverager:
        if self.exchange == "pairwise":
            return MatchedAverager(self.every_n_steps, self.rule, self.seed, self.overlap, self.wire, endpoint, skip)
        pull = self.exchange == "pull"
        return DirectedAverager(self.every_n_steps, self.rule, pull, self.seed, self.wire, endpoint, skip)


class GossipPushSumStrategy(GossipBase):
    """Stochastic gradient push: each gives parts of its values and of their weight away.

    Exact on directed and irregular graphs, whatever is late: a message that comes late counts when it comes.

    Source: SGP, Assran et al. 2019; in the spirit of Georgiev and Gurov 2019.

    Args:
        every_n_steps: optimizer steps from one round to the next.
        topology: ``"one_peer_exponential"``, ``"exponential"``, ``"ring"``, ``"random"`` or ``"hypercube"``.
        wire: number format: ``"fp32"``, ``"bf16"`` or ``"fp16"``; in 16 bits differences from the initial values
            travel.
        **kwargs: further options, those of :class:`~lightning_hetero.strategies.gossip.GossipBase`.

    Raises:
        ConfigurationError: a value that cannot work.
    """

    def __init__(
        self, every_n_steps: int = 1, topology: str = "one_peer_exponential", wire: Wire = "fp32", **kwargs: Any
    ) -> None:
        self.rule, self.graph = rule_of(topology, DIRECTED, "push-sum"), topology
        super().__init__(every_n_steps, wire, **kwargs)

    @override
    def algorithm_options(self) -> dict[str, Any]:
        return {**super().algorithm_options(), "topology": self.graph}

    @override
    def make_gossip(self, endpoint: Endpoint, skip: bool) -> GossipAverager:
        return PushSumAverager(self.every_n_steps, self.rule, self.seed, self.wire, endpoint, skip)


class GossipAsyncStrategy(GossipBase):
    """First come, first paired: nobody waits for anybody within an epoch.

    Every few steps a replica offers its values; whoever else does is its partner, in the background. A slow replica
    meets others as often as it can, and slows nobody down.

    Source: in the spirit of Georgiev and Gurov 2019; AD-PSGD, Lian et al. 2018.

    Args:
        every_n_steps: at least so many optimizer steps lie between two offers.
        wire: number format: ``"fp32"``, ``"bf16"`` or ``"fp16"``; in 16 bits differences from the initial values
            travel.
        **kwargs: further options, those of :class:`~lightning_hetero.strategies.gossip.GossipBase`.

    Raises:
        ConfigurationError: a value that cannot work.
    """

    @override
    def make_gossip(self, endpoint: Endpoint, skip: bool) -> GossipAverager:
        return FirstComeAverager(self.every_n_steps, self.wire, endpoint, skip)
