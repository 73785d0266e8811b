"""``lightning-hetero plan``: predict, for machines that one has measured, or does not have."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_hetero.errors import ConfigurationError
from lightning_hetero.forecast.changes import changes
from lightning_hetero.forecast.cluster import Cluster, Way
from lightning_hetero.forecast.predictions import Prediction, predictions
from lightning_hetero.forecast.scaling import draw, efficiencies
from lightning_hetero.forecast.sources import Wish, few_enough, of_file_but, of_wish
from lightning_hetero.workload.shares import too_slow

_BAR = 6  # characters of a full bar
_LEGEND = (
    "exposed: part of a step in which ranks only communicate. MB sent: out of a node, per step. efficiency: part of "
    "the samples/s that the ranks would reach together if each trained alone."
)
_SELDOM = (
    "seldom: this link lets it exchange less than half as often as it is to, and it waits for nobody, so that its "
    "replicas drift apart. It stands last, however fast, and is no advice."
)


def run(measured: Path | None, given: Mapping[str, Any], every: int, wire: str, most: int, out: Path | None) -> None:
    """What the command does.

    Args:
        measured: a file of ``doctor --save``. Default: the cluster is described.
        given: fields of :class:`~lightning_hetero.forecast.sources.Wish` that the user has given.
        every: as for :func:`plan`.
        wire: as for :func:`plan`.
        most: as for :func:`plan`; left out if no link between nodes is known.
        out: as for :func:`plan`.

    Raises:
        ConfigurationError: as for :func:`plan`, or there is no such cluster.
    """
    cluster, linked = (of_wish(Wish(**given)), True) if measured is None else of_file_but(measured, given)
    plan(cluster, every, wire, most if linked else None, out)


def plan(
    cluster: Cluster, every: int, wire: str, most: int | None, out: Path | None, console: Console | None = None
) -> None:
    """Print what each strategy makes of a cluster, the best one and why, and what would help.

    Args:
        cluster: to plan for.
        every: steps between two exchanges of strategies that meet now and then.
        wire: number format between replicas.
        most: largest number of nodes of the weak scaling; ``None``: it is left out, since no link between nodes is
            known.
        out: where to draw that as a PNG. Default: nowhere.
        console: to print to.

    Raises:
        ConfigurationError: the picture cannot be drawn, or not be written there, or there are too many ranks.
    """
    if out is not None:
        _can_draw(out, most)
    few_enough(max(cluster.world, (most or 0) * cluster.largest))
    console = console or Console()
    found = predictions(cluster, every, wire)
    link = f"; {_link(cluster.between)}" if len(cluster.nodes) > 1 else ""
    console.print(
        f"{len(cluster.nodes)} nodes, {cluster.world} ranks; {cluster.size / 4e6:.4g} million parameters; "
        f"{cluster.samples} samples a step, {_ms(cluster.even)} if split evenly, {_ms(cluster.split)} by speed{link}"
    )
    console.print(_table(found))
    console.print(_LEGEND)
    if any(one.seldom for one in found):
        console.print(_SELDOM)
    if whole := [one.name for one in found if not one.exact and one.options.get("wire", "fp32") != wire]:
        console.print(f'In fp32, since they have no wire="{wire}": {", ".join(whole)}.')
    console.print()
    for line in why(cluster, found):
        console.print(line)
    if not cluster.given and (slow := too_slow(cluster.samples, cluster.ranks)):
        console.print(str(slow))
    console.print("\nWhat would help:")
    for change in changes(cluster, every, wire):
        gain = f"{change.gain:.2f} times the samples/s" if change.gain > 1.005 else "nothing gained"
        console.print(f"  {change.what}: {gain}, with {change.best.strategy}")
    if most is None:
        console.print(
            "\nWeak scaling is left out: no link between nodes was measured. Give its rate, such as --link 1gbit."
        )
    else:
        names = list(dict.fromkeys(["ddp", "hetero_ddp", *(one.name for one in found)]))[:4]
        _scaling(console, cluster, efficiencies(cluster, names, most, every, wire), most, out)
    console.print("Predicted, not measured: docs/planning.md says what the arithmetic leaves out.")


def _can_draw(out: Path, most: int | None) -> None:
    if out.suffix.lower() != ".png" or not out.absolute().parent.is_dir():
        raise ConfigurationError(f"--out {out}: give the name of a PNG, such as scaling.png, in a folder that exists.")
    if most is None:
        raise ConfigurationError(
            f"--out {out}: weak scaling cannot be drawn, since no link between nodes was measured. Give its rate, such "
            "as --link 1gbit."
        )
    if find_spec("matplotlib") is None:
        raise ConfigurationError(
            f"--out {out}: drawing needs matplotlib: python -m pip install 'lightning-hetero[plots]'"
        )


def _table(found: Sequence[Prediction]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("strategy", "step", "exposed", "MB sent", "samples/s", "efficiency", ""):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("strategy", "") else "right")
    for one in found:
        note = "exact" if one.exact else "seldom" if one.seldom else "" if one.repeatable else "async"
        share, sent = f"{one.exposed / one.step:.0%}", f"{one.sent / 1e6:.3g}"
        speed = f"{one.speed:,.0f}" if one.speed >= 100 else f"{one.speed:.3g}"
        table.add_row(one.name, _ms(one.step), share, sent, speed, f"{one.efficiency:.0%}", note)
    return table


def _scaling(
    console: Console, cluster: Cluster, curves: dict[str, dict[int, float]], most: int, out: Path | None
) -> None:
    console.print(f"\nWeak scaling: efficiency by the number of ranks, up to {most} nodes, {_link(cluster.between)}")
    grid = Table("ranks", *curves, box=None, pad_edge=False)
    for ranks in next(iter(curves.values())):
        grid.add_row(str(ranks), *(f"{curve[ranks]:4.0%} {_bar(curve[ranks])}" for curve in curves.values()))
    console.print(grid)
    if out is not None:
        draw(curves, out)
        console.print(f"drawn: {out}")


def why(cluster: Cluster, found: Sequence[Prediction]) -> list[str]:
    """The best strategy, and the arithmetic behind it, in two or three lines.

    Args:
        cluster: the ranks, links and model.
        found: predictions for it, the fastest first.
    """
    best, plain = found[0], next(one for one in found if one.name == "ddp")
    exact = next(one for one in found if one.exact)
    gain = best.speed / plain.speed
    than = f"{gain:.2f} times the samples/s of ddp" if gain > 1.005 else "and about as fast is ddp"
    lines = [
        f"Best: {best.strategy}, {'and no other is faster' if best is plain else than}. An all-reduce of the gradients "
        f"over all ranks takes {_ms(cluster.gradients())}, that is {cluster.gradients() / cluster.split:.2f} steps; "
        f"hidden behind the backward pass are at most {cluster.hidden:.0%} of a step."
    ]
    if exact is not best:
        lines.append(
            f"Best that is exact: {exact.strategy}, {exact.speed / best.speed:.0%} of that speed. The others train "
            "replicas apart, and may need more samples to the same loss."
        )
    return lines


def _link(way: Way) -> str:
    return f"{way.bandwidth / 1e6:.4g} MB/s and {_ms(way.latency)} between nodes"


def _bar(part: float) -> str:
    return "█" * round(_BAR * part)


def _ms(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
