"""Whether a fast node waits for a slow one between exchanges: 50 steps beside a node that sleeps 20 ms in each.

Two nodes of one rank; they would meet at step 60. The fast node's time for 50 steps beside the sleeper, over its time
beside a node as fast as itself, in alternating runs.

    python benchmarks/sleeper.py [--repeats 7]
"""

import time
from typing import Any

import jobs
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import NodeAverageStrategy

STEPS = 50


class Module(pl.LightningModule):
    def __init__(self, sleep: float) -> None:
        super().__init__()
        self.net, self.sleep = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)), sleep

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1:
            time.sleep(self.sleep)
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(strategy: Any, sleep: float) -> float:
    torch.distributed.is_initialized() and torch.distributed.barrier()
    clock = jobs.Clock()
    trainer = jobs.quiet_trainer(strategy=strategy, max_steps=60, callbacks=[clock])
    trainer.fit(Module(sleep), DataLoader(TensorDataset(torch.randn(2 * 60 * 32, 64)), batch_size=32))
    return clock.wall[STEPS] - clock.wall[0]


def worker(repeats: int) -> dict[str, Any]:
    def ours() -> NodeAverageStrategy:
        return NodeAverageStrategy(every_n_steps=60, balance="off", ranks_per_node=1)

    fits = {
        "hetero_node, both fast": lambda: fit(ours(), 0.0),
        "hetero_node, beside a sleeper": lambda: fit(ours(), 0.02),
        "ddp, both fast": lambda: fit("ddp", 0.0),
        "ddp, beside a sleeper": lambda: fit("ddp", 0.02),
    }
    return jobs.alternate(repeats, fits)


def main() -> None:
    repeats = jobs.options(__doc__, 7).repeats
    results = jobs.launch(2, repeats)
    print(f"\n{repeats} alternating runs; {jobs.machine()}")
    print("the fast node's time for 50 steps beside a sleeper, over that beside a node as fast as itself:")
    for name in ("hetero_node", "ddp"):
        pairs = zip(results[f"{name}, beside a sleeper"], results[f"{name}, both fast"], strict=True)
        print(f"  {name:12s} {jobs.spread([a / b for a, b in pairs])}")


if __name__ == "__main__":
    jobs.start(main, worker)
