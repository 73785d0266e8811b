"""torchft's DiLoCo beside this package's strategies: seconds to a training loss, on an emulated cluster.

    sudo python benchmarks/peers/torchft_diloco.py --torchft-python /path/to/its/bin/python
    sudo python benchmarks/peers/torchft_diloco.py --torchft-python ... --rates 200mbit --seeds 1 hetero_noloco:tau=16

torchft needs an environment of its own:

    python -m venv torchft-env
    torchft-env/bin/pip install torch torchft==0.2.0 scikit-learn

Two nodes of two ranks; devices by delay leave the cores free. All contenders have the same network, first weights,
global batches and inner optimizer; each seed has other weights and another order. Needs root, Linux and iproute2.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "cluster")]

import runner
from interpreter import add_option, torchft_python
from rich.console import Console
from rich.table import Table
from runner import spread

INTERVAL = 16  # steps between two exchanges of most contenders
WINDOW = 8  # steps over which the loss is averaged
PEERS = ("torchft_diloco:every=16", "torchft_diloco:every=16,delay=8", "torchft_diloco:every=16,replica=node")
OURS = (
    "hetero_diloco:tau=16,balance=off",
    "hetero_diloco:tau=16,wire=int8,balance=off",
    "hetero_diloco:tau=16,fragments=2,delay=4,wire=bf16,balance=off",
    "hetero_diloco_async:tau=16,balance=off",
    "hetero_gossip_async:every_n_steps=4,wire=bf16,balance=off",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ours", nargs="*", default=OURS, help="NAME or NAME:option=value,option=value")
    parser.add_argument("--peers", nargs="*", default=PEERS, help="the first of them is what all are compared with")
    parser.add_argument("--rates", nargs="+", default=["200mbit", "1gbit"], help="of each node's link")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=112, help="of each run")
    parser.add_argument("--batch", type=int, default=16, help="samples per rank and step")
    parser.add_argument("--delay", type=float, default=0.07, help="seconds that a step takes at least, without a core")
    parser.add_argument("--loss", type=float, default=1.0, help="to be reached, in the mean of 8 steps and all ranks")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each node")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one seed at one rate, at most")
    add_option(parser)
    options = parser.parse_args()
    python = torchft_python(options)
    console = Console(highlight=False, width=160)
    for rate in options.rates:
        options.rate = rate
        console.print(
            f"{options.nodes} nodes of {options.ranks} ranks, links of {rate}; {options.batch} samples per rank "
            f"and step, {1e3 * options.delay:.0f} ms at least; {options.seeds} seeds, {options.steps} steps each. "
            f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f}."
        )
        runs: list[dict[str, Any]] = []
        for seed in range(1, options.seeds + 1):
            numbers = [options.steps, options.batch, options.delay, seed]
            for script, interpreter, names in (
                ("torchft_digits.py", python, options.peers),
                ("our_digits.py", sys.executable, options.ours),
            ):
                path = Path(__file__).with_name(script).resolve()
                if names:
                    runs += runner.run_script(path, [*numbers, *names], options, None, console, interpreter)
        console.print(table(runs, [*options.peers, *options.ours], options.loss))
        console.print(f"Load average at the end {os.getloadavg()[0]:.2f}.\n")


def table(runs: list[dict[str, Any]], names: list[str], goal: float) -> Table:
    """A row per contender."""
    result = Table()
    columns = (f"seconds to a loss of {goal:g}", f"times as fast as {names[0]}", "steps to it", "ms per step")
    for name in ("strategy", *columns, "MB per step and node", "loss at the end"):
        result.add_column(name, overflow="fold", justify="left" if name == "strategy" else "right")
    seconds = {name: [reached(run["ranks"], goal)[0] for run in runs if run["contender"] == name] for name in names}
    for name in names:
        of = [run["ranks"] for run in runs if run["contender"] == name]
        times = [max((r["times"][-1] - r["times"][0]) / (len(r["times"]) - 1) for r in ranks) for ranks in of]
        sent = [max(bytes_per_step(rank["sent"]) for rank in ranks) / 1e6 for ranks in of]
        ratios = [base / own for base, own in zip(seconds[names[0]], seconds[name], strict=True)]
        steps = [reached(ranks, goal)[1] for ranks in of]
        ends = [losses(ranks)[-1] for ranks in of]
        result.add_row(
            name,
            spread(seconds[name], ".1f"),
            spread(ratios),
            spread([float(step) for step in steps], ".0f"),
            spread([1e3 * time for time in times], ".0f"),
            spread(sent),
            spread(ends),
        )
    return result


def bytes_per_step(sent: list[int]) -> float:
    """What a node sends in a step, over whole intervals, so that no contender's last exchange is left out."""
    last = max((len(sent) - 1) // INTERVAL * INTERVAL, 1)
    return (sent[last] - sent[0]) / last


def losses(ranks: list[dict[str, Any]]) -> list[float]:
    """The loss after each step: the mean of the last 8 steps and all ranks."""
    means = [statistics.mean(step) for step in zip(*(rank["losses"] for rank in ranks), strict=False)]
    return [statistics.mean(means[max(0, step - WINDOW) : step]) for step in range(1, len(means) + 1)]


def reached(ranks: list[dict[str, Any]], goal: float) -> tuple[float, int]:
    """Seconds of training after which a loss was reached on the slowest rank, and the steps; infinite if it was not."""
    began = min(rank["times"][0] for rank in ranks)
    for step, loss in enumerate(losses(ranks)):
        if step >= WINDOW and loss <= goal:
            return max(rank["times"][step] for rank in ranks) - began, step
    return float("inf"), len(ranks[0]["times"])


if __name__ == "__main__":
    main()
