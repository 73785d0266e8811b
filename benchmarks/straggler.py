"""What the others do while one rank is slow: synchronous against asynchronous elastic averaging.

Four ranks on one machine, a step of 20 ms by delay, and 100 ms more on the last rank, which gets no smaller a share
(balance="off"). Samples of all ranks are counted over a window in the middle of an epoch, in which no rank waits for
the epoch's end; the fast ranks' rate is compared with that of a rank that trains alone.

Then the accuracy: at the end of the epoch the center reads test digits that are never trained on. All delays are a
quarter, which leaves the slow rank as slow beside the others, so that there is time for many seeds.

    python benchmarks/straggler.py [--repeats 3] [--seeds 10]
"""

import os
import statistics
import time
from typing import Any

import jobs
import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import EmulatedSpeed
from lightning_hetero.strategies.algorithms import (
    EASGDAsyncStrategy,
    EASGDHogwildStrategy,
    EASGDOverlapStrategy,
    EASGDStrategy,
    MEASGDAsyncStrategy,
)

RANKS, STEPS, BATCH, COST, LATE = 4, 150, 16, 0.02, 0.1
ELASTIC: dict[str, Any] = {"tau": 4, "moving_rate": "auto", "balance": "off"}
CONTENDERS = {
    "hetero_easgd": lambda: EASGDStrategy(**ELASTIC),
    "hetero_easgd_overlap": lambda: EASGDOverlapStrategy(**ELASTIC),
    "hetero_easgd_async, shared memory": lambda: EASGDAsyncStrategy(center="shared_memory", **ELASTIC),
    "hetero_easgd_async, thread": lambda: EASGDAsyncStrategy(center="thread", **ELASTIC),
    "hetero_measgd_async": lambda: MEASGDAsyncStrategy(**ELASTIC),
    "hetero_easgd_hogwild": lambda: EASGDHogwildStrategy(**ELASTIC),
}


def digits(training: bool) -> TensorDataset:
    data = load_digits()
    chosen = (torch.arange(len(data.target)) % 5 != 0) == training
    return TensorDataset(torch.tensor(data.data, dtype=torch.float32)[chosen] / 16, torch.tensor(data.target)[chosen])


class Reader(pl.LightningModule):
    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.momentum, self.ends = momentum, []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.ends.append(time.time())  # of one machine: the same on all ranks
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5 * (1 - self.momentum), momentum=self.momentum)


def fit(name: str, late: float, scale: float, seed: int) -> dict[str, Any]:
    """Train for an epoch; when this rank has begun each of its steps, and what the center reads in the end."""
    pl.seed_everything(seed, verbose=False)
    ranks = int(os.environ["WORLD_SIZE"])
    costs = [(scale * COST, 0.0)] * (ranks - 1) + [(scale * (COST + late), 0.0)]
    trainer = jobs.quiet_trainer(strategy=CONTENDERS[name](), max_epochs=1, callbacks=[EmulatedSpeed(costs)])
    module, data = Reader(0.9 if "measgd" in name else 0.0), digits(training=True)
    order = torch.arange(STEPS * BATCH * ranks) % len(data)
    trainer.fit(module, DataLoader(torch.utils.data.Subset(data, order.tolist()), batch_size=BATCH, shuffle=True))
    images, labels = digits(training=False).tensors
    with torch.no_grad():
        accuracy = (module.net(images).argmax(1) == labels).float().mean().item()
    return {"steps": module.ends, "accuracy": accuracy}


def worker(repeats: int, late: float, scale: float) -> list[Any]:
    torch.set_num_threads(1)
    seeds = {name: iter(range(repeats)) for name in CONTENDERS}
    results = jobs.alternate(
        repeats, {name: lambda name=name: fit(name, late, scale, next(seeds[name])) for name in CONTENDERS}
    )
    gathered: list[Any] = [None] * int(os.environ["WORLD_SIZE"])
    torch.distributed.all_gather_object(gathered, results)
    return gathered


def rates(runs: list[dict[str, Any]]) -> list[float]:
    """Steps per second of each rank, over a window in which all are between their 10th step and their last."""
    begin = max(run["steps"][10] for run in runs)
    end = min(run["steps"][-1] for run in runs)
    return [sum(begin < step <= end for step in run["steps"]) / (end - begin) for run in runs]


def main() -> None:
    options = jobs.options(__doc__, 3, seeds=10)
    if options.repeats:
        speed(options.repeats)
    if options.seeds:
        accuracy(options.seeds)


def speed(repeats: int) -> None:
    """Print who has done how much."""
    alone = jobs.launch(1, repeats, 0.0, 1.0)[0]
    together = jobs.launch(RANKS, repeats, LATE, 1.0)
    base = "hetero_easgd"
    samples = {name: [sum(rates([r[name][i] for r in together])) for i in range(repeats)] for name in CONTENDERS}
    print(f"\n{repeats} alternating runs; {jobs.machine()}\n")
    print(f"{'':36s}{'samples over ' + base:30s}fast ranks over one alone")
    for name in CONTENDERS:
        times = [a / b for a, b in zip(samples[name], samples[base], strict=True)]
        single = statistics.median(rates([run])[0] for run in alone[name])
        fast = [min(rates([r[name][i] for r in together])[:-1]) / single for i in range(repeats)]
        print(f"{name:36s}{jobs.spread(times):30s}{jobs.spread(fast)}")


def accuracy(seeds: int) -> None:
    """Print what the center has learned, paired by seed."""
    found = jobs.launch(RANKS, seeds, LATE, 0.25)[0]
    base = [100 * run["accuracy"] for run in found["hetero_easgd"]]
    print(f"\n{seeds} seeds; {jobs.machine()}\n")
    print(f"{'':36s}{'accuracy of the center (sd)':30s}minus hetero_easgd (standard error)")
    for name in CONTENDERS:
        own = [100 * run["accuracy"] for run in found[name]]
        apart = [a - b for a, b in zip(own, base, strict=True)]
        error = statistics.stdev(apart) / len(apart) ** 0.5
        mean = f"{statistics.mean(own):.2f}% ({statistics.stdev(own):.2f})"
        print(f"{name:36s}{mean:30s}{statistics.mean(apart):+.2f} ({error:.2f})")


if __name__ == "__main__":
    jobs.start(main, worker)
