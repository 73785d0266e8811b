"""What streaming leaves of the wait for a slow link, and of the peaks on it.

    sudo python benchmarks/cluster/streaming.py

Two nodes of two ranks, a replica per node, links of 20 Mbit, 8.6 MB of parameters in eight layers of a mebibyte and two
small ones, devices by delay. The whole model at once, for which all wait; in the background; and in eight fragments.
"""

import argparse
import os
import statistics
from typing import Any

import runner
from job import SKIP
from rich.console import Console
from rich.table import Table
from runner import slowest, spread

TAU, FRAGMENTS = 100, 8
NOTHING = "hetero_node:every_n_steps=1000000,balance=off"
DILOCO = f"hetero_diloco:tau={TAU},replica=node,balance=off"
CONTENDERS = [
    DILOCO,
    f"{DILOCO},delay=60",
    f"{DILOCO},fragments={FRAGMENTS},delay=10",
    f"{DILOCO},fragments={FRAGMENTS},delay=6,wire=bf16",
    f"{DILOCO},fragments={FRAGMENTS},delay=3,wire=int4",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contenders", nargs="*", default=CONTENDERS, help=f"hetero_diloco with tau={TAU}")
    runner.add_options(parser, nodes=2, ranks=2, rate="20mbit", batch=16, steps=SKIP + 2 * TAU + 1)
    parser.set_defaults(quota=1.0, delay=0.07, repeats=2)
    options = parser.parse_args()
    console = Console(highlight=False, width=160)
    runs = runner.measure(options, [NOTHING, *options.contenders], "deep", console)
    console.print(table(runs, options.contenders))
    console.print(f"Load average at the end {os.getloadavg()[0]:.2f}.")


def busiest(run: dict[str, Any], steps: int) -> float:
    """The most bytes that a node sends within so many steps."""
    return max(max(b - a for a, b in zip(rank["sent"], rank["sent"][steps:], strict=False)) for rank in run["ranks"])


def table(runs: list[dict[str, Any]], contenders: list[str]) -> Table:
    """A row per contender."""
    result = Table()
    window = TAU // FRAGMENTS
    columns = (
        "over no exchange",
        "waited, of the time",
        "MB per step and node",
        f"most MB in {window} steps",
        "over 1st",
    )
    for name in ("strategy", *columns):
        result.add_column(name, overflow="fold", justify="left" if name == "strategy" else "right")
    plain = slowest(runs, NOTHING)
    peaks = {name: [busiest(run, window) / 1e6 for run in runs if run["contender"] == name] for name in contenders}
    for name in contenders:
        of = [run["ranks"] for run in runs if run["contender"] == name]
        ratios = [own / base for own, base in zip(slowest(runs, name), plain, strict=True)]
        waits = [max(rank["exposed"] for rank in ranks) for ranks in of]
        sent = [max(rank["bytes"] for rank in ranks) / 1e6 for ranks in of]
        result.add_row(
            name,
            spread(ratios, ".3f"),
            f"{statistics.median(waits):.2%} ({min(waits):.2%} to {max(waits):.2%})",
            f"{statistics.median(sent):.3f}",
            spread(peaks[name]),
            spread([own / whole for own, whole in zip(peaks[name], peaks[contenders[0]], strict=True)], ".3f"),
        )
    return result


if __name__ == "__main__":
    main()
