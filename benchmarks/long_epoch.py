"""One long epoch on four ranks of unequal speed: strategies that agree on new shares in the background, against `ddp`.

Devices by a delay that uses no core do 0.8, 0.4, 0.2 and 0.2 samples in a millisecond and take 12 ms more for a batch.

    python benchmarks/long_epoch.py [--repeats 3] [--steps 120] [--batch 32]
"""

import time
from typing import Any

import jobs
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import EASGDAsyncStrategy, GossipAsyncStrategy

FIXED, SPEEDS = 0.012, (800.0, 400.0, 200.0, 200.0)  # seconds; samples per second


class Emulated(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.samples = torch.nn.Linear(16, 1), 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(FIXED + len(batch[0]) / SPEEDS[self.global_rank])
        self.samples += len(batch[0])
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(strategy: Any, steps: int, batch: int) -> float:
    """Samples per second of all ranks, from the first batch until the last rank has done its last."""
    module, clock = Emulated(), jobs.Clock()
    trainer = jobs.quiet_trainer(strategy=strategy, max_epochs=1, callbacks=[clock])
    total = len(SPEEDS) * batch * steps
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(total, 16)), batch_size=batch, shuffle=True))
    torch.distributed.barrier()
    return total / (time.perf_counter() - clock.wall[0])


def worker(repeats: int, steps: int, batch: int) -> dict[str, Any]:
    def easgd(**options: Any) -> float:
        return fit(EASGDAsyncStrategy(tau=4, moving_rate="auto", ranks_per_node=1, **options), steps, batch)

    def gossip(**options: Any) -> float:
        return fit(GossipAsyncStrategy(ranks_per_node=1, **options), steps, batch)

    fits = {
        "ddp": lambda: fit("ddp", steps, batch),
        "hetero_easgd_async, off": lambda: easgd(balance="off"),
        "hetero_easgd_async": easgd,
        "hetero_gossip_async, off": lambda: gossip(balance="off"),
        "hetero_gossip_async": gossip,
    }
    return jobs.alternate(repeats, fits)


def main() -> None:
    options = jobs.options(__doc__, 3, steps=120, batch=32)
    results = jobs.launch(len(SPEEDS), options.repeats, options.steps, options.batch)
    print(f"\n{options.repeats} alternating runs of one epoch of {options.steps} steps; {jobs.machine()}")
    print("samples per second, and over those of ddp; medians (and ranges)")
    for name, rates in results.items():
        ratios = [rate / base for rate, base in zip(rates, results["ddp"], strict=True)]
        print(f"  {name:26s} {jobs.spread(rates)}  {jobs.spread(ratios)}")
    for name in ("hetero_easgd_async", "hetero_gossip_async"):
        ratios = [rate / base for rate, base in zip(results[name], results[f"{name}, off"], strict=True)]
        print(f"  {name}, over balance='off': {jobs.spread(ratios)}")


if __name__ == "__main__":
    jobs.start(main, worker)
