"""``lightning-hetero plan``: predict, for machines that one has measured, or does not have."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from lightning_hetero.errors import ConfigurationError
from lightning_hetero.forecast.changes import changes
from lightning_hetero.forecast.cluster import Cluster, Way
from lightning_hetero.forecast.predictions import Prediction, predictions
from lightning_hetero.forecast.scaling import draw, efficiencies
from lightning_hetero.workload.shares import Cost

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
MOST_RANKS = 100_000
_BAR = 6  # characters of a full bar


class Wish(NamedTuple):
    """What a user gives instead of measurements.

    Attributes:
        nodes: their number.
        ranks: of each node.
        params: parameters of the model.
        step: seconds of a step of a rank of speed 1.
        speeds: of the nodes' ranks, repeated: relative to each other.
        batch: samples of each rank in a step.
        fixed: part of a step that does not depend on the samples.
        link: bytes per second out of a node.
        latency: seconds, one way.
        inside: bytes per second between the ranks of a node.
    """

    nodes: int
    ranks: int
    params: float
    step: float
    speeds: Sequence[float] = (1.0,)
    batch: int = 32
    fixed: float = 0.1
    link: float = 125e6
    latency: float = 2e-4
    inside: float = 5e9


def of_wish(wish: Wish) -> Cluster:
    """The cluster that a user describes.

    Args:
        wish: the description.

    Raises:
        ConfigurationError: a number that no cluster has.
    """
    for name, value in wish._asdict().items():
        values = value if name == "speeds" else [value]
        least = 0.0 if name in ("fixed", "latency") else math.ulp(0.0)
        if not all(math.isfinite(number) and number >= least for number in values):
            raise ConfigurationError(f"--{name}: {value} must be finite and {'at least' if least == 0 else 'above'} 0.")
    if wish.fixed >= 1:
        raise ConfigurationError(f"--fixed={wish.fixed} is the part of a step that no sample needs: below 1.")
    fixed, each = wish.fixed * wish.step, (1 - wish.fixed) * wish.step / wish.batch
    costs = [Cost(fixed / speed, each / speed) for speed in wish.speeds]
    world = wish.nodes * wish.ranks
    ranks = [costs[i % len(costs)] for i in range(world)]
    nodes = tuple(tuple(ranks[i : i + wish.ranks]) for i in range(0, world, wish.ranks))
    ways = Way(2e-5, wish.inside), Way(wish.latency, wish.link)
    return Cluster(nodes, wish.batch * world, 4 * wish.params, *ways)


def of_file(path: Path) -> Cluster:
    """The cluster that ``lightning-hetero doctor --save`` has measured.

    Args:
        path: of its JSON file.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        nodes = tuple(tuple(Cost(*cost) for cost in node) for node in found["nodes"])
        samples = found["samples"] * sum(map(len, nodes))
        return Cluster(nodes, samples, found["size"], Way(*found["within"]), Way(*found["between"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path} is no file that the doctor has saved with its option --save ({type(error).__name__}: {error})."
        ) from error


def bytes_per_second(text: str) -> float:
    """A rate such as ``1gbit``, ``200mbit`` or ``125MB``, in bytes per second.

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(r"([\d.]+) ?([kmg]?)(bit|b|byte|bytes)(?:/s)?", text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is no rate: write 1gbit, 200mbit or 125MB")
    number, unit, what = found.groups()
    if number.count(".") > 1:
        raise ValueError(f"{text!r} is no rate: write 1gbit, 200mbit or 125MB")
    return float(number) * _UNITS[unit] / (8 if what == "bit" else 1)


def plan(cluster: Cluster, every: int, wire: str, most: int, out: Path | None, console: Console | None = None) -> None:
    """Print what each strategy makes of a cluster, the best one and why, and what would help.

    Args:
        cluster: to plan for.
        every: steps between two exchanges of strategies that meet now and then.
        wire: number format between replicas.
        most: largest number of nodes of the weak scaling.
        out: where to draw that as a PNG. Default: nowhere.
        console: to print to.

    Raises:
        ConfigurationError: the picture cannot be written there, or there are too many ranks.
    """
    if out is not None and (out.suffix.lower() != ".png" or not out.absolute().parent.is_dir()):
        raise ConfigurationError(f"--out {out}: give the name of a PNG, such as scaling.png, in a folder that exists.")
    if (ranks := max(cluster.world, most * cluster.largest)) > MOST_RANKS:
        raise ConfigurationError(f"{ranks} ranks are more than {MOST_RANKS}: give fewer --nodes, or a smaller --most.")
    console = console or Console()
    found = predictions(cluster, every, wire)
    console.print(
        f"{len(cluster.nodes)} nodes, {cluster.world} ranks; {cluster.size / 4e6:.4g} million parameters; "
        f"{cluster.samples} samples a step, {_ms(cluster.even)} if split evenly, {_ms(cluster.split)} by speed; "
        f"{cluster.between.bandwidth / 1e6:.4g} MB/s and {_ms(cluster.between.latency)} between nodes"
    )
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("strategy", "step", "exposed", "MB sent", "samples/s", "efficiency", ""):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("strategy", "") else "right")
    for one in found:
        note = "exact" if one.exact else "" if one.repeatable else "async"
        share, sent = f"{one.exposed / one.step:.0%}", f"{one.sent / 1e6:.3g}"
        speed = f"{one.speed:,.0f}" if one.speed >= 100 else f"{one.speed:.3g}"
        table.add_row(one.name, _ms(one.step), share, sent, speed, f"{one.efficiency:.0%}", note)
    console.print(table)
    console.print("exposed: part of a step in which ranks only communicate. MB sent: out of a node, per step.\n")
    for line in why(cluster, found):
        console.print(line)
    console.print("\nWhat would help:")
    for change in changes(cluster, every, wire):
        gain = f"{change.gain:.2f} times the samples/s" if change.gain > 1.005 else "nothing gained"
        console.print(f"  {change.what}: {gain}, with {change.best.strategy}")
    names = list(dict.fromkeys(["ddp", "hetero_ddp", *(one.name for one in found)]))[:4]
    curves = efficiencies(cluster, names, most, every, wire)
    console.print(f"\nWeak scaling: efficiency by the number of ranks, up to {most} nodes")
    grid = Table("ranks", *curves, box=None, pad_edge=False)
    for ranks in next(iter(curves.values())):
        grid.add_row(str(ranks), *(f"{curve[ranks]:4.0%} {_bar(curve[ranks])}" for curve in curves.values()))
    console.print(grid)
    if out is not None:
        draw(curves, out)
        console.print(f"drawn: {out}")
    console.print("Predicted, not measured: docs/planning.md says what the arithmetic leaves out.")


def why(cluster: Cluster, found: Sequence[Prediction]) -> list[str]:
    """The best strategy, and the arithmetic behind it, in two or three lines.

    Args:
        cluster: the ranks, links and model.
        found: predictions for it, the fastest first.
    """
    best, plain = found[0], next(one for one in found if one.name == "ddp")
    exact = next(one for one in found if one.exact)
    lines = [
        f"Best: {best.strategy}, {best.speed / plain.speed:.2f} times the samples/s of ddp. An all-reduce of the "
        f"gradients over all ranks takes {_ms(cluster.gradients())}, that is {cluster.gradients() / cluster.split:.2f} "
        "steps; hidden behind the backward pass are at most "
        f"{cluster.hidden:.0%} of a step."
    ]
    if exact is not best:
        lines.append(
            f"Best that is exact: {exact.strategy}, {exact.speed / best.speed:.0%} of that speed. The others train "
            "replicas apart, and may need more samples to the same loss."
        )
    return lines


def _bar(part: float) -> str:
    return "█" * round(_BAR * part)


def _ms(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
