"""Time per step, bytes, waiting and accuracy of any strategies on an emulated cluster with slow links.

    sudo python benchmarks/cluster                                       # the table in docs/benchmarks.md
    sudo python benchmarks/cluster --batch 16 --delay 0.07               # devices that leave the cores free
    sudo python benchmarks/cluster hetero_node:every_n_steps=8 ddp --rate 1gbit --nodes 3

Nodes are network namespaces, links are shaped, each rank has a part of a core (see network.py). All contenders run in
turn in the same processes, several times: compare ratios, not milliseconds. Needs root, Linux and iproute2.
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from json import loads
from pathlib import Path
from typing import Any

import network
from rich.console import Console
from rich.table import Table

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
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each node")
    parser.add_argument("--rate", default="200mbit", help="of each node's link, such as 200mbit or 1gbit")
    parser.add_argument("--quota", type=float, default=0.45, help="part of a core for each rank")
    parser.add_argument("--batch", type=int, default=64, help="samples per rank and step")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that a step takes at least, without a core")
    parser.add_argument("--steps", type=int, default=60, help="of each run; the first 12 are not measured")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for everything")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # tidy up, as on Ctrl-C
    link = network.Link(options.rate)
    console = Console(highlight=False)
    console.print(
        f"{options.nodes} nodes of {options.ranks} ranks, {options.quota:.0%} of a core each, links of {options.rate}; "
        f"{options.batch} samples per rank and step, {1e3 * options.delay:.0f} ms at least; "
        f"{options.repeats} runs of {options.steps} steps each. {os.cpu_count()} cores, load average "
        f"{os.getloadavg()[0]:.2f}."
    )
    with tempfile.TemporaryDirectory() as folder, network.Cluster(options.nodes, link) as cluster:
        output, log = Path(folder) / "figures.json", Path(folder) / "log"
        command = [sys.executable, str(Path(__file__).with_name("job.py")), str(output)]
        command += [
            str(options.repeats),
            str(options.steps),
            str(options.batch),
            str(options.delay),
            *options.contenders,
        ]
        began, used = time.monotonic(), cluster.cpu_seconds()
        status = cluster.run(command, [options.ranks] * options.nodes, options.quota, options.timeout, log)
        own, everyone = (b - a for a, b in zip(used, cluster.cpu_seconds(), strict=True))
        if any(status):
            for file in sorted(Path(folder).glob("*.log")):
                console.print(f"--- {file.stem}\n{file.read_text()[-3000:]}", markup=False)
            raise SystemExit(f"Ranks ended with {status}.")
        runs = loads(output.read_text())
    others = (everyone - own) / (time.monotonic() - began)
    console.print(table(runs, options.contenders))
    console.print(speedups(runs, options.contenders))
    console.print(f"The rest of the machine used {others:.2f} cores meanwhile.\n")
    console.print(NOTES)


NOTES = """\
[bold]ms per step[/bold]: of the slowest rank, mean over a run; median and range over runs.
[bold]over the first two[/bold]: that time over `alone` (no communication at all), and over the second contender (by
default: gradients within a node, nothing between nodes), the median over runs.
[bold]exposed[/bold]: the part of the time for which training waited for exchanges between nodes, on the rank that
waited least and on that which waited most: who is ahead also waits for the others, not only for the wire.
[bold]kB per step[/bold]: sent over a node's link, the network's own headers included; [bold]over theory[/bold]: over
what the exchanges' values take.\
"""


def slowest(runs: list[dict[str, Any]], name: str) -> list[float]:
    """Milliseconds per step of the slowest rank, one per run."""
    return [max(rank["ms"] for rank in run["ranks"]) for run in runs if run["contender"] == name]


def speedups(runs: list[dict[str, Any]], contenders: list[str]) -> Table:
    """How many times as fast this package's strategies are as the others: median and range over runs."""
    ours = [name for name in contenders if name.startswith("hetero")]
    others = [name for name in contenders if name not in ours]
    result = Table(title="times as fast as")
    result.add_column("strategy", overflow="fold", style="bold")
    for other in others:
        result.add_column(other, justify="right")
    for name in ours:
        ratios = [[b / a for a, b in zip(slowest(runs, name), slowest(runs, other), strict=True)] for other in others]
        result.add_row(name, *(f"{statistics.median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for r in ratios))
    return result


def table(runs: list[dict[str, Any]], contenders: list[str]) -> Table:
    """A row per contender."""
    by_name = {name: [run["ranks"] for run in runs if run["contender"] == name] for name in contenders}
    ms = {name: slowest(runs, name) for name in contenders}
    result = Table()
    result.add_column("strategy", overflow="fold", style="bold")
    columns = ("ms per step", "over the first two", "exposed", "kB per step", "over theory", "accuracy", "rate")
    for name in columns:
        result.add_column(name, justify="right")
    for name, of in by_name.items():
        over = [statistics.median(a / b for a, b in zip(ms[name], ms[base], strict=True)) for base in contenders[:2]]
        waits = [[rank["exposed"] for rank in ranks] for ranks in of if ranks[0]["exposed"] is not None]
        least, most = (statistics.median(map(f, waits)) if waits else 0.0 for f in (min, max))
        sent = statistics.median(max(rank["bytes"] for rank in ranks) for ranks in of)
        theory = of[0][0]["theory"]
        accuracy = statistics.median(ranks[0]["accuracy"] for ranks in of)
        rate = {key: value for key, value in of[-1][0]["status"].items() if key != "phase"}
        result.add_row(
            name,
            f"{statistics.median(ms[name]):.0f} ({min(ms[name]):.0f} to {max(ms[name]):.0f})",
            " ".join(f"{ratio:.2f}x" for ratio in over),
            f"{least:.1%} to {most:.1%}" if waits else "",
            f"{sent / 1e3:.0f}",
            f"{sent / theory:.3f}" if theory else "",
            f"{accuracy:.1%}",
            " ".join(f"{key}={value}" for key, value in rate.items()),
        )
    return result


if __name__ == "__main__":
    main()
