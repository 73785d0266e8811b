"""What `hetero_ddp` costs where there is nothing to gain: ranks alike, against Lightning's `ddp`.

CPU seconds per step (all threads of all ranks) and wall seconds per step, as ratios of alternating runs.

    python benchmarks/overhead.py [--repeats 7] [--ranks 2]
"""

import statistics
from typing import Any

import jobs
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, SKIP = 80, 16
MODELS = {
    "tiny (a 16x1 linear layer)": lambda: (nn.Linear(16, 1), (16,)),
    "small (a CNN of 0.4 M parameters)": lambda: (
        nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 64, 96),
            nn.ReLU(),
            nn.Linear(96, 1),
        ),
        (1, 16, 16),
    ),
}


class Module(pl.LightningModule):
    def __init__(self, model: str) -> None:
        super().__init__()
        self.net, self.shape = MODELS[model]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(strategy: Any, model: str) -> tuple[float, float]:
    torch.distributed.is_initialized() and torch.distributed.barrier()
    clock, module = jobs.Clock(), Module(model)
    trainer = jobs.quiet_trainer(strategy=strategy, max_steps=STEPS, callbacks=[clock])
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(32 * 2 * STEPS, *module.shape)), batch_size=32))
    wall, cpu = clock.steps(SKIP)
    total = torch.tensor(cpu)
    torch.distributed.all_reduce(total)
    return statistics.median(wall), total.item()


def worker(repeats: int) -> dict[str, Any]:
    import lightning_hetero  # noqa: F401  registers the strategy's name

    return {
        model: jobs.alternate(repeats, {s: lambda s=s, m=model: fit(s, m) for s in ("ddp", "hetero_ddp")})
        for model in MODELS
    }


def main() -> None:
    options = jobs.options(__doc__, 7, ranks=2)
    results = jobs.launch(options.ranks, options.repeats)
    print(f"\n{options.repeats} alternating runs on {options.ranks} ranks; {jobs.machine()}")
    print("hetero_ddp : ddp, median and range of the runs' ratios:")
    for model, runs in results.items():
        pairs = list(zip(runs["hetero_ddp"], runs["ddp"], strict=True))
        print(f"  {model}")
        print(f"    wall time per step  {jobs.spread([ours[0] / theirs[0] for ours, theirs in pairs])}")
        print(f"    CPU time per step   {jobs.spread([ours[1] / theirs[1] for ours, theirs in pairs])}")


if __name__ == "__main__":
    jobs.start(main, worker)
