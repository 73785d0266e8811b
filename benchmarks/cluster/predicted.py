"""Predicted against measured time per step, on emulated clusters: links, nodes and speeds vary, and so do strategies.

    sudo python benchmarks/cluster/predicted.py                        # twelve clusters, some fifteen minutes
    sudo python benchmarks/cluster/predicted.py --rates 200mbit --shapes 2x2

Devices by delay. In each cluster every device trains by itself first: its time per step, and the numbers that were
given for the links, are all that the prediction knows (`lightning-hetero doctor` would measure them).
"""

import argparse
import json
import os
import statistics
from typing import NamedTuple

import runner
from rich.console import Console
from rich.table import Table

from lightning_hetero.forecast.cluster import Cluster, Way
from lightning_hetero.forecast.command import bytes_per_second
from lightning_hetero.forecast.predictions import predictions
from lightning_hetero.workload.shares import Cost

EVERY, FIXED = 8, 0.012  # steps between rare exchanges; seconds of a step that no sample needs
PARAMETERS = 2_150_000
#: What runs, by the string under which it is predicted.
CONTENDERS = {
    "ddp": "ddp",
    "hetero_ddp": "hetero_ddp",
    "hetero_node": f"hetero_node:every_n_steps={EVERY}",
    "hetero_daso": "hetero_daso:warmup=0,cooldown=0,patience=1000,wait=auto",
    "hetero_diloco": f"hetero_diloco:tau={EVERY},replica=node",
    "hetero_easgd": f"hetero_easgd:tau={EVERY},moving_rate=auto",
    "hetero_gossip": f"hetero_gossip:every_n_steps={EVERY}",
}
SPEEDS = {"alike": (0.3,), "4:2:1:1": (0.8, 0.4, 0.2, 0.2)}  # samples per millisecond, repeated


class Outcome(NamedTuple):
    """A strategy on a cluster: seconds per step."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["100mbit", "200mbit", "1gbit"])
    parser.add_argument("--shapes", nargs="+", default=["2x2", "4x1"], help="nodes x ranks of each")
    parser.add_argument("--speeds", nargs="+", choices=list(SPEEDS), default=list(SPEEDS))
    parser.add_argument("--batch", type=int, default=24, help="samples per rank and step, on average")
    parser.add_argument("--steps", type=int, default=44, help="of each run")
    parser.add_argument("--skip", type=int, default=20, help="the first steps, which are not measured")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a cluster")
    options = parser.parse_args()
    console = Console(highlight=False, width=120)
    console.print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f}")
    everything: list[list[Outcome]] = []
    for rate in options.rates:
        for shape in options.shapes:
            for speeds in options.speeds:
                options.rate, (options.nodes, options.ranks) = rate, map(int, shape.split("x"))
                found = on_cluster(options, SPEEDS[speeds], console)
                console.print(table(f"{shape} ranks, {rate}, {speeds}", found))
                everything.append(found)
    console.print(summary(everything))
    console.print(f"load average at the end {os.getloadavg()[0]:.2f}")


def on_cluster(options: argparse.Namespace, speeds: tuple[float, ...], console: Console) -> list[Outcome]:
    """Predict and measure all contenders on one cluster."""
    world = options.nodes * options.ranks
    costs = [[FIXED, 1e-3 / speeds[rank % len(speeds)]] for rank in range(world)]
    numbers = 1, options.steps, options.skip, options.batch, json.dumps(costs)
    runs = runner.run_script("unequal_job.py", ["cnn", *numbers, "alone", *CONTENDERS.values()], options, None, console)
    times = {run["contender"]: [statistics.mean(rank["steps"]) for rank in run["ranks"]] for run in runs}
    known = {one.name: one for one in predictions(cluster_of(options, costs, times["alone"]), EVERY)}
    return [Outcome(name, known[name].step, max(times[text])) for name, text in CONTENDERS.items()]


def cluster_of(options: argparse.Namespace, costs: list[list[float]], alone: list[float]) -> Cluster:
    """What is known before anything is trained together."""
    ranks = []
    for (_, per_sample), seconds in zip(costs, alone, strict=True):
        ranks.append(Cost(max(seconds - per_sample * options.batch, 0.0), per_sample))
    nodes = tuple(tuple(ranks[i : i + options.ranks]) for i in range(0, len(ranks), options.ranks))
    way = Way(3e-4, bytes_per_second(options.rate))
    return Cluster(nodes, options.batch * len(ranks), 4 * PARAMETERS, Way(1e-4, 1.5e9), way)


def table(title: str, found: list[Outcome]) -> Table:
    """A row for each strategy."""
    result = Table("strategy", "predicted, ms", "measured, ms", "error", title=title)
    for one in found:
        result.add_row(one.name, f"{1e3 * one.predicted:.0f}", f"{1e3 * one.measured:.0f}", f"{one.error:+.0%}")
    return result


def summary(everything: list[list[Outcome]]) -> str:
    """How far off the predictions are, and whether they name the best."""
    errors = sorted(abs(one.error) for found in everything for one in found)
    named = 0
    for found in everything:
        chosen = min(found, key=lambda one: one.predicted)
        named += chosen.measured <= 1.05 * min(one.measured for one in found)
    return (
        f"{len(errors)} predictions on {len(everything)} clusters: median error {statistics.median(errors):.1%}, "
        f"nine in ten below {errors[int(0.9 * (len(errors) - 1))]:.1%}, worst {errors[-1]:.1%}. The predicted best is "
        f"within 5% of the measured best on {named} of {len(everything)}."
    )


if __name__ == "__main__":
    main()
