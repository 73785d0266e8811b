"""Weak scaling: what strategies make of more and more nodes, with as many samples for each rank."""

from collections.abc import Sequence
from pathlib import Path

from lightning_hetero.forecast.cluster import Cluster
from lightning_hetero.forecast.predictions import predictions


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
