"""Seconds, bytes and samples of a step under each strategy, by the arithmetic of section "A model of cost"."""

from typing import NamedTuple

from lightning_hetero.forecast.cluster import Cluster

#: Bytes on each wire for one byte of fp32, scales included.
WIRES = {"fp32": 1.0, "bf16": 0.5, "int8": 0.254, "int4": 0.129}


class Prediction(NamedTuple):
    """What a strategy makes of a cluster.

    Attributes:
        strategy: as Python, for ``Trainer(strategy=...)``.
        name: the strategy string.
        step: seconds of a step, in the mean.
        exposed: of these, seconds in which a rank only communicates.
        sent: bytes that leave a node in a step, in the mean.
        speed: samples per second over all ranks.
        efficiency: that speed over the sum of what the ranks reach alone.
        exact: whether the weights are those of one process.
        repeatable: whether two runs give the same weights.
    """

    strategy: str
    name: str
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
        strategy: as Python, with ``{every}`` and ``{wire}`` to be filled in.
        nodes: whether a replica is a node.
        hides: whether an exchange passes in the background of the steps until the next one.
        lockstep: whether all ranks keep the same steps.
    """

    name: str
    strategy: str
    nodes: bool = False
    hides: bool = False
    lockstep: bool = True

    def given(self, every: int, wire: str = "fp32") -> str:
        """The strategy with its options."""
        other = "" if wire == "fp32" else f', wire="{wire}"'
        return self.strategy.format(every=every, delay=max(every // 4, 1), wire=other)


class _Load(NamedTuple):
    """What a step holds: seconds of work, seconds in which ranks only communicate, and bytes that leave a node."""

    work: float
    exposed: float
    sent: float


_BLOCKING = (
    _Kind("hetero_node", "NodeAverageStrategy(every_n_steps={every}{wire})", nodes=True),
    _Kind("hetero_easgd", 'EASGDStrategy(tau={every}, moving_rate="auto"{wire})'),
    _Kind("hetero_eamsgd", 'EAMSGDStrategy(tau={every}, moving_rate="auto"{wire})'),
    _Kind("hetero_diloco", 'DiLoCoStrategy(tau={every}{wire}, replica="node")', nodes=True),
)
_DASO = _Kind("hetero_daso", 'DASOStrategy(wait="auto"{wire})', nodes=True, hides=True)
_OVERLAP = _Kind("hetero_easgd_overlap", 'EASGDOverlapStrategy(tau={every}, moving_rate="auto"{wire})')
_STREAMING = _Kind(
    "hetero_diloco (streaming)",
    'DiLoCoStrategy(tau={every}, fragments=4, delay={delay}{wire}, replica="node")',
    nodes=True,
    hides=True,
)
_ROUND_ROBIN = _Kind("hetero_easgd_round_robin", 'EASGDRoundRobinStrategy(tau={every}, moving_rate="auto")')
_CENTERS = (
    _Kind("hetero_easgd_async", 'EASGDAsyncStrategy(tau={every}, moving_rate="auto")', lockstep=False),
    _Kind("hetero_measgd_async", 'MEASGDAsyncStrategy(tau={every}, moving_rate="auto")', lockstep=False),
    _Kind("hetero_diloco_async", "DiLoCoAsyncStrategy(tau={every})", lockstep=False),
)
_PAIRS = (
    _Kind("hetero_gossip", "GossipStrategy(every_n_steps={every})", hides=True),
    _Kind("hetero_gossip_push_sum", "GossipPushSumStrategy(every_n_steps={every})"),
    _Kind("hetero_gossip_async", "GossipAsyncStrategy(every_n_steps={every})", hides=True, lockstep=False),
    _Kind("hetero_noloco", "NoLoCoStrategy(tau={every})"),
)
DASO_EVERY = 4  # steps between two exchanges, by default


def _ddp(cluster: Cluster) -> Prediction:
    return _made(cluster, '"ddp"', "ddp", _gradients(cluster, cluster.even), exact=True)


def _hetero_ddp(cluster: Cluster) -> Prediction:
    return _made(cluster, '"hetero_ddp"', "hetero_ddp", _gradients(cluster, cluster.split), exact=True)


def _gradients(cluster: Cluster, work: float) -> _Load:
    """One all-reduce of the gradients over all ranks in a step, behind a part of it."""
    exposed = max(cluster.gradients() - cluster.hidden * work, 0.0)
    return _Load(work, exposed, _ring(cluster.size, cluster.world, len(cluster.nodes)))


def _blocking(cluster: Cluster, every: int, wire: str, kind: _Kind) -> Prediction:
    """All wait for an all-reduce between replicas, once in a while."""
    work, seconds, sent = _between(cluster, wire, kind.nodes)
    return _made(cluster, kind.given(every, wire), kind.name, _Load(work, seconds / every, sent / every))


def _daso(cluster: Cluster, wire: str) -> Prediction:
    """In the background, one exchange after the other."""
    work, seconds, sent = _between(cluster, wire, _DASO.nodes)
    load = _Load(work, max(seconds / DASO_EVERY - work, 0.0), sent / DASO_EVERY)
    return _made(cluster, _DASO.given(DASO_EVERY, wire), _DASO.name, load)


def _overlap(cluster: Cluster, every: int, wire: str) -> Prediction:
    """In the background of one step."""
    work, seconds, sent = _between(cluster, wire, _OVERLAP.nodes)
    load = _Load(work, max(seconds - work, 0.0) / every, sent / every)
    return _made(cluster, _OVERLAP.given(every, wire), _OVERLAP.name, load)


def _streaming(cluster: Cluster, every: int, wire: str) -> Prediction:
    """Fragments in turn, in the background of the steps until the next one."""
    work, seconds, sent = _between(cluster, wire, _STREAMING.nodes)
    load = _Load(work, max(seconds / every - work, 0.0), sent / every)
    return _made(cluster, _STREAMING.given(every, wire), _STREAMING.name, load)


def _round_robin(cluster: Cluster, every: int) -> Prediction:
    """Replicas visit a center in turn, and each waits for the one before."""
    visits = sum(_visit(cluster, number) for number in range(len(cluster.nodes)))
    load = _Load(cluster.split, visits / every, 2 * cluster.size * cluster.largest / every)
    return _made(cluster, _ROUND_ROBIN.given(every), _ROUND_ROBIN.name, load)


def _center(cluster: Cluster, every: int, kind: _Kind) -> Prediction:
    """Replicas visit a center when they come to it; its node's link carries all visits from elsewhere."""
    each, away = cluster.samples / cluster.world, cluster.world - len(cluster.nodes[0])
    steps = [
        cost.seconds(each) + _visit(cluster, number) / len(node) / every
        for number, node in enumerate(cluster.nodes)
        for cost in node
    ]
    mean = cluster.samples / sum(each / step for step in steps)
    carried = away * cluster.size / cluster.between.bandwidth / every  # in each direction, while all take a step
    work = cluster.samples / cluster.alone
    sent = 2 * away * cluster.size / every / max(len(cluster.nodes) - 1, 1)
    load = _Load(work, max(mean, carried) - work, sent)
    return _made(cluster, kind.given(every), kind.name, load, repeatable=kind.lockstep)


def _visit(cluster: Cluster, node: int) -> float:
    """Seconds for all ranks of a node to visit a center on the first node, one after the other."""
    return len(cluster.nodes[node]) * (cluster.between if node else cluster.within).visit(cluster.size)


def _pairs(cluster: Cluster, every: int, kind: _Kind) -> Prediction:
    """Pairs of ranks swap parameters; ranks of a node share its link."""
    alone = len(cluster.nodes) == 1
    swap = cluster.within.pair(cluster.size) if alone else cluster.between.pair(cluster.size * cluster.largest)
    work = cluster.split if kind.lockstep else cluster.samples / cluster.alone
    exposed = max(swap / every - (work if kind.hides else 0.0), 0.0)
    load = _Load(work, exposed, cluster.size * cluster.largest / every)
    return _made(cluster, kind.given(every), kind.name, load, repeatable=kind.lockstep)


# -- parts -------------------------------------------------------------------------------------------------


def _between(cluster: Cluster, wire: str, nodes: bool) -> tuple[float, float, float]:
    """Seconds of work in a step; seconds of an all-reduce between replicas, and the bytes that leave a node in it."""
    size, count = cluster.size * WIRES[wire], len(cluster.nodes)
    if not nodes:
        return cluster.split, cluster.gradients(size), _ring(size, cluster.world, count)
    gradients = max(cluster.inside() - cluster.hidden * cluster.split, 0.0)  # within a replica
    return cluster.split + gradients, cluster.across(size), _ring(size, count, count)


def _ring(size: float, members: int, nodes: int) -> float:
    """Bytes that leave each node in a ring all-reduce."""
    return 2 * (members - 1) / members * size if nodes > 1 else 0.0


def _made(cluster: Cluster, strategy: str, name: str, load: _Load, **facts: bool) -> Prediction:
    step = load.work + load.exposed
    speed, sent = cluster.samples / step, load.sent if len(cluster.nodes) > 1 else 0.0
    return Prediction(strategy, name, step, load.exposed, sent, speed, speed / cluster.alone, **facts)
