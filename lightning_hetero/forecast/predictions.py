"""Seconds, bytes and samples of a step under each strategy, by the arithmetic of section "A model of cost"."""

from typing import Any, NamedTuple

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


def predictions(cluster: Cluster, every: int = 16, wire: str = "fp32") -> list[Prediction]:
    """What every strategy makes of a cluster, the fastest first.

    Args:
        cluster: the ranks, links and model.
        every: steps between two exchanges of strategies that meet now and then.
        wire: number format between replicas, where a strategy has one.
    """
    found = [
        _ddp(cluster),
        _hetero_ddp(cluster),
        *(_blocking(cluster, every, wire, kind) for kind in _BLOCKING),
        _daso(cluster, wire),
        _overlap(cluster, every, wire),
        _streaming(cluster, every, wire),
        _round_robin(cluster, every),
        *(_center(cluster, every, kind) for kind in _CENTERS),
        *(_pairs(cluster, every, kind) for kind in _PAIRS),
    ]
    return sorted(found, key=lambda one: (-one.speed, not one.exact))


class _Kind(NamedTuple):
    """Strategies that differ in little.

    Attributes:
        name: the strategy string.
        strategy: its class.
        every: its option for the steps between two exchanges; ``None``: its default stays.
        options: that make it what it is here.
        wired: whether it has a number format for exchanges.
        nodes: whether a replica is a node.
        hides: whether an exchange passes in the background of the steps until the next one.
        lockstep: whether all ranks keep the same steps.
    """

    name: str
    strategy: str
    every: str | None = "tau"
    options: dict[str, Any] = {}
    wired: bool = False
    nodes: bool = False
    hides: bool = False
    lockstep: bool = True

    def given(self, every: int, wire: str = "fp32") -> dict[str, Any]:
        """The strategy's options."""
        own = {} if self.every is None else {self.every: every}
        if "fragments" in self.options:
            own["delay"] = max(every // 4, 1)
        return {**own, **self.options, **({"wire": wire} if self.wired and wire != "fp32" else {})}


class _Load(NamedTuple):
    """What a step holds: seconds of work, seconds in which ranks only communicate, and bytes that leave a node."""

    work: float
    exposed: float
    sent: float


_AUTO = {"moving_rate": "auto"}
_NODES = {"replica": "node"}
_BLOCKING = (
    _Kind("hetero_node", "NodeAverageStrategy", "every_n_steps", wired=True, nodes=True),
    _Kind("hetero_easgd", "EASGDStrategy", options=_AUTO, wired=True),
    _Kind("hetero_eamsgd", "EAMSGDStrategy", options=_AUTO, wired=True),
    _Kind("hetero_diloco", "DiLoCoStrategy", options=_NODES, wired=True, nodes=True),
)
_DASO = _Kind(
    "hetero_daso",
    "DASOStrategy",
    None,
    {"wait": "auto", "warmup": 0, "cooldown": 0},
    wired=True,
    nodes=True,
    hides=True,
)
_OVERLAP = _Kind("hetero_easgd_overlap", "EASGDOverlapStrategy", options=_AUTO, wired=True)
_STREAMING = _Kind(
    "hetero_diloco (streaming)",
    "DiLoCoStrategy",
    options={"fragments": 4, **_NODES},
    wired=True,
    nodes=True,
    hides=True,
)
_ROUND_ROBIN = _Kind("hetero_easgd_round_robin", "EASGDRoundRobinStrategy", options=_AUTO)
_CENTERS = (
    _Kind("hetero_easgd_async", "EASGDAsyncStrategy", options=_AUTO, lockstep=False),
    _Kind("hetero_measgd_async", "MEASGDAsyncStrategy", options=_AUTO, lockstep=False),
    _Kind("hetero_diloco_async", "DiLoCoAsyncStrategy", lockstep=False),
)
_PAIRS = (
    _Kind("hetero_gossip", "GossipStrategy", "every_n_steps", hides=True),
    _Kind("hetero_gossip_push_sum", "GossipPushSumStrategy", "every_n_steps"),
    _Kind("hetero_gossip_async", "GossipAsyncStrategy", "every_n_steps", hides=True, lockstep=False),
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


def _blocking(cluster: Cluster, every: int, wire: str, kind: _Kind) -> Prediction:
    """All wait for an all-reduce between replicas, once in a while."""
    work, seconds, sent = _between(cluster, wire, kind.nodes)
    load = _Load(work, seconds / every + _handled(cluster, every), sent / every)
    return _made(cluster, kind, load, kind.given(every, wire))


def _daso(cluster: Cluster, wire: str) -> Prediction:
    """In the background, one exchange after the other."""
    work, seconds, sent = _between(cluster, wire, _DASO.nodes)
    load = _Load(work, max(seconds / DASO_EVERY - work, 0.0) + _handled(cluster, DASO_EVERY), sent / DASO_EVERY)
    return _made(cluster, _DASO, load, _DASO.given(DASO_EVERY, wire))


def _overlap(cluster: Cluster, every: int, wire: str) -> Prediction:
    """In the background of one step."""
    work, seconds, sent = _between(cluster, wire, _OVERLAP.nodes)
    load = _Load(work, max(seconds - work, 0.0) / every + _handled(cluster, every), sent / every)
    return _made(cluster, _OVERLAP, load, _OVERLAP.given(every, wire))


def _streaming(cluster: Cluster, every: int, wire: str) -> Prediction:
    """Fragments in turn, in the background of the steps until the next one."""
    work, seconds, sent = _between(cluster, wire, _STREAMING.nodes)
    load = _Load(work, max(seconds / every - work, 0.0) + _handled(cluster, every), sent / every)
    return _made(cluster, _STREAMING, load, _STREAMING.given(every, wire))


def _round_robin(cluster: Cluster, every: int) -> Prediction:
    """Replicas visit a center in turn, and each waits for the one before."""
    visits = sum(_visit(cluster, number) for number in range(len(cluster.nodes)))
    load = _Load(cluster.split, visits / every + _handled(cluster, every), 2 * cluster.size * cluster.largest / every)
    return _made(cluster, _ROUND_ROBIN, load, _ROUND_ROBIN.given(every))


def _center(cluster: Cluster, every: int, kind: _Kind) -> Prediction:
    """Replicas visit a center when they come to it; its node's link carries all visits from elsewhere."""
    each, away = cluster.samples / cluster.world, cluster.world - len(cluster.nodes[0])
    steps = [
        cost.seconds(each) + _visit(cluster, number) / len(node) / every
        for number, node in enumerate(cluster.nodes)
        for cost in node
    ]
    mean = cluster.samples / sum(each / step for step in steps) + _handled(cluster, every)
    carried = away * cluster.size / cluster.between.bandwidth / every  # in each direction, while all take a step
    work = cluster.samples / cluster.alone
    sent = 2 * away * cluster.size / every / max(len(cluster.nodes) - 1, 1)
    load = _Load(work, max(mean, carried) - work, sent)
    return _made(cluster, kind, load, kind.given(every))


def _visit(cluster: Cluster, node: int) -> float:
    """Seconds for all ranks of a node to visit a center on the first node, one after the other."""
    return len(cluster.nodes[node]) * (cluster.between if node else cluster.within).visit(cluster.size)


def _pairs(cluster: Cluster, every: int, kind: _Kind) -> Prediction:
    """Pairs of ranks swap parameters; ranks of a node share its link."""
    alone = len(cluster.nodes) == 1
    swap = cluster.within.pair(cluster.size) if alone else cluster.between.pair(cluster.size * cluster.largest)
    work = cluster.split if kind.lockstep else cluster.samples / cluster.alone
    exposed = max(swap / every - (work if kind.hides else 0.0), 0.0)
    load = _Load(work, exposed + _handled(cluster, every), cluster.size * cluster.largest / every)
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
    return Prediction(kind.name, options, strategy, *costs, exact, kind.lockstep)


def _python(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
