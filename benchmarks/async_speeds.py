"""`hetero_diloco_async` on four ranks of speeds 4:2:1:1 with even shares: who waits, and what is learned.

Devices are emulated by a delay that uses no core. Samples of all ranks are counted over a window of the fit, over what
the same ranks do in the same time when each trains alone. Then the loss on test digits after equal samples, beside
`hetero_diloco`, with all delays a twentieth.

    python benchmarks/async_speeds.py [--repeats 3] [--seeds 3] [--window 12]
    python benchmarks/async_speeds.py --repeats 0 --seeds 5                  # the losses only
"""

import os
import statistics
import time
from typing import Any

import jobs
import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from straggler import digits
from torch import nn
from torch.utils.data import DataLoader, Subset

from lightning_hetero import DiLoCoAsyncStrategy, DiLoCoStrategy

SECONDS, BATCH, WARM = (0.1, 0.2, 0.4, 0.4), 16, 8.0  # of a step of each rank; samples; seconds before the window
STEPS, TAU = 300, 20  # of the fits that are compared by their loss
OUTER = {"outer_lr": 1.0, "outer_momentum": 0.5}  # there are 15 outer steps; with a momentum of 0.9 they swing


class Reader(pl.LightningModule):
    """Reads digits, at this rank's speed for so many seconds, and then as fast as it can."""

    def __init__(self, scale: float, seconds: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.delay, self.limit = scale * SECONDS[int(os.environ["RANK"])], seconds
        self.starts: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.starts.append(time.time())  # of one machine: the same on all ranks
        if self.starts[-1] < self.starts[0] + self.limit:
            time.sleep(self.delay)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(name: str, steps: int, scale: float, seconds: float, seed: int) -> Reader:
    """Train for an epoch."""
    pl.seed_everything(seed, verbose=False)
    options: dict[str, Any] = {"max_epochs": 1}
    ranks = len(SECONDS)
    if name == "alone":
        ranks, strategy = 1, SingleDeviceStrategy(torch.device("cpu"))
        options |= {"devices": 1}
    else:
        kind = DiLoCoAsyncStrategy if name == "hetero_diloco_async" else DiLoCoStrategy
        strategy = kind(tau=TAU, balance="off", **OUTER)
    module, data = Reader(scale, seconds), digits(training=True)
    order = torch.arange(steps * BATCH * ranks) % len(data)
    trainer = jobs.quiet_trainer(**{"strategy": strategy, **options})
    trainer.fit(module, DataLoader(Subset(data, order.tolist()), batch_size=BATCH, shuffle=True))
    return module


def rate(name: str, window: float) -> list[float]:
    """Steps per second of each rank in a window that no rank leaves."""
    torch.distributed.is_initialized() and torch.distributed.barrier()
    steps = round(1.3 * (WARM + window) / SECONDS[0])
    module = fit(name, steps, 1.0, WARM + window + 2, seed=0)
    began: list[Any] = [None] * len(SECONDS)
    torch.distributed.all_gather_object(began, module.starts)
    begin = max(starts[0] for starts in began) + WARM
    return [_steps_until(starts, begin + window) - _steps_until(starts, begin) for starts in began]


def _steps_until(starts: list[float], when: float) -> float:
    """Steps, with the part of the one under way."""
    after = next(i for i, start in enumerate(starts) if start > when)
    return after - 1 + (when - starts[after - 1]) / (starts[after] - starts[after - 1])


def loss(name: str, seed: int) -> float:
    """On test digits after equal samples, of the weights that a fit leaves."""
    module = fit(name, STEPS, 0.05, float("inf"), seed)
    images, labels = digits(training=False).tensors
    with torch.no_grad():
        return nn.functional.cross_entropy(module.net(images), labels).item()


def worker(repeats: int, seeds: int, window: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    names = ("hetero_diloco_async", "hetero_diloco")
    fit(names[0], 2, 0.0, 0.0, seed=0)  # makes the process group, which `alone` needs afterwards
    rates = jobs.alternate(repeats, {name: lambda name=name: rate(name, window) for name in (*names, "alone")})
    losses = {name: [loss(name, seed) for seed in range(seeds)] for name in names}
    return {"rates": rates, "losses": losses}


def main() -> None:
    asked = jobs.options(__doc__, 3, seeds=3, window=12)
    found = jobs.launch(len(SECONDS), asked.repeats, asked.seeds, asked.window)
    print(f"\n{asked.repeats} alternating runs, {asked.seeds} seeds; {jobs.machine()}")
    solo = found["rates"].pop("alone")
    for name, runs in found["rates"].items() if asked.repeats else ():
        parts = [sum(run) / sum(alone) for run, alone in zip(runs, solo, strict=True)]
        print(f"  {name:22s} samples over the sum of solo speeds {jobs.spread(parts)}")
    for name, losses in found["losses"].items():
        apart = [own / base for own, base in zip(losses, found["losses"]["hetero_diloco"], strict=True)]
        mean, sd = statistics.mean(losses), statistics.stdev(losses) if len(losses) > 1 else 0.0
        print(f"  {name:22s} loss {mean:.3f} (sd {sd:.3f}), over hetero_diloco {jobs.spread(apart)}")


if __name__ == "__main__":
    jobs.start(main, worker)
