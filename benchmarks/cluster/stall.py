"""What is left of all ranks' steps when one of them has half of the others' share of a core.

    sudo python benchmarks/cluster/stall.py

Four nodes of one rank; batches are split evenly (balance="off"), so that only asynchrony can help. Steps are counted in
a window in the middle of an epoch, and compared with those of the same strategy when all ranks are alike.
"""

import argparse
import statistics
from typing import Any

import runner
from job import SKIP, SLOW
from rich.console import Console
from rich.table import Table
from runner import spread

CONTENDERS = [
    "hetero_ddp:balance=off",
    "hetero_gossip:balance=off,every_n_steps=4",
    "hetero_gossip_async:balance=off,every_n_steps=4",
    "hetero_easgd_async:balance=off,moving_rate=auto,tau=4",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contenders", nargs="*", default=CONTENDERS, help="NAME or NAME:option=value,option=value")
    runner.add_options(parser, nodes=4, ranks=1, rate="1gbit", batch=32, steps=60)
    parser.set_defaults(quota=0.2)
    options = parser.parse_args()
    console = Console(highlight=False)
    names = [name for contender in options.contenders for name in (contender, SLOW + contender)]
    runs = runner.measure(options, names, "cnn", console)
    console.print(table(runs, options.contenders))


def rates(run: dict[str, Any]) -> list[float]:
    """Steps per second of each rank, over a window in which none waits for the end of the epoch."""
    begin = max(rank["starts"][SKIP] for rank in run["ranks"])
    end = min(rank["starts"][-1] for rank in run["ranks"])
    return [sum(begin < start <= end for start in rank["starts"]) / (end - begin) for rank in run["ranks"]]


def table(runs: list[dict[str, Any]], contenders: list[str]) -> Table:
    """A row per contender."""
    result = Table()
    for name in ("strategy", "steps of all ranks", "of the slowest fast rank", "of the slow rank"):
        result.add_column(name, overflow="fold", justify="left" if name == "strategy" else "right")
    for name in contenders:
        even = [rates(run) for run in runs if run["contender"] == name]
        slow = [rates(run) for run in runs if run["contender"] == SLOW + name]
        pairs = list(zip(slow, even, strict=True))
        alone = [statistics.mean(b) for b in even]
        columns = (
            [100 * sum(a) / sum(b) for a, b in pairs],
            [100 * min(a[:-1]) / mean for a, mean in zip(slow, alone, strict=True)],
            [100 * a[-1] / mean for a, mean in zip(slow, alone, strict=True)],
        )
        result.add_row(name, *(f"{spread(column, '.0f')}%" for column in columns))
    return result


if __name__ == "__main__":
    main()
