"""How long an outer exchange lasts as replicas grow in number: pairs beside all together.

    sudo python benchmarks/cluster/exchanges.py
    sudo python benchmarks/cluster/exchanges.py --counts 2 4 --rate 200mbit hetero_noloco:tau=4,wire=bf16,balance=off

Nodes of one rank, 8.6 MB of parameters, devices by delay. An exchange lasts as long as the step in which it comes lasts
longer than the rank's other steps, the mean over the ranks.
"""

import argparse
import statistics
from typing import Any

import runner
from job import SKIP, cnn
from rich.console import Console
from rich.table import Table
from runner import spread

TAU = 4
CONTENDERS = [f"hetero_diloco:tau={TAU},balance=off", f"hetero_noloco:tau={TAU},balance=off"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contenders", nargs="*", default=CONTENDERS, help=f"all with tau={TAU}")
    parser.add_argument("--counts", type=int, nargs="+", default=[2, 4, 8], help="of replicas")
    runner.add_options(parser, nodes=2, ranks=1, rate="100mbit", batch=4, steps=SKIP + 8 * TAU + 1)
    parser.set_defaults(quota=1.0, delay=0.15)
    options = parser.parse_args()
    console = Console(highlight=False, width=160)
    found = {}
    for count in options.counts:
        options.nodes = count
        found[count] = runner.measure(options, options.contenders, "cnn", console)
    console.print(table(found, options.contenders))


def lasted(run: dict[str, Any]) -> list[float]:
    """Milliseconds of each exchange, the mean over the ranks."""
    of_ranks = []
    for rank in run["ranks"]:
        steps = [1e3 * (b - a) for a, b in zip(rank["starts"], rank["starts"][1:], strict=False)]
        plain = statistics.median(step for i, step in enumerate(steps) if i >= SKIP and (i + 1) % TAU)
        of_ranks.append([step - plain for i, step in enumerate(steps) if i >= SKIP and (i + 1) % TAU == 0])
    return [statistics.mean(each) for each in zip(*of_ranks, strict=True)]


def table(found: dict[int, list[dict[str, Any]]], contenders: list[str]) -> Table:
    """A row per contender and number of replicas."""
    result = Table()
    columns = ("replicas", "ms per exchange", "over the fewest", "over all together", "bytes over the parameters'")
    for name in ("strategy", *columns):
        result.add_column(name, overflow="fold", justify="left" if name == "strategy" else "right")
    parameters = sum(p.numel() * p.element_size() for p in cnn().parameters())
    times = {
        (name, count): [ms for run in runs if run["contender"] == name for ms in lasted(run)]
        for count, runs in found.items()
        for name in contenders
    }
    fewest = min(found)
    for name in contenders:
        for count, runs in found.items():
            own = statistics.median(times[name, count])
            of = [run["ranks"] for run in runs if run["contender"] == name]
            sent = [TAU * statistics.mean(rank["bytes"] for rank in ranks) / parameters for ranks in of]
            result.add_row(
                name,
                str(count),
                spread(times[name, count], ".0f"),
                f"{own / statistics.median(times[name, fewest]):.2f}",
                f"{own / statistics.median(times[contenders[0], count]):.2f}",
                spread(sent),
            )
    return result


if __name__ == "__main__":
    main()
