"""Where the cluster comes from that ``lightning-hetero plan`` plans for: numbers that a user gives, and a file."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from lightning_hetero.errors import ConfigurationError
from lightning_hetero.forecast.cluster import HANDLING, MEMORY, Cluster, Way
from lightning_hetero.workload.shares import Cost

MOST_RANKS = 100_000
#: Of the files of ``lightning-hetero doctor --save``; the first ones had no number.
FORMAT = 1
#: What a user may say of a cluster that was measured; the rest of :class:`Wish` describes its ranks, which are known.
OVER_A_FILE = ("nodes", "params", "batch", "link", "latency", "inside", "handling")


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
        handling: bytes of parameters per second that a rank packs, mixes and unpacks around an exchange.
    """

    nodes: int = 2
    ranks: int = 4
    params: float = 25e6
    step: float = 0.3
    speeds: Sequence[float] = (1.0,)
    batch: int = 32
    fixed: float = 0.1
    link: float = 125e6
    latency: float = 2e-4
    inside: float = 5e9
    handling: float = HANDLING


def of_wish(wish: Wish) -> Cluster:
    """The cluster that a user describes.

    Args:
        wish: the description.

    Raises:
        ConfigurationError: a number that no cluster has.
    """
    _check(wish._asdict())
    world = wish.nodes * wish.ranks
    few_enough(world)
    if wish.fixed >= 1:
        raise ConfigurationError(f"--fixed={wish.fixed} is the part of a step that no sample needs: below 1.")
    if len(wish.speeds) > world:
        raise ConfigurationError(
            f"--speeds: {len(wish.speeds)} speeds for {world} ranks: give at most one each, or more --nodes or --ranks."
        )
    fixed, each = wish.fixed * wish.step, (1 - wish.fixed) * wish.step / wish.batch
    costs = [Cost(fixed / speed, each / speed) for speed in wish.speeds]
    ranks = [costs[i % len(costs)] for i in range(world)]
    nodes = tuple(tuple(ranks[i : i + wish.ranks]) for i in range(0, world, wish.ranks))
    ways = Way(MEMORY.latency, wish.inside), Way(wish.latency, wish.link)
    return Cluster(nodes, wish.batch * world, 4 * wish.params, *ways, handling=wish.handling)


def of_file(path: Path) -> Cluster:
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
        ways = _way(found, "within", any(len(node) > 1 for node in nodes)), _way(found, "between", len(nodes) > 1)
        return Cluster(nodes, found["samples"] * sum(map(len, nodes)), found["size"], *ways)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{path} is no file that the doctor has saved with its option --save ({type(error).__name__}: {error})."
        ) from error


def of_file_but(path: Path, over: Mapping[str, Any]) -> tuple[Cluster, bool]:
    """The cluster of a file, but for what a user knows better.

    Args:
        path: of the file.
        over: fields of :class:`Wish` that count instead. More nodes are like those that were measured.

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
    cluster = of_file(path)
    linked = len(cluster.nodes) > 1 or "link" in over
    if not linked and ("latency" in over or over.get("nodes", 1) > 1):
        raise ConfigurationError(
            f"{path} is of one node, so no link between nodes was measured: give its rate, too, such as --link 1gbit."
        )
    way = cluster.between if len(cluster.nodes) > 1 else Way(Wish().latency, Wish().link)
    if linked:
        link = Way(over.get("latency", way.latency), over.get("link", way.bandwidth))
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


def _way(found: Mapping[str, Any], name: str, used: bool) -> Way:
    """A link of the file; memory, if no two ranks have it."""
    if used and found.get(name) is None:
        raise KeyError(name)
    return Way(*found[name]) if used else MEMORY


def _check(given: Mapping[str, Any]) -> None:
    """See that numbers are finite, and none below its least."""
    for name, value in given.items():
        values = value if name == "speeds" else [value]
        least = 0.0 if name in ("fixed", "latency") else math.ulp(0.0)
        if not all(math.isfinite(number) and number >= least for number in values):
            raise ConfigurationError(f"--{name}: {value} must be finite and {'at least' if least == 0 else 'above'} 0.")
