"""Runs contenders on an emulated cluster, and brings back what each rank has measured."""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import network
from rich.console import Console


def add_options(parser: argparse.ArgumentParser, nodes: int, ranks: int, rate: str, batch: int, steps: int) -> None:
    """Options of all benchmarks on the cluster."""
    parser.add_argument("--nodes", type=int, default=nodes)
    parser.add_argument("--ranks", type=int, default=ranks, help="of each node")
    parser.add_argument("--rate", default=rate, help="of each node's link, such as 200mbit or 1gbit")
    parser.add_argument("--batch", type=int, default=batch, help="samples per rank and step")
    parser.add_argument(
        "--delay", type=numbers, help="seconds that a step takes at least, without a core; one, or A,B,.. for the ranks"
    )
    parser.add_argument("--quota", type=float, help="part of a core for each rank; default: 0.45, and 1 with a delay")
    parser.add_argument("--steps", type=int, default=steps, help="of each run")
    parser.add_argument("--skip", type=int, default=12, help="the first steps, which are not measured")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for everything")


def measure(
    options: argparse.Namespace, contenders: Sequence[str], model: str, console: Console, speeds: Sequence[float] = ()
) -> list[dict[str, Any]]:
    """Run every contender in turn, several times; what `job.py` has written.

    Args:
        options: of the command line.
        contenders: their strings.
        model: one of `job.py`'s.
        console: to say what is run.
        speeds: samples per millisecond of each device, whose batches take ``delay`` seconds besides; empty: no sample
            takes time.
    """
    world = options.nodes * options.ranks
    delays, rates = (of_each(values, world) for values in (options.delay or (), speeds))
    quota = options.quota or (1.0 if delays or rates else 0.45)
    costs = [
        [delay, 1e-3 / rate if rate else 1e-6]
        for delay, rate in zip(delays or [0.0] * world, rates or [0.0] * world, strict=True)
    ]
    devices = f"devices of {' '.join(map(str, rates))} samples per ms" if rates else "devices alike"
    least = " ".join(f"{1e3 * delay:.0f}" for delay in options.delay or [0.0])
    console.print(
        f"{options.nodes} nodes of {options.ranks} ranks, {quota:.0%} of a core each, links of {options.rate}; "
        f"{devices}, {options.batch} samples per rank and step, {least} ms at least; {options.repeats} runs of "
        f"{options.steps} steps each, the first {options.skip} not measured. {os.cpu_count()} cores, load average "
        f"{os.getloadavg()[0]:.2f}."
    )
    counts = options.repeats, options.steps, options.skip, options.batch
    given = json.dumps(costs if delays or rates else [])
    return run_script("job.py", [model, *counts, given, *contenders], options, quota, console)


def numbers(text: str) -> list[float]:
    """The numbers of an option."""
    return [float(part) for part in text.split(",")]


def of_each(values: Sequence[float], world: int) -> list[float]:
    """A value for each rank, from one for all, or one for each."""
    if len(values) not in (0, 1, world):
        raise SystemExit(f"{len(values)} values for {world} ranks: give one, or one for each")
    return list(values) * (world if len(values) == 1 else 1)


def run_script(
    script: str | Path,
    arguments: Sequence[object],
    options: argparse.Namespace,
    quota: float | None,
    console: Console,
    python: str = sys.executable,
) -> Any:
    """Run a script as every rank of a cluster.

    Args:
        script: its name in this folder, or its path; it is given a path to write JSON to, and the arguments.
        arguments: further ones.
        options: what `nodes`, `ranks` and `rate` the cluster has, and for how many seconds it runs at most (`timeout`).
        quota: the part of a core for each rank; `None`: all.
        console: to say what went wrong, and how busy the machine was.
        python: the interpreter.

    Returns:
        What the script has written.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # tidy up, as on Ctrl-C
    name = f"lh{Path(script).stem}"  # two scripts' clusters can be there at the same time
    with (
        tempfile.TemporaryDirectory() as folder,
        network.Cluster(options.nodes, network.Link(options.rate), name) as cluster,
    ):
        output, log = Path(folder) / "figures.json", Path(folder) / "log"
        command = [python, str(Path(__file__).parent / script), str(output), *map(str, arguments)]
        began, used = time.monotonic(), cluster.cpu_seconds()
        status = cluster.run(command, [options.ranks] * options.nodes, quota, options.timeout, log)
        own, everyone = (b - a for a, b in zip(used, cluster.cpu_seconds(), strict=True))
        if any(status):
            for file in sorted(Path(folder).glob("*.log")):
                console.print(f"--- {file.stem}\n{file.read_text()[-3000:]}", markup=False)
            raise SystemExit(f"Ranks ended with {status}.")
        figures = json.loads(output.read_text())
    console.print(
        f"The rest of the machine used {(everyone - own) / (time.monotonic() - began):.2f} cores meanwhile; load "
        f"average at the end {os.getloadavg()[0]:.2f}.\n"
    )
    return figures


def slowest(runs: list[dict[str, Any]], name: str) -> list[float]:
    """Milliseconds per step of the slowest rank, one per run."""
    return [max(rank["ms"] for rank in run["ranks"]) for run in runs if run["contender"] == name]


def spread(values: list[float], form: str = ".2f") -> str:
    """Median and range."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"
