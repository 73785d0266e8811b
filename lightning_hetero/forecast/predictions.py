"""Seconds, bytes and samples of a step under each strategy, by the arithmetic of section "A model of cost"."""

from typing import Any, Literal, NamedTuple

from lightning_hetero.forecast.cluster import Cluster

#: Bytes on each wire for one byte of fp32, scales included.
WIRES = {"fp32": 1.0, "bf16": 0.5, "int8": 0.254, "int4": 0.129}


class Prediction(NamedTuple):
    """What a strategy makes of a cluster.

    Attributes:
        name: the strategy string.
        options: of the strategy.
        strategy: both as Python, for ``Trainer(strategy=...)``.
        step: seconds of a step, in the mean.
        exposed: of these, seconds in which a rank only communicates.
        sent: bytes that leave a node in a step, in the mean.
        speed: samples per second over all ranks.
        efficiency: that speed over the sum of what the ranks reach alone.
        exact: whether the weights are those of one process.
        repeatable: whether two runs give the same weights.
        seldom: whether the link lets it exchange less than half as often as its options say. It waits for nobody, and
            its replicas drift apart.
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


def predictions(cluster: Cluster, every: int = 16, wire: str = "fp32") -> list[Prediction]:
    """What every strategy makes of a cluster, the fastest first, but last those that could exchange too seldom.

    Args:
        cluster: the ranks, links and model.
        every: steps between two exchanges of strategies that meet now and then.
        wire: number format between replicas, where a strategy has one.
    """
    found = [
        _ddp(cluster),
        _hetero_ddp(cluster),
        *(_average(cluster, every, wire, kind) for kind in _AVERAGES),
        _average(cluster, DASO_EVERY, wire, _DASO),
        _round_robin(cluster, every),
        *(_center(cluster, every, kind) for kind in _CENTERS),
        *(_pairs(cluster, every, kind) for kind in _PAIRS),
    ]
    return sorted(found, key=lambda one: (one.seldom, -one.speed, not one.exact))


class _Kind(NamedTuple):
    """Strategies that differ in little.

    Attributes:
        name: the strategy string.
        strategy: its class.
        every: its option for the steps between two exchanges; ``None``: its default stays.
        options: that make it what it is here.
        wired: whether it has a number format for exchanges.
        nodes: whether a replica is a node.
        behind: what an exchange passes in the background of: nothing, one step, or the steps until the next exchange.
        lockstep: whether all ranks keep the same steps.
    """

    name: str
    strategy: str
    every: str | None = "tau"
    options: dict[str, Any] = {}
    wired: bool = False
    nodes: bool = False
    behind: Literal["nothing", "a step", "all steps"] = "nothing"
    lockstep: bool = True

    def waited(self, seconds: float, work: float, every: int) -> float:
        """Seconds of each step, in the mean, for which a rank waits for an exchange.

        Args:
            seconds: that the exchange takes.
            work: seconds of the step's work.
            every: steps between two exchanges.
        """
        hidden = {"nothing": 0.0, "a step": work, "all steps": every * work}[self.behind]
        return max(seconds - hidden, 0.0) / every

    def given(self, every: int, wire: str = "fp32") -> dict[str, Any]:
        """The strategy's options."""
        own = {} if self.every is None else {self.every: every}
        if "fragments" in self.options:
            own["delay"] = max(every // 4, 1)
        return {**own, **self.options, **({"wire": wire} if self.wired and wire != "fp32" else {})}


class _Load(NamedTuple):
    """What a step holds.

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


_AUTO = {"moving_rate": "auto"}
_NODES = {"replica": "node"}
_AVERAGES = (
    _Kind("hetero_node", "NodeAverageStrategy", "every_n_steps", wired=True, nodes=True),
    _Kind("hetero_easgd", "EASGDStrategy", options=_AUTO, wired=True),
    _Kind("hetero_eamsgd", "EAMSGDStrategy", options=_AUTO, wired=True),
    _Kind("hetero_diloco", "DiLoCoStrategy", options=_NODES, wired=True, nodes=True),
    _Kind("hetero_easgd_overlap", "EASGDOverlapStrategy", options=_AUTO, wired=True, behind="a step"),
    _Kind(
        "hetero_diloco (streaming)",
        "DiLoCoStrategy",
        options={"fragments": 4, **_NODES},
        wired=True,
        nodes=True,
        behind="all steps",
    ),
)
_DASO = _Kind(
    "hetero_daso",
    "DASOStrategy",
    None,
    {"wait": "auto", "warmup": 0, "cooldown": 0},
    wired=True,
    nodes=True,
    behind="all steps",
)
_ROUND_ROBIN = _Kind("hetero_easgd_round_robin", "EASGDRoundRobinStrategy", options=_AUTO)
_CENTERS = (
    _Kind("hetero_easgd_async", "EASGDAsyncStrategy", options=_AUTO, lockstep=False),
    _Kind("hetero_measgd_async", "MEASGDAsyncStrategy", options=_AUTO, lockstep=False),
    _Kind("hetero_diloco_async", "DiLoCoAsyncStrategy", lockstep=False),
)
_PAIRS = (
    _Kind("hetero_gossip", "GossipStrategy", "every_n_steps", behind="a step"),
    _Kind("hetero_gossip_push_sum", "GossipPushSumStrategy", "every_n_steps"),
    _Kind("hetero_gossip_async", "GossipAsyncStrategy", "every_n_steps", lockstep=False),
    _Kind("hetero_noloco", "NoLoCoStrategy"),
)
DASO_EVERY = 4  # steps between two exchanges, by default


def _ddp(cluster: Cluster) -> Prediction:
    return _gradients(cluster, "ddp", cluster.even, by_link=False)


def _hetero_ddp(cluster: Cluster) -> Prediction:
    return _gradients(cluster, "hetero_ddp", cluster.split, by_link=True)


def _gradients(cluster: Cluster, name: str, work: float, by_link: bool) -> Prediction:
    """One all-reduce of the gradients over all ranks in a step, behind a part of it."""
    exposed = cluster.exposed(cluster.gradients(), work, by_link=by_link)
    load = _Load(work, exposed, _ring(cluster.size, cluster.world, len(cluster.nodes)))
    return _made(cluster, name, load, exact=True)


def _average(cluster: Cluster, every: int, wire: str, kind: _Kind) -> Prediction:
    """An all-reduce between replicas, once in a while; of fragments in turn that is the same."""
    work, seconds, sent = _between(cluster, wire, kind.nodes)
    load = _Load(work, kind.waited(seconds, work, every) + _handled(cluster, every), sent / every)
    return _made(cluster, kind, load, kind.given(every, wire))


def _round_robin(cluster: Cluster, every: int) -> Prediction:
    """Replicas visit a center in turn, and each waits for the one before."""
    visits = sum(_visit(cluster, number) for number in range(len(cluster.nodes)))
    load = _Load(cluster.split, visits / every + _handled(cluster, every), 2 * cluster.size * cluster.largest / every)
    return _made(cluster, _ROUND_ROBIN, load, _ROUND_ROBIN.given(every))


def _center(cluster: Cluster, every: int, kind: _Kind) -> Prediction:
    """Replicas visit a center when they come to it; its node's link carries all visits from elsewhere."""
    away = cluster.world - len(cluster.nodes[0])
    visits = [_visit(cluster, number) / len(node) for number, node in enumerate(cluster.nodes) for _ in node]
    mean = cluster.apart([pace + visit / every for pace, visit in zip(cluster.paces, visits, strict=True)])
    mean += _handled(cluster, every)
    carried = away * cluster.size / cluster.between.bandwidth / every  # in each direction, while all take a step
    work = cluster.apart(cluster.paces)
    sent = 2 * away * cluster.size / every / max(len(cluster.nodes) - 1, 1)
    load = _Load(work, max(mean, carried) - work, sent)
    return _made(cluster, kind, load, kind.given(every))


def _visit(cluster: Cluster, node: int) -> float:
    """Seconds for all ranks of a node to visit a center on the first node, one after the other."""
    return len(cluster.nodes[node]) * (cluster.between if node else cluster.within).visit(cluster.size)


def _pairs(cluster: Cluster, every: int, kind: _Kind) -> Prediction:
    """Pairs of ranks swap parameters, drawn at random; ranks of a node share its link."""
    if len(cluster.nodes) == 1:
        swap, away, crossing = cluster.within.pair(cluster.size), 1.0, 0.0
    else:
        world, node = cluster.world, cluster.largest
        # How often a rank's peer is on another node. (Who is left out of an odd number waits for its next peer.)
        away = (world - node) / (world - 1)
        beside = (node - 1) * max(world - node - 1, 0) / max(world - 3, 1)  # then, how many others' peers beside it
        swap, crossing = cluster.between.pair(cluster.size * (1 + beside)), node * away
    if kind.lockstep:
        load = _Load(cluster.split, away * kind.waited(swap, cluster.split, every), cluster.size * crossing / every)
    else:  # nobody waits: replicas offer again once they have met, as often as the link allows
        work = cluster.apart(cluster.paces)
        interval = max(every, away * swap / work)
        load = _Load(work, 0.0, cluster.size * crossing / interval, interval > 2 * every)
    load = load._replace(exposed=load.exposed + _handled(cluster, every))
    return _made(cluster, kind, load, kind.given(every))


# -- parts -------------------------------------------------------------------------------------------------


def _between(cluster: Cluster, wire: str, nodes: bool) -> tuple[float, float, float]:
    """Seconds of work in a step; seconds of an all-reduce between replicas, and the bytes that leave a node in it."""
    size, count = cluster.size * WIRES[wire], len(cluster.nodes)
    if not nodes:
        return cluster.split, cluster.gradients(size), _ring(size, cluster.world, count)
    gradients = cluster.exposed(cluster.inside(), cluster.split)  # within a replica
    return cluster.split + gradients, cluster.across(size), _ring(size, count, count)


def _handled(cluster: Cluster, every: int) -> float:
    """Seconds of each step in which a rank packs, mixes and unpacks its parameters."""
    return cluster.size / cluster.handling / every


def _ring(size: float, members: int, nodes: int) -> float:
    """Bytes that leave each node in a ring all-reduce."""
    return 2 * (members - 1) / members * size if nodes > 1 else 0.0


def _made(
    cluster: Cluster, kind: _Kind | str, load: _Load, options: dict[str, Any] | None = None, exact: bool = False
) -> Prediction:
    step, options = load.work + load.exposed, options or {}
    speed, sent = cluster.samples / step, load.sent if len(cluster.nodes) > 1 else 0.0
    if isinstance(kind, str):
        return Prediction(kind, options, f'"{kind}"', step, load.exposed, sent, speed, speed / cluster.alone, exact)
    strategy = f"{kind.strategy}({', '.join(f'{name}={_python(value)}' for name, value in options.items())})"
    costs = step, load.exposed, sent, speed, speed / cluster.alone
    return Prediction(kind.name, options, strategy, *costs, exact, kind.lockstep, load.seldom)


def _python(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
