"""Predicted against measured time per step, on emulated clusters: links, nodes and speeds vary, and so do strategies.

    sudo python benchmarks/cluster/predicted.py                        # 24 clusters, some eighty minutes
    sudo python benchmarks/cluster/predicted.py --rates 1gbit --shapes 2x1 --speeds alike    # two minutes, one cluster
    sudo python benchmarks/cluster/predicted.py --into all.json                # goes on where it was broken off

Devices by delay. In each cluster every device trains by itself first, and the links are measured as
`lightning-hetero doctor` does it: that, and how early in a step the model's gradients are ready, is all that the
prediction knows. `hetero_auto` measures for itself, while it trains, and is compared with the fastest of the others
after that.
"""

import argparse
import json
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import runner
import torch
from digits import cnn
from rich.console import Console
from rich.table import Table

from lightning_hetero.batching.shares import Cost
from lightning_hetero.callbacks.emulation import EmulatedSpeed
from lightning_hetero.planning.cluster import Cluster, LinkModel
from lightning_hetero.planning.predictions import WIRES, predictions

EVERY, FIXED = 8, 0.012  # steps between rare exchanges; seconds of a step that no sample needs
PARAMETERS = 2_150_000


class Contender(NamedTuple):
    """Contender, with the strategy string and wire under which it is predicted.

    Attributes:
        settles: steps after which its shares stay, on unlike devices.
        steps: that are measured then.
    """

    text: str
    name: str
    wire: str = "fp32"
    settles: int = 7 * EVERY  # ranks tell each other their speeds when they meet
    steps: int = 4 * EVERY


CONTENDERS = (
    Contender("ddp", "ddp", settles=8, steps=16),
    Contender("hetero_ddp", "hetero_ddp", settles=28, steps=16),
    Contender(f"hetero_node:every_n_steps={EVERY}", "hetero_node"),
    Contender(f"hetero_node:every_n_steps={EVERY},wire=int8", "hetero_node", "int8"),
    Contender("hetero_daso:warmup=0,cooldown=0,patience=1000,wait=auto", "hetero_daso"),
    Contender(f"hetero_easgd:tau={EVERY},moving_rate=auto", "hetero_easgd"),
    Contender(f"hetero_easgd_async:tau={EVERY},moving_rate=auto", "hetero_easgd_async", settles=25 * EVERY),
    # Shares by messages, one a second; pairs are drawn at random, within nodes and between them.
    Contender(f"hetero_gossip:every_n_steps={EVERY}", "hetero_gossip", settles=25 * EVERY, steps=16 * EVERY),
    Contender(f"hetero_gossip_async:every_n_steps={EVERY}", "hetero_gossip_async", settles=25 * EVERY),
)
AUTO = f"hetero_auto:every={EVERY},measure=16"
SPEEDS = {"alike": (0.3,), "4:2:1:1": (0.8, 0.4, 0.2, 0.2)}  # samples per millisecond, repeated


class Outcome(NamedTuple):
    """A strategy on a cluster: seconds of a step of the slowest rank, which a fit takes for each of its steps.

    Attributes:
        predicted: ``None`` for `hetero_auto`.
        seldom: whether it would exchange too seldom to be advised, as `lightning-hetero plan` says.
    """

    name: str
    predicted: float | None
    measured: float
    seldom: bool = False

    @property
    def error(self) -> float | None:
        return None if self.predicted is None else self.predicted / self.measured - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["100mbit", "200mbit", "1gbit"])
    parser.add_argument("--shapes", nargs="+", default=["2x1", "2x2", "3x1", "4x1"], help="nodes x ranks of each")
    parser.add_argument("--speeds", nargs="+", choices=list(SPEEDS), default=list(SPEEDS))
    parser.add_argument("--batch", type=int, default=24, help="samples per rank and step, on average")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a cluster")
    parser.add_argument("--into", type=Path, help="JSON file for outcomes; those in it are not run again")
    options = parser.parse_args()
    console = Console(highlight=False, width=120)
    console.print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f}")
    kept: dict[str, list[Any]] = {}  # by the cluster
    if options.into and options.into.exists():
        kept = json.loads(options.into.read_text())
    for rate in options.rates:
        for shape in options.shapes:
            for speeds in options.speeds:
                options.rate, (options.nodes, options.ranks) = rate, map(int, shape.split("x"))
                cluster = f"{shape} ranks, {rate}, {speeds}"
                if cluster not in kept:
                    kept[cluster] = on_cluster(options, SPEEDS[speeds], console)
                console.print(table(cluster, [Outcome(*one) for one in kept[cluster]]))
                if options.into:
                    options.into.write_text(json.dumps(kept))
    console.print(summary([[Outcome(*one) for one in found] for found in kept.values()]))
    console.print(f"load average at the end {os.getloadavg()[0]:.2f}")


def on_cluster(options: argparse.Namespace, speeds: tuple[float, ...], console: Console) -> list[Outcome]:
    """Predict and measure all contenders on one cluster."""
    world = options.nodes * options.ranks
    costs = [[FIXED, 1e-3 / speeds[rank % len(speeds)]] for rank in range(world)]
    alike = len(set(speeds)) == 1
    settled = {one.text: min(one.settles, 16) if alike else one.settles for one in CONTENDERS}
    runs = {"alone": (8, 16), AUTO: ((4 if alike else 25) * EVERY, 4 * EVERY)}
    runs |= {one.text: (settled[one.text], one.steps) for one in CONTENDERS}
    numbers = options.batch, json.dumps(costs), json.dumps(runs)
    links, *found = runner.run_script("predicted_job.py", ["cnn", *numbers], options, None, console)
    times = {run["contender"]: max(rank["ms"] for rank in run["ranks"]) / 1e3 for run in found}
    [alone] = (run for run in found if run["contender"] == "alone")
    cluster = cluster_of(options, costs, [rank["ms"] / 1e3 for rank in alone["ranks"]], links)
    known = {(one.name, wire): one for wire in WIRES for one in predictions(cluster, EVERY, wire)}
    outcomes = []
    for one in CONTENDERS:
        prediction = known[one.name, one.wire]
        outcomes.append(Outcome(one.text, prediction.step, times[one.text], prediction.seldom))
    return [*outcomes, Outcome(AUTO, None, times[AUTO])]


def cluster_of(
    options: argparse.Namespace, costs: list[list[float]], alone: list[float], links: dict[str, Any]
) -> Cluster:
    """Measurements of the ranks, before they train together."""
    ranks = []
    for (_, per_sample), seconds in zip(costs, alone, strict=True):
        ranks.append(Cost(max(seconds - per_sample * options.batch, 0.0), per_sample))
    nodes = tuple(tuple(ranks[i : i + options.ranks]) for i in range(0, len(ranks), options.ranks))
    between = LinkModel(*links["between"])
    within = LinkModel(*links["within"]) if links["within"] else between
    return Cluster(nodes, options.batch * len(ranks), 4 * PARAMETERS, within, between, hidden(options.batch))


def hidden(batch: int) -> float:
    """The part of a step that is left, in the mean over all gradients, when they are ready."""
    net = cnn()
    parameters = list(net.parameters())
    ready = [0.0] * len(parameters)

    def note(index: int, _: torch.Tensor) -> None:
        ready[index] = time.thread_time()

    for index, parameter in enumerate(parameters):
        parameter.register_hook(partial(note, index))
    left = []
    for _ in range(20):
        loss = net(torch.randn(batch, 1, 8, 8)).sum()
        began = time.thread_time()
        loss.backward()
        ended = time.thread_time()
        sizes = zip(parameters, ready, strict=True)
        left.append(sum(p.numel() * (ended - at) for p, at in sizes) / (ended - began) / PARAMETERS)
    return EmulatedSpeed.BACKWARD * statistics.median(left)


def table(title: str, found: list[Outcome]) -> Table:
    """A row for each strategy."""
    result = Table("strategy", "predicted, ms", "measured, ms", "error", title=title, title_justify="left")
    for name, predicted, measured, _ in found:
        error = "" if predicted is None else f"{predicted / measured - 1:+.0%}"
        result.add_row(name, "" if predicted is None else f"{1e3 * predicted:.0f}", f"{1e3 * measured:.0f}", error)
    return result


def summary(everything: list[list[Outcome]]) -> str:
    """Errors of the predictions, whether they name the best, and how near to it `hetero_auto` comes."""
    errors = sorted(abs(one.error) for found in everything for one in found if one.error is not None)
    named, reached = 0, []
    for *found, auto in everything:
        advised = [one for one in found if not one.seldom]
        chosen = min(advised, key=lambda one: one.predicted or 0.0)
        best = min(one.measured for one in advised)
        named += chosen.measured <= 1.05 * best
        reached.append(best / auto.measured)
    return (
        f"{len(errors)} predictions on {len(everything)} clusters: median error {statistics.median(errors):.1%}, "
        f"nine in ten below {errors[int(0.9 * (len(errors) - 1))]:.1%}, worst {errors[-1]:.1%}. The predicted best is "
        f"within 5% of the measured best on {named} of {len(everything)}. hetero_auto reaches "
        f"{statistics.median(reached):.0%} of the best one's speed in the median, {min(reached):.0%} at least, and "
        f"95% or more on {sum(part >= 0.95 for part in reached)} of {len(everything)}."
    )


if __name__ == "__main__":
    main()
