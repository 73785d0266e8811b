"""What the doctor has found, as people read it."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_hetero.comm.topology import Topology, group_of
from lightning_hetero.doctor.advice import Advice
from lightning_hetero.doctor.speed import Speed, Work
from lightning_hetero.forecast.links import Link

#: Links to show, the slowest first.
SHOWN = 8


def show(
    topology: Topology,
    work: Work,
    speeds: Sequence[Speed],
    links: tuple[Sequence[Link], Sequence[Link]],
    strategies: Iterable[tuple[str, str]],
    advice: Advice,
) -> None:
    """Print all of it; the links are those within nodes, and those between them."""
    within, between = links
    console = Console(highlight=False)
    console.print(_ranks(topology, work, speeds))
    groups: dict[str, Sequence[int]] = {"between all ranks": range(topology.world)}
    groups |= {f"within node {i}": node for i, node in enumerate(topology.nodes)}
    backends = ", ".join(f"{topology.backend(ranks)} {where}" for where, ranks in groups.items())
    console.print(f"Backends for gradients: {backends}.\n", soft_wrap=True)
    if within or between:
        console.print(_links(within, between))
    console.print(_strategies(strategies))
    console.print("\n[bold]Suggestion[/bold]")
    for reason in advice.reasons:
        console.print(escape(reason), soft_wrap=True)
    console.print(f"[bold]Trainer(strategy={escape(advice.strategy)}, ...)[/bold]", soft_wrap=True)


def _ranks(topology: Topology, work: Work, speeds: Sequence[Speed]) -> Table:
    title = (
        f"{_count(topology.world, 'rank')} on {_count(len(topology.nodes), 'node')}; {escape(work.name)}, "
        f"{work.size / 1e6:.2f} MB of parameters, all ranks at once, no exchange; below, the range over rounds"
    )
    table = Table(title=title, title_justify="left")
    for heading in ("rank", "node", "host", "device", "per step", "per sample", f"{work.samples} samples"):
        table.add_column(heading, justify="right" if heading in ("per step", "per sample") else "left")
    for rank, (place, (cost, rounds)) in enumerate(zip(topology.places, speeds, strict=True)):
        node = group_of(rank, topology.nodes)
        seconds = cost.seconds(work.samples)
        apart = f"{1e3 * min(rounds):.2f} to {1e3 * max(rounds):.2f} ms"
        speed = f"{1e3 * seconds:.2f} ms, {work.samples / seconds:.0f}/s"
        times = f"{1e3 * cost.fixed:.2f} ms", f"{1e3 * cost.per_sample:.3f} ms", f"{speed}\n{apart}"
        table.add_row(str(rank), str(node), place.host, place.device.split(":")[0], *times)
    return table


def _links(within: Sequence[Link], between: Sequence[Link]) -> Table:
    table = Table(title="Links, over gloo and from CPU memory, the slowest first", title_justify="left")
    for heading in ("where", "ranks", "latency", "bandwidth"):
        table.add_column(heading)
    for where, links in (("within a node", within), ("between nodes", between)):
        slowest = sorted(links, key=lambda link: link.bandwidth)
        for link in slowest[:SHOWN]:
            speed = f"{link.bandwidth / 1e6:.1f} MB/s ({8e-6 * link.bandwidth:.0f} Mbit/s)"
            table.add_row(where, f"{link.ranks[0]} - {link.ranks[1]}", f"{1e3 * link.latency:.3f} ms", speed)
        if len(links) > SHOWN:
            table.add_row(where, f"and {len(links) - SHOWN} more", "", "")
    return table


def _strategies(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(title="Strategies", title_justify="left")
    table.add_column("string or option", no_wrap=True)
    table.add_column("here")
    for name, missing in rows:
        table.add_row(escape(name), escape(missing) or "[green]available[/green]")
    return table


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
