"""``lightning-hetero plan``: predict, for machines that one has measured, or does not have."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from lightning_hetero.batching.shares import Cost, too_slow
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.planning.cluster import HANDLING, MEMORY, Cluster, LinkModel, duration
from lightning_hetero.planning.predictions import predictions
from lightning_hetero.planning.strategy_choice import Setting, changes, search

MOST_RANKS = 100_000
#: Of the files of ``lightning-hetero doctor --save``; the first ones had no number.
FORMAT = 1
#: Options that a user may give for a measured cluster; the rest of :class:`ClusterOptions` describes its ranks.
OVER_A_FILE = ("nodes", "params", "batch", "link", "latency", "inside", "handling")


class ClusterOptions(NamedTuple):
    """Options that describe a cluster, instead of measurements.

    Attributes:
        nodes: their number.
        ranks: of the nodes, one after another and repeated.
        params: parameters of the model.
        step: seconds of a step of a rank of speed 1.
        speeds: of the nodes' ranks, repeated: relative to each other.
        batch: samples of each rank in a step.
        fixed: part of a step that does not depend on the samples.
        link: bytes per second out of a node.
        latency: seconds, one way.
        inside: bytes per second between the ranks of a node.
        handling: bytes of parameters per second that a rank packs, mixes and unpacks around an exchange.
    """

    nodes: int = 2
    ranks: Sequence[int] = (4,)
    params: float = 25e6
    step: float = 0.3
    speeds: Sequence[float] = (1.0,)
    batch: int = 32
    fixed: float = 0.1
    link: float = 125e6
    latency: float = 2e-4
    inside: float = 5e9
    handling: float = HANDLING


def cluster_from_options(wish: ClusterOptions) -> Cluster:
    """The cluster that a user describes.

    Args:
        wish: the description.

    Raises:
        ConfigurationError: a number that no cluster has.
    """
    _check(wish._asdict())
    few_enough(wish.nodes * max(wish.ranks))
    if len(wish.ranks) > wish.nodes:
        raise ConfigurationError(
            f"--ranks: numbers of {len(wish.ranks)} nodes for --nodes {wish.nodes}: give at most one each."
        )
    sizes = [wish.ranks[i % len(wish.ranks)] for i in range(wish.nodes)]
    world = sum(sizes)
    if wish.fixed >= 1:
        raise ConfigurationError(
            f"--fixed={wish.fixed} is the part of a step that does not depend on samples: below 1."
        )
    if len(wish.speeds) > world:
        raise ConfigurationError(
            f"--speeds: {len(wish.speeds)} speeds for {world} ranks: give at most one each, or more --nodes or --ranks."
        )
    fixed, each = wish.fixed * wish.step, (1 - wish.fixed) * wish.step / wish.batch
    costs = [Cost(fixed / speed, each / speed) for speed in wish.speeds]
    ranks = (costs[i % len(costs)] for i in range(world))
    nodes = tuple(tuple(islice(ranks, size)) for size in sizes)
    ways = LinkModel(MEMORY.latency, wish.inside), LinkModel(wish.latency, wish.link)
    return Cluster(nodes, wish.batch * world, 4 * wish.params, *ways, handling=wish.handling)


def cluster_from_file(path: Path) -> Cluster:
    """The cluster that ``lightning-hetero doctor --save`` has measured.

    Args:
        path: of its JSON file.

    Returns:
        The cluster, with ``MEMORY`` for a link that no two of its ranks have.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        if found["format"] > FORMAT:
            raise ValueError(f"format {found['format']}, of a later version; this one reads up to {FORMAT}")
        nodes = tuple(tuple(Cost(*cost) for cost in node) for node in found["nodes"])
        ways = (
            _link_model(found, "within", any(len(node) > 1 for node in nodes)),
            _link_model(found, "between", len(nodes) > 1),
        )
        return Cluster(nodes, found["samples"] * sum(map(len, nodes)), found["size"], *ways)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{path} is no file that the doctor has saved with its option --save ({type(error).__name__}: {error})."
        ) from error


def cluster_from_file_and_options(path: Path, over: Mapping[str, Any]) -> tuple[Cluster, bool]:
    """The cluster of a file, but for what a user knows better.

    Args:
        path: of the file.
        over: fields of :class:`ClusterOptions` that count instead. More nodes are like those that were measured.

    Returns:
        The cluster, and whether the link between nodes is known: the file of one node has none.

    Raises:
        ConfigurationError: the file is none, or has what is given; or there are to be more nodes, but no link.
    """
    if known := [name for name in over if name not in OVER_A_FILE]:
        options, others = (", ".join(f"--{name}" for name in names) for names in (known, OVER_A_FILE))
        raise ConfigurationError(
            f"{options}: how fast the ranks are was measured, and is in {path}. Leave that out, or --from. Beside "
            f"--from you can give {others}."
        )
    _check(over)
    cluster = cluster_from_file(path)
    linked = len(cluster.nodes) > 1 or "link" in over
    if not linked and ("latency" in over or over.get("nodes", 1) > 1):
        raise ConfigurationError(
            f"{path} is of one node, so no link between nodes was measured: give its rate, too, such as --link 1gbit."
        )
    way = cluster.between if len(cluster.nodes) > 1 else LinkModel(ClusterOptions().latency, ClusterOptions().link)
    if linked:
        link = LinkModel(over.get("latency", way.latency), over.get("link", way.bandwidth))
        cluster = replace(cluster, between=link)
    cluster = replace(
        cluster,
        size=4 * over["params"] if "params" in over else cluster.size,
        samples=over["batch"] * cluster.world if "batch" in over else cluster.samples,
        within=cluster.within._replace(bandwidth=over.get("inside", cluster.within.bandwidth)),
        handling=over.get("handling", cluster.handling),
    )
    few_enough(over.get("nodes", 1) * cluster.largest)
    return (cluster.with_nodes(over["nodes"]) if "nodes" in over else cluster), linked


def few_enough(ranks: int) -> None:
    """See that there are not so many ranks that predictions take long.

    Raises:
        ConfigurationError: there are too many.
    """
    if ranks > MOST_RANKS:
        raise ConfigurationError(f"{ranks} ranks are more than {MOST_RANKS}: give fewer --nodes, or a smaller --most.")


def _link_model(found: Mapping[str, Any], name: str, used: bool) -> LinkModel:
    """A link of the file; memory, if no two ranks have it."""
    if used and found.get(name) is None:
        raise KeyError(name)
    return LinkModel(*found[name]) if used else MEMORY


def _check(given: Mapping[str, Any]) -> None:
    """See that numbers are finite, and none below its least."""
    for name, value in given.items():
        values = value if name in ("speeds", "ranks") else [value]
        least = 0.0 if name in ("fixed", "latency") else math.ulp(0.0)
        if not all(math.isfinite(number) and number >= least for number in values):
            raise ConfigurationError(f"--{name}: {value} must be finite and {'at least' if least == 0 else 'above'} 0.")


_BAR = 6  # characters of a full bar
_LEGEND = (
    "every: steps between exchanges. sent: MB out of a node, per step. kept: MB of a rank beyond model, gradients and "
    "optimizer. eff.: part of the samples/s that the ranks would reach together if each trained alone."
)
_SELDOM = (
    "seldom: it waits for nobody, and on this link it exchanges less than half as often as asked. Its replicas drift "
    "apart, so it is listed last and not recommended."
)


def run(
    measured: Path | None, given: Mapping[str, Any], every: int | None, wire: str | None, most: int, out: Path | None
) -> None:
    """Run the command.

    Args:
        measured: a file of ``doctor --save``. Default: the cluster is described.
        given: fields of :class:`~lightning_hetero.planning.plan.ClusterOptions` that the user has given.
        every: as for :func:`plan`.
        wire: as for :func:`plan`.
        most: as for :func:`plan`; left out if no link between nodes is known.
        out: as for :func:`plan`.

    Raises:
        ConfigurationError: as for :func:`plan`, or there is no such cluster.
    """
    cluster, linked = (
        (cluster_from_options(ClusterOptions(**given)), True)
        if measured is None
        else cluster_from_file_and_options(measured, given)
    )
    if measured is None and (assumed := [name for name in ClusterOptions._fields if name not in given]):
        defaults = ClusterOptions()._asdict() | {"speeds": "1", "ranks": "4"}
        Console().print(
            "assumed, not given: " + ", ".join(f"--{name} {_short(name, defaults[name])}" for name in assumed)
        )
    plan(cluster, every, wire, most if linked else None, out)


def _short(name: str, value: Any) -> str:
    """As it would be typed."""
    if name in ("link", "inside", "handling"):
        return f"{value / 1e9:g}GB" if value >= 1e9 else f"{value / 1e6:g}MB"
    return value if isinstance(value, str) else f"{value:g}"


def plan(
    cluster: Cluster,
    every: int | None,
    wire: str | None,
    most: int | None,
    out: Path | None,
) -> None:
    """Print what each strategy makes of a cluster, the best one and why, and what would help.

    Args:
        cluster: to plan for.
        every: steps between two exchanges of strategies that meet now and then. Default: it is searched.
        wire: number format between replicas. Default: it is searched.
        most: largest number of nodes of the weak scaling; ``None``: it is left out, since no link between nodes is
            known.
        out: where to draw that as a PNG. Default: nowhere.

    Raises:
        ConfigurationError: the picture cannot be drawn, or not be written there, or there are too many ranks.
    """
    if out is not None:
        _can_draw(out, most)
    few_enough(max(cluster.world, (most or 0) * cluster.largest))
    console = Console()
    found = search(cluster, every, wire)
    link = f"; {_link(cluster.between)}" if len(cluster.nodes) > 1 else ""
    console.print(
        f"{len(cluster.nodes)} nodes, {cluster.world} ranks; {cluster.size / 4e6:.4g} million parameters; "
        f"{cluster.samples} samples a step, {duration(cluster.even)} if split evenly, {duration(cluster.split)} by "
        f"speed{link}"
    )
    console.print(_table(found))
    console.print(_LEGEND)
    if any(one.prediction.seldom for one in found):
        console.print(_SELDOM)
    console.print()
    for line in why(cluster, found):
        console.print(line)
    if not cluster.given and (slow := too_slow(cluster.samples, cluster.ranks)):
        console.print(str(slow))
    console.print("\nWhat would help:")
    for change in changes(cluster, every, wire):
        gain = f"{change.gain:.2f} times the samples/s, with {change.best.strategy}"
        console.print(f"  {change.what}: {gain if change.gain > 1.005 else 'nothing gained'}")
    if most is None:
        console.print(
            "\nWeak scaling is left out: no link between nodes was measured. Give its rate, such as --link 1gbit."
        )
    else:
        names = list(dict.fromkeys(["ddp", "hetero_ddp", *(one.prediction.name for one in found)]))[:4]
        inexact = next(one.prediction for one in found if not one.prediction.exact)
        _scaling(console, cluster, efficiencies(cluster, names, most, inexact.every, inexact.wire), most, out)
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
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
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


def _table(found: Sequence[Setting]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("strategy", "every", "wire", "step", "sent", "samples/s", "kept", "eff.", ""):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("strategy", "wire", "") else "right")
    for one, left_out in found:
        note = "exact" if one.exact else "seldom" if one.seldom else "" if one.repeatable else "async"
        speed = f"{one.speed:,.0f}" if one.speed >= 100 else f"{one.speed:.3g}"
        numbers = duration(one.step), f"{one.sent / 1e6:.3g}", speed, f"{one.kept / 1e6:,.0f}", f"{one.efficiency:.0%}"
        table.add_row(one.name, str(one.every), one.wire, *numbers, f"-{len(left_out)} {note}" if left_out else note)
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


def why(cluster: Cluster, found: Sequence[Setting]) -> list[str]:
    """The best settings, why, and what they cost, in a line each.

    Args:
        cluster: the ranks, links and model.
        found: by :func:`~lightning_hetero.planning.strategy_choice.search`.
    """
    best, left_out = found[0]
    plain = next(one for one in predictions(cluster) if one.name == "ddp")
    exact = next(one.prediction for one in found if one.prediction.exact)
    gain = best.speed / plain.speed
    than = f"{gain:.2f} times the samples/s of ddp" if gain > 1.005 else "and about as fast is ddp"
    lines = [
        f"Best: {best.strategy}, {'and no other is faster' if best.name == 'ddp' else than}. An all-reduce of the "
        f"gradients over all ranks takes {duration(cluster.gradients())}, that is "
        f"{cluster.gradients() / cluster.split:.2f} steps; hidden behind the backward pass are at most "
        f"{cluster.hidden:.0%} of a step."
    ]
    costs = [f"{best.kept / 1e6:,.0f} MB of memory of each rank, beyond model, gradients and optimizer"]
    if not best.exact:
        costs.insert(0, f"replicas train apart for {best.every} steps, and may need more samples to the same loss")
    if best.wire != "fp32":
        costs.append(f"what they exchange is rounded to {best.wire}")
    if not best.repeatable:
        costs.append("two runs differ")
    if left_out:
        costs.append(f"ranks {', '.join(map(str, left_out))} are left out")
    lines.append(f"It costs: {'; '.join(costs)}.")
    if not best.exact:
        lines.append(f"Best that is exact: {exact.strategy}, {exact.speed / best.speed:.0%} of that speed.")
    return lines


def _link(way: LinkModel) -> str:
    return f"{way.bandwidth / 1e6:.4g} MB/s and {duration(way.latency)} between nodes"


def _bar(part: float) -> str:
    return "█" * round(_BAR * part)
