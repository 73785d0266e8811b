"""Time to deal a batch by cost, and the gain in steps, as the cost model has it.

Lengths are lognormal, with a deviation of 0.8; ranks have speeds 1, 2, 4 and 8 in turn, within 10%, and fixed costs of
up to the cost of a mean sample. Nothing is trained: seconds of steps are those of the model, `a + k * cost`. "by
samples" is the best split of the batch as it is drawn, by the same model.

    python benchmarks/deal.py [--repeats 20]
"""

import argparse
import time
from statistics import median

import numpy as np

from lightning_hetero.batching.deal import Machines, deal_additive, deal_padded
from lightning_hetero.batching.shares import Cost, split

SIZES = ((2, 32), (4, 64), (4, 256), (6, 256), (8, 64), (16, 512), (64, 1024), (64, 4096))
DEALS = {"additive": deal_additive, "padded": deal_padded}


def seconds(lengths: np.ndarray, ranks: np.ndarray, rule: str, machines: Machines) -> float:
    """Seconds of the slowest rank."""
    parts = [lengths[ranks == rank] for rank in range(len(machines.fixed))]
    loads = [float(part.sum() if rule == "additive" else len(part) * part.max(initial=0.0)) for part in parts]
    return float((machines.fixed + machines.per_unit * np.array(loads)).max())


def measure(rule: str, world: int, samples: int, repeats: int) -> tuple[float, float, float]:
    """Median and least milliseconds of a deal, and how many times as fast the step is as with a split by samples."""
    draw, times, gains = np.random.default_rng(world + samples), [], []
    for _ in range(repeats):
        lengths = np.ceil(draw.lognormal(4.0, 0.8, samples))
        per_unit = 1 / (np.array([1.0, 2.0, 4.0, 8.0] * 16)[:world] * draw.uniform(0.9, 1.1, world))
        machines = Machines.of(draw.uniform(0, lengths.mean(), world) * per_unit.min(), per_unit, [1] * world)
        began = time.perf_counter()
        dealt = DEALS[rule](lengths, machines)
        times.append(1e3 * (time.perf_counter() - began))
        mean = lengths.mean() if rule == "additive" else lengths.max()
        costs = [Cost(float(a), float(k * mean)) for a, k in zip(machines.fixed, per_unit, strict=True)]
        even = np.repeat(np.arange(world), split(samples, costs, [1] * world))
        gains.append(seconds(lengths, even, rule, machines) / seconds(lengths, dealt, rule, machines))
    return median(times), min(times), median(gains)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    print("| ranks, samples | rule | ms per deal, median (least) | steps, times as fast as by samples |")
    print("|---|---|---:|---:|")
    for world, samples in SIZES:
        for rule in DEALS:
            usual, least, gain = measure(rule, world, samples, repeats)
            print(f"| {world}, {samples} | {rule} | {usual:.2f} ({least:.2f}) | {gain:.2f} |", flush=True)


if __name__ == "__main__":
    main()
