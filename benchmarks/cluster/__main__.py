"""Time per step, bytes, waiting and accuracy of any strategies on an emulated cluster with slow links.

    sudo python benchmarks/cluster                                       # the table in docs/benchmarks.md
    sudo python benchmarks/cluster --batch 16 --delay 0.07               # devices that leave the cores free
    sudo python benchmarks/cluster --nodes 4 --ranks 1 --speeds 0.8,0.4,0.2,0.2 --delay 0.012 alone ddp hetero_ddp
    sudo python benchmarks/cluster --nodes 1 --ranks 2 --steps 16 --repeats 1 --delay 0.02 alone ddp    # half a minute

Nodes are network namespaces, links are shaped, each rank has a part of a core (see network.py), or is a device that
takes a given time. All contenders run in turn in the same processes, several times: compare ratios, not milliseconds.
Under `alone` every rank trains by itself. Needs root, Linux and iproute2.
"""

import argparse
import statistics
from typing import Any

import runner
from rich.console import Console
from rich.table import Table
from runner import slowest, spread

DASO = "warmup=0,cooldown=0,patience=1000,balance=off"  # the cycling phase, at a constant rate
CONTENDERS = [
    "alone",
    "hetero_node:every_n_steps=1000000,balance=off",
    f"hetero_daso:{DASO},wire=bf16,global_every=4,wait=auto",
    f"hetero_daso:{DASO},wire=fp32,global_every=8,wait=auto",
    "hetero_node:every_n_steps=8,balance=off",
    "post_local_sgd:every=4",
    "post_local_sgd:every=8",
    "ddp_fp16",
    "ddp",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contenders", nargs="*", default=CONTENDERS, help="NAME or NAME:option=value,option=value")
    runner.add_options(parser, nodes=2, ranks=2, rate="200mbit", batch=64, steps=60)
    parser.add_argument("--model", choices=("cnn", "deep"), default="cnn", help="8.6 MB, in one layer or many")
    parser.add_argument("--speeds", type=runner.numbers, default=(), help="A,B,..: samples per ms of each device")
    options = parser.parse_args()
    console = Console(highlight=False, width=180)
    runs = runner.measure(options, options.contenders, options.model, console, options.speeds)
    console.print(table(runs, options.contenders))
    console.print(speedups(runs, options.contenders))
    console.print(NOTES)


NOTES = """\
[bold]ms per step[/bold]: of the slowest rank, mean over a run; median and range over runs; and its longest step.
[bold]over the first two[/bold]: that time over `alone` (no communication at all), and over the second contender (by
default: gradients within a node, nothing between nodes), the median over runs.
[bold]samples over the first[/bold]: samples per second of all ranks, each over its own steps, over the first
contender's; where that is `alone`, the part of what the devices can do that they do together.
[bold]exposed[/bold]: the part of the time for which training waited for exchanges between nodes, on the rank that
waited least and on that which waited most: who is ahead also waits for the others, not only for the wire.
[bold]kB per step[/bold]: sent over a node's link, the network's own headers included; [bold]over theory[/bold]: over
what the exchanges' values take.\
"""


def speedups(runs: list[dict[str, Any]], contenders: list[str]) -> Table:
    """Speed of this package's strategies over that of the others: median and range over runs."""
    ours = [name for name in contenders if name.startswith("hetero")]
    others = [name for name in contenders if name not in ours]
    result = Table(title="times as fast as")
    result.add_column("strategy", overflow="fold", style="bold")
    for other in others:
        result.add_column(other, justify="right")
    for name in ours:
        ratios = [[b / a for a, b in zip(slowest(runs, name), slowest(runs, other), strict=True)] for other in others]
        result.add_row(name, *map(spread, ratios))
    return result


def table(runs: list[dict[str, Any]], contenders: list[str]) -> Table:
    """A row per contender."""
    by_name = {name: [run["ranks"] for run in runs if run["contender"] == name] for name in contenders}
    ms = {name: slowest(runs, name) for name in contenders}
    rates = {name: [sum(rank["rate"] for rank in ranks) for ranks in of] for name, of in by_name.items()}
    result = Table()
    result.add_column("strategy", overflow="fold", style="bold")
    columns = (
        "ms per step",
        "longest",
        "over the first two",
        "samples over the first",
        "exposed",
        "kB per step",
        "over theory",
        "accuracy",
        "test loss",
        "rate",
    )
    for name in columns:
        result.add_column(name, justify="right")
    for name, of in by_name.items():
        over = [statistics.median(a / b for a, b in zip(ms[name], ms[base], strict=True)) for base in contenders[:2]]
        samples = [own / first for own, first in zip(rates[name], rates[contenders[0]], strict=True)]
        waits = [[rank["exposed"] for rank in ranks] for ranks in of if ranks[0]["exposed"] is not None]
        least, most = (statistics.median(map(f, waits)) if waits else 0.0 for f in (min, max))
        sent = statistics.median(max(rank["bytes"] for rank in ranks) for ranks in of)
        theory = of[0][0]["theory"]
        accuracy, loss = (statistics.median(ranks[0][key] for ranks in of) for key in ("accuracy", "loss"))
        rate = {key: value for key, value in of[-1][0]["status"].items() if key != "phase"}
        result.add_row(
            name,
            spread(ms[name], ".0f"),
            f"{max(rank['worst'] for ranks in of for rank in ranks):.0f}",
            " ".join(f"{ratio:.2f}x" for ratio in over),
            spread(samples, ".3f"),
            f"{least:.1%} to {most:.1%}" if waits else "",
            f"{sent / 1e3:.0f}",
            f"{sent / theory:.3f}" if theory else "",
            f"{accuracy:.1%}",
            f"{loss:.3f}",
            " ".join(f"{key}={value}" for key, value in rate.items()),
        )
    return result


if __name__ == "__main__":
    main()
