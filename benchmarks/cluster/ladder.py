"""The ladder from the original EASGD up, on an emulated cluster: what each improvement brings.

    sudo python benchmarks/cluster/ladder.py --rate 100mbit --steps 22 --delay 0.55    # the table in docs/benchmarks.md
    sudo python benchmarks/cluster/ladder.py --rate 1gbit --share 0.5
    sudo python benchmarks/cluster/ladder.py --rate 1gbit --delay 0.2 --steps 16 --repeats 1          # a minute

Four nodes of one rank, an exchange in every step, devices by delay. The delay is chosen so that the original spends a
given share of its time communicating, from what its exchanges take by themselves.
"""

import argparse
import statistics
from typing import Any

import runner
from rich.console import Console
from rich.table import Table
from runner import slowest, spread

ALPHA = "tau=1,moving_rate=auto,balance=off"
RUNGS = {
    "in turn": f"hetero_easgd_round_robin:{ALPHA}",
    "all-reduce": f"hetero_easgd:{ALPHA}",
    "overlapped with the step": f"hetero_easgd_overlap:{ALPHA}",
    "bf16 on the wire": f"hetero_easgd_overlap:{ALPHA},wire=bf16",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runner.add_options(parser, nodes=4, ranks=1, rate="200mbit", batch=16, steps=40)
    parser.add_argument("--share", type=float, default=0.87, help="of the original's time that it shall communicate")
    options = parser.parse_args()
    console = Console(highlight=False)
    original = next(iter(RUNGS.values()))
    if not options.delay:
        console.print("How long the original's exchanges take by themselves:")
        once = argparse.Namespace(**{**vars(options), "repeats": 1, "steps": 24, "quota": 1.0})
        alone = slowest(runner.measure(once, [original], "cnn", console), original)[0] / 1e3
        # In turn, p - 1 replicas' exchanges bound a round, and each computes while the others exchange.
        options.delay = [round((1 - options.share) * alone, 3)]
    runs = runner.measure(options, list(RUNGS.values()), "cnn", console)
    console.print(table(runs))
    console.print(bounds(options, runs))


def table(runs: list[dict[str, Any]]) -> Table:
    """A row per rung."""
    result = Table()
    columns = ("rung", "samples/s over taking turns", "communicating", "center's accuracy", "MB per step")
    for name in columns:
        result.add_column(name, justify="left" if name == "rung" else "right")
    base = slowest(runs, next(iter(RUNGS.values())))
    for title, name in RUNGS.items():
        ratios = [a / b for a, b in zip(base, slowest(runs, name), strict=True)]
        of = [run["ranks"] for run in runs if run["contender"] == name]
        waits = [100 * max(rank["exposed"] for rank in ranks) for ranks in of]
        accuracy = [100 * ranks[0]["accuracy"] for ranks in of]
        sent = statistics.median(max(rank["bytes"] for rank in ranks) for ranks in of) / 1e6
        result.add_row(
            title, spread(ratios), f"{spread(waits, '.1f')}%", f"{statistics.median(accuracy):.1f}%", f"{sent:.1f}"
        )
    return result


def bounds(options: argparse.Namespace, runs: list[dict[str, Any]]) -> str:
    """Limit that the link sets, by arithmetic."""
    rate, p = runner.network.Link(options.rate).bits_per_s / 8, options.nodes
    size = next(run["ranks"][0]["theory"] for run in runs if "overlap" in run["contender"]) * p / (2 * (p - 1))
    vector, compute = size / rate, max(options.delay)
    rows = {
        "in turn": max(2 * (p - 1) * vector, compute + 2 * vector),
        "all-reduce": compute + 2 * (p - 1) / p * vector,
        "overlapped": max(compute, 2 * (p - 1) / p * vector),
        "bf16": max(compute, (p - 1) / p * vector),
    }
    first = rows["in turn"]
    lines = [f"  {name}: {1e3 * seconds:.0f} ms, {first / seconds:.2f}x" for name, seconds in rows.items()]
    return "\n".join(
        [f"By arithmetic, a vector taking {1e3 * vector:.0f} ms and a step {1e3 * compute:.0f} ms:", *lines]
    )


if __name__ == "__main__":
    main()
