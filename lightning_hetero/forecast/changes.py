"""What would help most: the best strategy on a cluster that differs in one thing."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from lightning_hetero.forecast.cluster import Cluster
from lightning_hetero.forecast.predictions import WIRES, Prediction, predictions
from lightning_hetero.forecast.rhythm import PRICE

#: As many steps as ``tau="auto"`` lets lie between two exchanges: replicas that meet more rarely hardly train together.
RAREST = 500


class Change(NamedTuple):
    """One thing that differs, and what that brings.

    Attributes:
        what: it is, in words.
        best: the fastest strategy then.
        gain: its samples per second over those of the fastest one now; 1 is no gain.
    """

    what: str
    best: Prediction
    gain: float


def changes(cluster: Cluster, every: int = 16, wire: str = "fp32") -> list[Change]:
    """What could be changed, the most helpful first.

    Args:
        cluster: as it is.
        every: steps between two exchanges of strategies that meet now and then.
        wire: number format between replicas.
    """
    now = predictions(cluster, every, wire)[0].speed
    slowest = max(cost.seconds(cluster.samples / cluster.world) for cost in cluster.ranks)
    several = len(cluster.nodes) > 1
    exchange = (cluster.across() if several else cluster.gradients()) * WIRES[wire]
    rare = max(min(math.ceil(exchange / PRICE / cluster.split), RAREST), every)
    part = exchange / rare / cluster.split
    options: list[tuple[str, Callable[[], tuple[Cluster, int, str]]]] = [
        ("twice the samples per step", lambda: (replace(cluster, samples=2 * cluster.samples), every, wire)),
        ("the slowest ranks as fast as the fastest", lambda: (_alike(cluster, slowest), every, wire)),
    ]
    if rare > every:
        options.append(
            (f"exchanges every {rare} steps, each as long as {part:.0%} of them", lambda: (cluster, rare, wire))
        )
    if several:
        options.append(("a link ten times as fast", lambda: (_faster(cluster, 10), every, wire)))
    if wire == "fp32":
        options.append(('wire="int8"', lambda: (cluster, every, "int8")))
    found = []
    for what, change in options:
        other, steps, format_ = change()
        best = predictions(other, steps, format_)[0]
        found.append(Change(what, best, best.speed / now))
    return sorted(found, key=lambda one: -one.gain)


def _faster(cluster: Cluster, factor: float) -> Cluster:
    return replace(cluster, between=cluster.between._replace(bandwidth=factor * cluster.between.bandwidth))


def _alike(cluster: Cluster, slowest: float) -> Cluster:
    each = cluster.samples / cluster.world
    fastest = min(cluster.ranks, key=lambda cost: cost.seconds(each))
    nodes = tuple(tuple(fastest if cost.seconds(each) == slowest else cost for cost in node) for node in cluster.nodes)
    return replace(cluster, nodes=nodes)
