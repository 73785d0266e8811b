"""Seconds, bytes and samples of a step under each strategy, by the arithmetic of section "A model of cost"."""

from typing import Any, Literal, NamedTuple

from lightning_hetero.planning.cluster import Cluster

#: Bytes on each wire for one byte of fp32, scales included.
WIRES = {"fp32": 1.0, "bf16": 0.5, "int8": 0.254, "int4": 0.129}
DASO_EVERY = 4  # steps between two exchanges, by default
FRAGMENTS = 4  # of a model that streams
#: Bytes per parameter that a rank keeps to average gradients: the buckets of DDP; and on the host, what goes over gloo.
BUCKETS, OVER_GLOO = 4, 8
_ANY, _WIDE = tuple(WIRES), ("fp32", "bf16")


class StrategyKind(NamedTuple):
    """Strategies that differ in little.

    Attributes:
        name: the strategy string.
        strategy: its class.
        every: its option for the steps between two exchanges; ``None``: its default stays.
        options: that make it what it is here.
        wires: number formats that it has for exchanges.
        nodes: whether a replica is a node.
        behind: what an exchange passes in the background of: nothing, one step, or the steps until the next exchange.
        repeatable: whether two runs give the same weights.
        least: the fewest steps between two exchanges.
        kept: bytes per parameter in memory, beyond model, gradients and optimizer, if a replica is one rank.
    """

    name: str
    strategy: str
    every: str | None = "tau"
    options: dict[str, Any] = {}
    wires: tuple[str, ...] = _ANY
    nodes: bool = False
    behind: Literal["nothing", "a step", "all steps"] = "nothing"
    repeatable: bool = True
    least: int = 1
    kept: int = 12

    def waited(self, seconds: float, work: float, every: int) -> float:
        """Seconds of each step, in the mean, for which a rank waits for an exchange.

        Args:
            seconds: that the exchange takes.
            work: seconds of the step's work.
            every: steps between two exchanges.
        """
        hidden = {"nothing": 0.0, "a step": work, "all steps": every * work}[self.behind]
        return max(seconds - hidden, 0.0) / every

    def wire(self, wished: str) -> str:
        """The number format of its exchanges: the one that is wished for, or fp32 if it has none such."""
        return wished if wished in self.wires else "fp32"

    def given(self, every: int, wished: str = "fp32") -> dict[str, Any]:
        """The strategy's options, with a number format that is wished for."""
        own = {} if self.every is None else {self.every: every}
        if "fragments" in self.options:
            own["delay"] = max(every // FRAGMENTS, 1)
        wire = self.wire(wished)
        return {**own, **self.options, **({"wire": wire} if wire != "fp32" else {})}


_AUTO = {"moving_rate": "auto"}
_NODES = {"replica": "node"}
_MEAN = {"outer_lr": 1.0, "outer_momentum": 0.0}  # an outer step that takes the mean, which needs no tuning
#: An all-reduce between all replicas.
AVERAGES = (
    StrategyKind("hetero_node", "NodeAverageStrategy", "every_n_steps", nodes=True),
    StrategyKind("hetero_easgd", "EASGDStrategy", options=_AUTO),
    StrategyKind("hetero_eamsgd", "EAMSGDStrategy", options=_AUTO),
    StrategyKind("hetero_diloco", "DiLoCoStrategy", options=_NODES, nodes=True, kept=16),
    StrategyKind("hetero_easgd_overlap", "EASGDOverlapStrategy", options=_AUTO, behind="a step"),
    StrategyKind(
        "hetero_diloco (streaming)",
        "DiLoCoStrategy",
        options={"fragments": FRAGMENTS, **_NODES, **_MEAN},
        nodes=True,
        behind="all steps",
        least=2,  # an exchange of a fragment lasts a step at least, and is over before its next one begins
        kept=16,
    ),
)
#: The same, every few steps, whatever is asked for.
DASO = StrategyKind(
    "hetero_daso",
    "DASOStrategy",
    None,
    {"wait": "auto", "warmup": 0, "cooldown": 0},
    nodes=True,
    behind="all steps",
)
#: Replicas that visit a center, in turn or as they come.
CENTERS = (
    StrategyKind("hetero_easgd_round_robin", "EASGDRoundRobinStrategy", options=_AUTO, wires=_WIDE, kept=20),
    StrategyKind(
        "hetero_easgd_async",
        "EASGDAsyncStrategy",
        options=_AUTO,
        wires=_WIDE,
        behind="a step",
        repeatable=False,
        kept=16,
    ),
    StrategyKind(
        "hetero_measgd_async",
        "MEASGDAsyncStrategy",
        options=_AUTO,
        wires=_WIDE,
        behind="a step",
        repeatable=False,
        kept=16,
    ),
    StrategyKind("hetero_diloco_async", "DiLoCoAsyncStrategy", repeatable=False, kept=36),
)
#: Replicas that meet in pairs.
PAIRS = (
    StrategyKind("hetero_gossip", "GossipStrategy", "every_n_steps", wires=_WIDE, behind="a step", kept=24),
    StrategyKind("hetero_gossip_push_sum", "GossipPushSumStrategy", "every_n_steps", wires=_WIDE, kept=24),
    StrategyKind("hetero_gossip_async", "GossipAsyncStrategy", "every_n_steps", wires=_WIDE, repeatable=False, kept=24),
    StrategyKind("hetero_noloco", "NoLoCoStrategy", wires=_WIDE, kept=36),
)


class Prediction(NamedTuple):
    """Prediction for a strategy on a cluster.

    Attributes:
        name: the strategy string.
        options: of the strategy.
        strategy: both as Python, for ``Trainer(strategy=...)``.
        step: seconds of a step of the slowest rank, in the mean: a fit takes as many of them as each rank has steps.
        exposed: of these, seconds in which a rank only communicates.
        sent: bytes that leave a node in a step, in the mean; of a center, the node that sends most.
        speed: samples per second over all ranks.
        efficiency: that speed over the sum of what the ranks reach alone.
        exact: whether the weights are those of one process.
        repeatable: whether two runs give the same weights.
        seldom: whether the link lets it exchange less than half as often as its options say. It waits for nobody, and
            its replicas drift apart.
        every: steps between two exchanges of a replica.
        wire: number format of these.
        kept: bytes of memory of a rank, beyond model, gradients and optimizer; on its device and on its host.
    """

    name: str
    options: dict[str, Any]
    strategy: str
    step: float
    exposed: float
    sent: float
    speed: float
    efficiency: float
    exact: bool = False
    repeatable: bool = True
    seldom: bool = False
    every: int = 1
    wire: str = "fp32"
    kept: float = 0.0

    @property
    def string(self) -> str:
        """The strategy string: the name without the form that options give the strategy."""
        return self.name.partition(" ")[0]


def predictions(cluster: Cluster, every: int = 16, wire: str = "fp32") -> list[Prediction]:
    """Predictions for every strategy on a cluster, the fastest first, but last those that could exchange too seldom.

    Args:
        cluster: the ranks, links and model.
        every: steps between two exchanges of strategies that meet now and then.
        wire: number format between replicas; fp32 where a strategy has none such.
    """
    found = [
        _gradients(cluster, "ddp", cluster.even, by_link=False),
        _gradients(cluster, "hetero_ddp", cluster.split, by_link=True),
        *(_average(cluster, every, wire, kind) for kind in AVERAGES if every >= kind.least),
        _average(cluster, DASO_EVERY, wire, DASO),
        *(_center(cluster, every, wire, kind) for kind in CENTERS),
        *(_pairs(cluster, every, wire, kind) for kind in PAIRS),
    ]
    return sorted(found, key=lambda one: (one.seldom, -one.speed, not one.exact))


class _Load(NamedTuple):
    """Load of a step.

    Attributes:
        work: seconds.
        exposed: seconds in which ranks only communicate.
        sent: bytes that leave a node.
        seldom: see :class:`Prediction`.
    """

    work: float
    exposed: float
    sent: float
    seldom: bool = False


def _gradients(cluster: Cluster, name: str, work: float, by_link: bool) -> Prediction:
    """One all-reduce of the gradients over all ranks in a step, behind a part of it."""
    exposed = cluster.exposed(cluster.gradients(), work, by_link=by_link)
    load = _Load(work, exposed, _ring(cluster.size, cluster.world, len(cluster.nodes)))
    kept = (BUCKETS if name == "ddp" else BUCKETS + OVER_GLOO) * cluster.size / 4
    return Prediction(name, {}, f'"{name}"', *_costs(cluster, load), exact=True, kept=kept)


def _average(cluster: Cluster, every: int, wire: str, kind: StrategyKind) -> Prediction:
    """An all-reduce between replicas, once in a while; of fragments in turn that is the same."""
    gradients, seconds, sent = _between(cluster, WIRES[kind.wire(wire)], kind.nodes)
    waited = kind.waited(seconds, cluster.split + gradients, every)  # it passes behind the gradients, too
    load = _Load(cluster.split, gradients + waited + _handled(cluster, every), sent / every)
    return _made(cluster, kind, load, kind.given(every, wire))


def _center(cluster: Cluster, every: int, wire: str, kind: StrategyKind) -> Prediction:
    """Replicas visit a center on the first node, which serves one after the other.

    Nobody does the steps of another rank: the slowest one, with its visits, says when all are done.
    """
    size = cluster.size * WIRES[kind.wire(wire)]
    ways = (cluster.between if number else cluster.within for number, node in enumerate(cluster.nodes) for _ in node)
    visits = [way.visit(size) for way in ways]
    each = [pace + kind.waited(visit, pace, every) for pace, visit in zip(cluster.paces, visits, strict=True)]
    step = max(max(each) + _handled(cluster, every), sum(visits) / every)
    away = cluster.world - len(cluster.nodes[0])
    sent = max(away, cluster.largest) * size / every  # what comes to the center, and goes back: two directions
    return _made(cluster, kind, _Load(cluster.split, step - cluster.split, sent), kind.given(every, wire))


def _pairs(cluster: Cluster, every: int, wire: str, kind: StrategyKind) -> Prediction:
    """Pairs of ranks swap parameters, drawn at random; ranks of a node share its link."""
    size = cluster.size * WIRES[kind.wire(wire)]
    if len(cluster.nodes) == 1:
        swap, away, crossing = cluster.within.pair(size), 1.0, 0.0
    else:
        world, node = cluster.world, cluster.largest
        # How often a rank's peer is on another node. (Who is left out of an odd number waits for its next peer.)
        away = (world - node) / (world - 1)
        beside = (node - 1) * max(world - node - 1, 0) / max(world - 3, 1)  # then, how many others' peers beside it
        swap, crossing = cluster.between.pair(size * (1 + beside)), node * away
    work, exposed, interval = cluster.split, 0.0, float(every)
    if kind.repeatable:
        exposed = away * kind.waited(swap, work, every)
    else:  # nobody waits: replicas offer again once they have met, as often as the link allows
        interval = max(interval, away * swap / work)
    load = _Load(work, exposed + _handled(cluster, every), size * crossing / interval, interval > 2 * every)
    return _made(cluster, kind, load, kind.given(every, wire))


# -- parts -------------------------------------------------------------------------------------------------


def _between(cluster: Cluster, part: float, nodes: bool) -> tuple[float, float, float]:
    """Bytes that replicas, nodes or ranks, exchange, at a part of fp32's bytes.

    Returns:
        Seconds of each step in which ranks wait for gradients within a replica; seconds of an all-reduce between
        replicas; and the bytes that leave a node in it.
    """
    size, count = cluster.size * part, len(cluster.nodes)
    if not nodes:
        return 0.0, cluster.gradients(size), _ring(size, cluster.world, count)
    return cluster.exposed(cluster.inside(), cluster.split), cluster.across(size), _ring(size, count, count)


def _handled(cluster: Cluster, every: int) -> float:
    """Seconds of each step in which a rank packs, mixes and unpacks its parameters."""
    return cluster.size / cluster.handling / every


def _ring(size: float, members: int, nodes: int) -> float:
    """Bytes that leave each node in a ring all-reduce."""
    return 2 * (members - 1) / members * size if nodes > 1 else 0.0


def _costs(cluster: Cluster, load: _Load) -> tuple[float, float, float, float, float]:
    """Of a prediction: ``step``, ``exposed``, ``sent``, ``speed``, ``efficiency``."""
    step = load.work + load.exposed
    speed, sent = cluster.samples / step, load.sent if len(cluster.nodes) > 1 else 0.0
    return step, load.exposed, sent, speed, speed / cluster.independent_speed


def _made(cluster: Cluster, kind: StrategyKind, load: _Load, options: dict[str, Any]) -> Prediction:
    strategy = f"{kind.strategy}({', '.join(f'{name}={_python(value)}' for name, value in options.items())})"
    every = DASO_EVERY if kind.every is None else options[kind.every]
    averages = kind.nodes and cluster.largest > 1  # gradients, within a node
    return Prediction(
        kind.name,
        options,
        strategy,
        *_costs(cluster, load),
        repeatable=kind.repeatable,
        seldom=load.seldom,
        every=every,
        wire=options.get("wire", "fp32"),
        kept=(kind.kept + (BUCKETS + OVER_GLOO if averages else 0)) * cluster.size / 4,
    )


def _python(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
