"""How much of what unequal devices can do by themselves they do together, over a link that is not fast.

    sudo python benchmarks/cluster/unequal.py                                      # the table in docs/benchmarks.md
    sudo python benchmarks/cluster/unequal.py --model cnn --rate 200mbit --batch 64
    sudo python benchmarks/cluster/unequal.py hetero_ddp hetero_ddp:bucket_cap_mb=25

Four nodes of one rank, devices by delay that do 0.8, 0.4, 0.2 and 0.2 samples in a millisecond and take 12 ms more for
a batch. In the same call, in turn: every device trains by itself (all four at once, so that they share the machine as
they do together), then each contender trains. A contender that reaches the sum of the solo speeds loses nothing.
"""

import argparse
import json
import os
import statistics
from typing import Any

import runner
from rich.console import Console
from rich.table import Table
from runner import spread

CONTENDERS = ["ddp", "hetero_ddp"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contenders", nargs="*", default=CONTENDERS, help="NAME or NAME:option=value,option=value")
    parser.add_argument("--rate", default="1gbit", help="of each node's link, such as 200mbit or 1gbit")
    parser.add_argument("--ranks", type=int, default=1, help="of each node; one device for each rank")
    parser.add_argument("--model", choices=("deep", "cnn"), default="deep", help="both have 8.6 MB of parameters")
    parser.add_argument("--speeds", default="0.8,0.4,0.2,0.2", help="samples per millisecond of each device")
    parser.add_argument("--fixed", type=float, default=12.0, help="milliseconds of a batch beside its samples")
    parser.add_argument("--batch", type=int, default=192, help="samples per rank and step, if all had the same")
    parser.add_argument("--steps", type=int, default=30, help="of each run")
    parser.add_argument("--skip", type=int, default=16, help="the first steps, which are not measured")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for everything")
    options = parser.parse_args()
    costs = [[options.fixed / 1e3, 1e-3 / float(speed)] for speed in options.speeds.split(",")]
    if len(costs) % options.ranks:
        parser.error(f"{len(costs)} devices do not fill nodes of {options.ranks}")
    options.nodes = len(costs) // options.ranks
    console = Console(highlight=False)
    console.print(
        f"{options.nodes} nodes of {options.ranks} ranks, links of {options.rate}, devices of {options.speeds} samples "
        f"per ms, {options.batch} samples per rank and step, model {options.model}; {options.repeats} runs of "
        f"{options.steps} steps, the first {options.skip} not measured. {os.cpu_count()} cores, load average "
        f"{os.getloadavg()[0]:.2f}."
    )
    numbers = options.repeats, options.steps, options.skip, options.batch, json.dumps(costs)
    names = ["alone", *options.contenders]
    runs = runner.run_script("unequal_job.py", [options.model, *numbers, *names], options, None, console)
    console.print(table(runs, options.contenders, options.batch))


def table(runs: list[dict[str, Any]], contenders: list[str], batch: int) -> Table:
    """A row per contender."""
    alone = [run["ranks"] for run in runs if run["contender"] == "alone"]
    solo = [sum(batch / statistics.mean(rank["steps"]) for rank in ranks) for ranks in alone]
    result = Table(title=f"solo speeds: {spread(solo, '.0f')} samples/s in all")
    for name in ("strategy", "part of the solo speeds", "ms per step", "worst step, ms", "MB per step and node"):
        result.add_column(name, overflow="fold", justify="left" if name == "strategy" else "right")
    for name in contenders:
        of = [run["ranks"] for run in runs if run["contender"] == name]
        seconds = [max(statistics.mean(rank["steps"]) for rank in ranks) for ranks in of]
        parts = [100 * batch * len(of[0]) / s / total for s, total in zip(seconds, solo, strict=True)]
        worst = max(max(rank["steps"]) for ranks in of for rank in ranks)
        sent = statistics.median(max(rank["bytes"] for rank in ranks) for ranks in of) / 1e6
        step = spread([1e3 * s for s in seconds], ".0f")
        result.add_row(name, f"{spread(parts, '.1f')}%", step, f"{1e3 * worst:.0f}", f"{sent:.1f}")
    return result


if __name__ == "__main__":
    main()
