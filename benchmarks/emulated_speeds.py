"""Time per step of `hetero_ddp` against Lightning's `ddp` on four ranks of emulated, unequal speed.

Rank i takes 10 ms a batch and k_i = 2, 2, 4, 8 ms a sample, by a delay that uses no core. Global batch: 64 samples.
By hand: even 138 ms, shares in proportion to measured speed 66, affine model and exact split 58, bound 56.5.

    python benchmarks/emulated_speeds.py [--repeats 3]
    python benchmarks/emulated_speeds.py --repeats 1      # a minute
"""

import statistics
import time
from typing import Any

import jobs
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.batching.shares import Cost, bound, makespan, split

FIXED, PER_SAMPLE, BATCH, STEPS, SKIP = 0.010, (0.002, 0.002, 0.004, 0.008), 64, 60, 24
COSTS = [Cost(FIXED, k) for k in PER_SAMPLE]


class Emulated(pl.LightningModule):
    def __init__(self, delay: bool) -> None:
        super().__init__()
        self.net, self.delay = torch.nn.Linear(16, 1), delay

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.delay:
            time.sleep(COSTS[self.global_rank].seconds(len(batch[0])))
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(strategy: Any, delay: bool) -> dict[str, Any]:
    clock, module = jobs.Clock(), Emulated(delay)
    trainer = jobs.quiet_trainer(strategy=strategy, max_steps=STEPS, callbacks=[clock])
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(BATCH * STEPS, 16)), batch_size=BATCH // 4))
    shares = (
        strategy.accounting.planner.shares(strategy.accounting.step)
        if isinstance(strategy, HeteroDDPStrategy)
        else None
    )
    return {"step": statistics.median(clock.steps(SKIP)[0]), "shares": shares}


def worker(repeats: int) -> dict[str, Any]:
    fits = {
        "ddp": lambda: fit("ddp", True),
        "hetero_ddp": lambda: fit(HeteroDDPStrategy(), True),
        "no delay": lambda: fit(HeteroDDPStrategy(), False),
    }
    return jobs.alternate(repeats, fits)


def main() -> None:
    repeats = jobs.options(__doc__, 3).repeats
    results = jobs.launch(len(PER_SAMPLE), repeats)
    even = [BATCH // len(COSTS)] * len(COSTS)
    ms = {name: [1e3 * run["step"] for run in runs] for name, runs in results.items()}
    print(f"\n{repeats} alternating runs; {jobs.machine()}")
    print(f"by hand:    even {1e3 * makespan(even, COSTS):.1f} ms, best split {split(BATCH, COSTS)} ", end="")
    print(f"{1e3 * makespan(split(BATCH, COSTS), COSTS):.1f} ms, bound {1e3 * bound(BATCH, COSTS):.1f} ms")
    print("median ms per step over the runs (and their range):")
    for name, values in ms.items():
        print(f"  {name:10s}  {jobs.spread(values)}")
    floor = 1e3 * bound(BATCH, COSTS) + statistics.median(ms["no delay"])
    ratios = [a / b for a, b in zip(ms["ddp"], ms["hetero_ddp"], strict=True)]
    print(f"shares:                      {[run['shares'] for run in results['hetero_ddp']]}")
    print(f"speed-up over ddp:           {jobs.spread(ratios)}")
    print(f"over bound plus fixed cost:  {jobs.spread([value / floor for value in ms['hetero_ddp']])}")


if __name__ == "__main__":
    jobs.start(main, worker)
