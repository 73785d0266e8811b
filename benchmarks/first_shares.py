"""Speed of the first 72 steps, against the best split, by strategy, on four ranks of emulated, unequal speed.

Rank i takes (10 + 4 n) / speed_i ms for n samples, with speeds 0.8, 0.4, 0.2, 0.2, by a delay that uses no core. Global
batch: 64 samples; 72 steps in epochs of 12. Shares are even at first, and nothing is known of the ranks. By hand: even
370 ms, best split (35, 16, 7, 6) 190 ms.

    python benchmarks/first_shares.py [--repeats 3]
    python benchmarks/first_shares.py --repeats 1      # two minutes
"""

import time
from itertools import pairwise
from typing import Any

import jobs
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_hetero
from lightning_hetero.batching.shares import Cost, makespan, split

SPEEDS, BATCH, STEPS, EPOCH = (0.8, 0.4, 0.2, 0.2), 64, 72, 12
COSTS = [Cost(0.010 / speed, 0.004 / speed) for speed in SPEEDS]
STRATEGIES: dict[str, dict[str, Any]] = {
    "HeteroDDPStrategy": {},
    "NodeAverageStrategy": {"every_n_steps": 4},
    "DASOStrategy": {"warmup": 0, "cooldown": 0, "global_every": 4},
    "DiLoCoStrategy": {"tau": 12, "replica": "rank"},
    "GossipAsyncStrategy": {"every_n_steps": 4, "replica": "rank"},
    "EASGDAsyncStrategy": {"tau": 12, "moving_rate": "auto", "replica": "rank"},
}


class Emulated(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.done = torch.nn.Linear(16, 1), list[tuple[float, int]]()

    def on_train_start(self) -> None:
        self.done.append((time.perf_counter(), 0))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(COSTS[self.global_rank].seconds(len(batch[0])))
        self.done.append((time.perf_counter(), len(batch[0])))
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def rate(ranks: list[list[tuple[float, int]]], part: float) -> float:
    """Samples per second of all ranks, from a part of the run on until the first rank ends."""
    first, end = max(rank[0][0] for rank in ranks), min(rank[-1][0] for rank in ranks)
    begin, samples = first + part * (end - first), 0.0
    for rank in ranks:
        for (began, _), (ended, n) in pairwise(rank):
            inside = max(min(ended, end) - max(began, begin), 0.0)
            samples += n * inside / (ended - began)
    return samples / (end - begin)


def fit(name: str, options: dict[str, Any]) -> list[float]:
    strategy, module = getattr(lightning_hetero, name)(ranks_per_node=1, **options), Emulated()
    trainer = jobs.quiet_trainer(strategy=strategy, max_epochs=STEPS // EPOCH)
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(BATCH * EPOCH, 16)), batch_size=BATCH // 4))
    ranks: list[Any] = [None] * len(SPEEDS)
    torch.distributed.all_gather_object(ranks, module.done)
    shares = strategy.accounting.planner.shares(strategy.accounting.step)
    return [rate(ranks, 0.0), rate(ranks, 0.4), *shares]


def worker(repeats: int) -> dict[str, Any]:
    return jobs.alternate(repeats, {name: lambda of=(name, options): fit(*of) for name, options in STRATEGIES.items()})


def main() -> None:
    repeats = jobs.options(__doc__, 3).repeats
    results = jobs.launch(len(SPEEDS), repeats)
    best = split(BATCH, COSTS)
    possible = BATCH / makespan(best, COSTS)
    print(f"\n{repeats} alternating runs of {STEPS} steps; {jobs.machine()}")
    print(f"part of the samples per second of the best split, {best}:")
    for name, runs in results.items():
        whole, later = (jobs.spread([run[i] / possible for run in runs]) for i in (0, 1))
        print(f"  {name:20s} whole run {whole}, without its first 40% {later}, shares {[run[2:] for run in runs]}")


if __name__ == "__main__":
    jobs.start(main, worker)
