"""What gossip in pairs costs beside a step: bytes of an exchange, and how much of it the step hides.

    sudo python benchmarks/cluster/pairs.py

Four nodes of one rank meet in pairs at every step, devices by delay. First the exchanges alone, without a step to hide
them; then beside steps that take as long, where they pass in the background of a step, or after it (overlap=false).
"""

import argparse
import statistics
from typing import Any

import runner
from job import cnn
from rich.console import Console
from rich.table import Table
from runner import slowest, spread

PAIRS = "hetero_gossip:balance=off"
AFTER = f"{PAIRS},overlap=false"
PUSHES = "hetero_gossip_push_sum:balance=off"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runner.add_options(parser, nodes=4, ranks=1, rate="200mbit", batch=16, steps=32)
    parser.set_defaults(quota=1.0)
    options = parser.parse_args()
    console = Console(highlight=False)
    bare = runner.measure(argparse.Namespace(**{**vars(options), "delay": 0.0}), ["alone", AFTER], "cnn", console)
    exchange = statistics.median(slowest(bare, AFTER)) - statistics.median(slowest(bare, "alone"))
    options.delay = round(exchange / 1e3, 3)
    runs = runner.measure(options, ["alone", PAIRS, AFTER, PUSHES], "cnn", console)
    console.print(f"An exchange takes {exchange:.0f} ms, and so does a step without one.")
    console.print(table(runs, exchange))


def table(runs: list[dict[str, Any]], exchange: float) -> Table:
    """A row per contender."""
    result = Table()
    columns = "strategy", "step over the longer of both", "bytes of an exchange over the parameters'", "on the link"
    for name in columns:
        result.add_column(name, overflow="fold", justify="left" if name == "strategy" else "right")
    parameters = sum(p.numel() * p.element_size() for p in cnn().parameters())
    longer = [max(compute, exchange) for compute in slowest(runs, "alone")]
    for name in (PAIRS, AFTER, PUSHES):
        of = [run["ranks"] for run in runs if run["contender"] == name]
        ratios = [step / limit for step, limit in zip(slowest(runs, name), longer, strict=True)]
        # In each round every replica of an even number meets another, so a step has an exchange.
        sent = [
            [statistics.mean(rank[key] for rank in ranks) / parameters for ranks in of] for key in ("theory", "bytes")
        ]
        result.add_row(name, spread(ratios), *(spread(column, ".3f") for column in sent))
    return result


if __name__ == "__main__":
    main()
