"""Choice of a strategy, when the steps of ``hetero_ddp`` have been measured on the cluster."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from lightning_hetero.algorithms.schedules import MAX_WAITING
from lightning_hetero.planning.cluster import Cluster
from lightning_hetero.planning.predictions import WIRES, Prediction, predictions

_SHORTEST = 1e-9  # seconds of a step, where a device has measured none

#: What to choose from; of those that are about equally fast the first. Repeatable ones come before asynchronous ones.
CANDIDATES = (
    "hetero_node",
    "hetero_daso",
    "hetero_easgd_overlap",
    "hetero_gossip",
    "hetero_easgd_async",
    "hetero_gossip_async",
)
#: Predictions nearer than this, as a fraction, are about equal.
EQUAL = 0.03


class AutoLimits(NamedTuple):
    """Limits that a user sets to the choice.

    Attributes:
        gain: how much faster another strategy must be, as a fraction.
        exact: whether the weights must be those of one process.
        deterministic: whether two runs must give the same weights.
        every: steps between two exchanges of strategies that meet now and then.
        wire: number format between replicas.
    """

    gain: float = 0.2
    exact: bool = False
    deterministic: bool = False
    every: int = 16
    wire: str = "fp32"


class Choice(NamedTuple):
    """Choice of a strategy.

    Attributes:
        prediction: of the strategy; ``None``: stay with ``hetero_ddp``.
        why: the arithmetic, in a line.
    """

    prediction: Prediction | None
    why: str


def choose(cluster: Cluster, measured: float, wish: AutoLimits) -> Choice:
    """The strategy that gains most over the steps that have been measured, if one gains enough.

    A gain counts over the measured steps, as far as work and an exchange that hides behind nothing can explain how long
    they take: what the model does not know of is no reason to change.

    Args:
        cluster: the ranks, links and model, as measured.
        measured: seconds of a step under ``hetero_ddp``.
        wish: what the user allows.

    Example: four ranks with 0.1 s of work in a step, and a link that takes 0.8 s for the gradients::

        >>> from lightning_hetero.planning.strategy_choice import AutoLimits, choose
        >>> from lightning_hetero.planning.cluster import Cluster, LinkModel
        >>> from lightning_hetero.batching.shares import Cost
        >>> nodes = ((Cost(0.01, 0.09 / 16),) * 2,) * 2
        >>> cluster = Cluster(nodes, 64, 10e6, LinkModel(2e-5, 5e9), LinkModel(2e-4, 12.5e6))
        >>> choose(cluster, 1.2, AutoLimits()).prediction.name
        'hetero_daso'
        >>> choose(cluster, 1.2, AutoLimits(exact=True)).prediction is None
        True
    """
    found = {one.name: one for one in predictions(cluster, wish.every, wish.wire)}
    explained = cluster.split + cluster.gradients()  # by an exchange that hides behind nothing
    now = cluster.samples / max(min(measured, explained), _SHORTEST)
    step = (
        f"A step takes {_ms(measured)}, of which {_ms(cluster.split)} is work; an all-reduce of the gradients over all "
        f"ranks takes {_ms(cluster.gradients())}"
    )
    if wish.exact:
        return Choice(None, f"{step}. Nothing else is exact.")
    measured_waits = [name for name, one in found.items() if one.options.get("wait") == "auto"]  # never twice alike
    repeatable = [name for name in CANDIDATES if found[name].repeatable and name not in measured_waits]
    allowed = [found[name] for name in (repeatable if wish.deterministic else CANDIDATES)]
    allowed = [one for one in allowed if not one.seldom] or allowed
    most = max(one.speed for one in allowed)
    best = next(one for one in allowed if one.speed >= (1 - EQUAL) * most)
    then = (
        f"{step}. {best.strategy} would take {_ms(best.step)}, {best.speed / now:.2f} times the samples/s: "
        f"{'more' if best.speed > (1 + wish.gain) * now else 'not more'} than 1 + gain = {1 + wish.gain:g}."
    )
    return Choice(best if best.speed > (1 + wish.gain) * now else None, then)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


#: As many steps as ``tau="auto"`` lets lie between two exchanges: replicas that meet more rarely hardly train together.
RAREST = 500


class PossibleChange(NamedTuple):
    """Change of one thing of the cluster, and its gain.

    Attributes:
        what: it is, in words.
        best: the fastest strategy then.
        gain: its samples per second over those of the fastest one now; 1 is no gain.
    """

    what: str
    best: Prediction
    gain: float


def changes(cluster: Cluster, every: int = 16, wire: str = "fp32") -> list[PossibleChange]:
    """Possible changes, the most helpful first.

    Args:
        cluster: as it is.
        every: steps between two exchanges of strategies that meet now and then.
        wire: number format between replicas.
    """
    now = predictions(cluster, every, wire)[0].speed
    slowest = max(cost.seconds(cluster.samples / cluster.world) for cost in cluster.ranks)
    several = len(cluster.nodes) > 1
    exchange = (cluster.across() if several else cluster.gradients()) * WIRES[wire]
    rare = max(min(math.ceil(exchange / MAX_WAITING / cluster.split), RAREST), every)
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
        found.append(PossibleChange(what, best, best.speed / now))
    return sorted(found, key=lambda one: -one.gain)


def _faster(cluster: Cluster, factor: float) -> Cluster:
    return replace(cluster, between=cluster.between._replace(bandwidth=factor * cluster.between.bandwidth))


def _alike(cluster: Cluster, slowest: float) -> Cluster:
    each = cluster.samples / cluster.world
    fastest = min(cluster.ranks, key=lambda cost: cost.seconds(each))
    nodes = tuple(tuple(fastest if cost.seconds(each) == slowest else cost for cost in node) for node in cluster.nodes)
    return replace(cluster, nodes=nodes)


def efficiencies(
    cluster: Cluster, names: Sequence[str], most: int, every: int, wire: str
) -> dict[str, dict[int, float]]:
    """Of each strategy, its efficiency by the number of ranks: 1, 2, 4, ... nodes.

    Args:
        cluster: with the kinds of nodes, which repeat.
        names: strategy strings.
        most: largest number of nodes.
        every: steps between two exchanges of strategies that meet now and then.
        wire: number format between replicas.
    """
    found: dict[str, dict[int, float]] = {name: {} for name in names}
    counts = [2**i for i in range(most.bit_length()) if 2**i <= most]
    for count in sorted({*counts, most}):
        grown = cluster.with_nodes(count)
        for one in predictions(grown, every, wire):
            if one.name in found:
                found[one.name][grown.world] = one.efficiency
    return found


def draw(curves: dict[str, dict[int, float]], path: Path) -> None:
    """Draw efficiencies over ranks, as a PNG.

    Args:
        curves: of :func:`efficiencies`.
        path: of the file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(list(curve), [100 * value for value in curve.values()], marker="o", markersize=3, label=name)
    axes.set_xscale("log", base=2)
    ticks = list(next(iter(curves.values())))
    axes.set_xticks(ticks, [str(ranks) for ranks in ticks])
    axes.minorticks_off()
    axes.set_xlabel("ranks")
    axes.set_ylabel("% of what the ranks reach alone")
    axes.set_ylim(0, 105)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
    axes.set_title("Weak scaling, predicted")
    figure.savefig(path, dpi=120)
