"""Accuracy of strategies that train to the end, at equal epochs and over time, on an emulated cluster.

    sudo python benchmarks/cluster/accuracy.py --seeds 5                                # mean and spread
    sudo python benchmarks/cluster/accuracy.py --seeds 5 --nodes 4 --ranks 1 ddp hetero_gossip_async:every_n_steps=4
    sudo python benchmarks/cluster/accuracy.py --seeds 5 --step 0.02 --nodes 4 --ranks 1 ddp hetero_gossip_async
    sudo python benchmarks/cluster/accuracy.py --rate 10mbit --picture accuracy.png     # over time, on slow links

The task: two handwritten digits (scikit-learn's) on top of each other, to be told both, with test digits that are
never trained on. A small network of 35 thousand parameters, 64 samples per step, a learning rate that rises and falls
once. A link of 10 Mbit is to it what 200 Mbit is to the network of the other benchmark: exchanging gradients takes
several times as long as computing them.
"""

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import runner
from rich.console import Console
from rich.table import Table

CONTENDERS = [
    "ddp",
    "post_local_sgd:every=4,after=192",
    "hetero_node:every_n_steps=4",
    "hetero_daso:mixing=daso,wire=bf16",
    "hetero_daso:mixing=delta,wire=bf16",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contenders", nargs="*", default=CONTENDERS, help="NAME or NAME:option=value,option=value")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each node")
    parser.add_argument("--rate", default="10gbit", help="of each node's link")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--step", type=float, default=0.0, help="seconds that a step takes at least, slept: leaves cores"
    )
    parser.add_argument("--picture", type=Path, help="where to draw accuracy over epochs and over time")
    parser.add_argument("--save", type=Path, help="where to keep the figures, as JSON")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for everything")
    options = parser.parse_args()
    console = Console(highlight=False)
    console.print(
        f"{options.nodes} nodes of {options.ranks} ranks, links of {options.rate}, {options.epochs} epochs, "
        f"{options.seeds} seeds, steps of at least {1e3 * options.step:g} ms. "
        f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f}."
    )
    numbers = options.epochs, options.seeds, options.step
    courses = runner.run_script("learn.py", [*numbers, *options.contenders], options, None, console)
    if options.save:
        options.save.write_text(json.dumps(courses))
    console.print(table(courses, options.contenders))
    if options.picture:
        draw(courses, options.contenders, options.rate, options.picture)
        console.print(f"Picture: {options.picture}")


def table(courses: list[dict[str, Any]], contenders: list[str]) -> Table:
    """A row per contender: accuracy at the end, and when the first contender to end ends."""
    of = {name: [run["course"] for run in courses if run["contender"] == name] for name in contenders}
    soonest = min(statistics.median(course[-1][0] for course in runs) for runs in of.values())
    result = Table()
    result.add_column("strategy", overflow="fold", style="bold")
    paired = f"minus {contenders[0]}, paired by seed (se)"
    for name in (
        "accuracy at the end (sd)",
        "range",
        paired,
        "exchanges per step",
        "seconds",
        f"accuracy after {soonest:.0f} s",
    ):
        result.add_column(name, justify="right")
    base = [course[-1][1] for course in of[contenders[0]]]
    for name, runs in of.items():
        final = [course[-1][1] for course in runs]
        spread = statistics.stdev(final) if len(final) > 1 else 0.0
        apart = [100 * (own - other) for own, other in zip(final, base, strict=True)]
        error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else 0.0
        early = [max((a for s, a in course if s <= soonest * 1.001), default=0.01) for course in runs]
        result.add_row(
            name,
            f"{statistics.mean(final):.2%} ({spread:.2%})",
            f"{min(final):.2%} to {max(final):.2%}",
            "" if runs is of[contenders[0]] else f"{statistics.mean(apart):+.2f} ({error:.2f})",
            f"{statistics.median(run['exchanges'] for run in courses if run['contender'] == name):.2f}",
            f"{statistics.median(course[-1][0] for course in runs):.0f}",
            f"{statistics.mean(early):.2%}",
        )
    return result


def draw(courses: list[dict[str, Any]], contenders: list[str], rate: str, path: Path) -> None:
    """Accuracy over epochs and over time."""
    from matplotlib.figure import Figure

    colours = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2")
    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.suptitle(f"Reading two overlaid digits, two nodes of two ranks, links of {rate}", size=14)
    left, right = figure.subplots(1, 2, sharey=True)
    for name, colour in zip(contenders, colours, strict=False):
        runs = [run["course"] for run in courses if run["contender"] == name]
        mean = [100 * statistics.mean(a) for a in zip(*([a for _, a in run] for run in runs), strict=True)]
        seconds = [statistics.mean(s) for s in zip(*([s for s, _ in run] for run in runs), strict=True)]
        left.plot(range(1, len(mean) + 1), mean, color=colour, label=name)
        right.plot([0, *seconds], [1, *mean], color=colour, label=name)
    left.set_xlabel("epochs")
    right.set_xlabel("seconds of training")
    left.set_ylabel("test accuracy, %")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    right.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
