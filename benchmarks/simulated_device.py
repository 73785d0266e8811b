"""Time for which exchanges keep a device from training, by strategy, on a simulated device.

The device of the tests (a C++ compiler and PyTorch 2.13 are needed) counts in simulated seconds: a step takes 30 ms,
and copies between the device and the host go at 10 GB/s. The model stands for one of 100 million, or of 1.3 billion,
parameters in fp32. Networks and the arithmetic of hosts take no simulated time: what is left is the part of an exchange
that the device itself feels. Two ranks, each with a device and a replica.

    python benchmarks/simulated_device.py
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import jobs
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "accelerator"))
import fake_build
import fake_device

from lightning_hetero.strategies.table import ENTRIES

STEP, RATE = 0.030, 10e9  # seconds of a step; bytes per second of a copy
SIZES, EVERY = (100e6, 1.3e9), (4, 16)
WIDTH, SKIP, STEPS = 256, 16, 32
OPTIONS: dict[str, Any] = {
    "hetero_node": lambda every: {"every_n_steps": every},
    "hetero_daso": lambda every: {"warmup": 0, "cooldown": 0, "global_every": every, "patience": 99},
    "hetero_gossip": lambda every: {"every_n_steps": every},
    "hetero_gossip_push_sum": lambda every: {"every_n_steps": every},
    "hetero_gossip_async": lambda every: {"every_n_steps": every},
    "hetero_diloco": lambda every: {"tau": every, "delay": 1},
    "hetero_diloco_async": lambda every: {"tau": every},
    "hetero_noloco": lambda every: {"tau": every},
}


class Model(pl.LightningModule):
    def __init__(self, momentum: bool, nesterov: bool) -> None:
        super().__init__()
        self.net, self.form = torch.nn.Linear(WIDTH, WIDTH), {"momentum": 0.9 * momentum, "nesterov": nesterov}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        torch.fake.sleep(STEP)
        return sum(p.square().mean() for p in self.parameters()) + 0 * batch[0].sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4, **self.form)


class Clock(pl.Callback):
    """The device's time between two steps."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in (SKIP, SKIP + STEPS):
            torch.fake.synchronize()
            self.at.append(torch.fake.now())


def fit(name: str, parameters: float, every: int) -> float:
    """Seconds of the device per step, beyond the step's own."""
    [entry] = [entry for entry in ENTRIES if entry.name == name]
    options = OPTIONS.get(name, lambda every: {"moving_rate": 0.3, "tau": every})(every)
    if name not in ("hetero_noloco", "hetero_gossip", "hetero_gossip_async", "hetero_gossip_push_sum"):
        options["ranks_per_node"] = 1
    module, clock = Model(name in ("hetero_measgd_async", "hetero_eamsgd"), name == "hetero_eamsgd"), Clock()
    small = 4 * sum(p.numel() for p in module.parameters())
    trainer = jobs.quiet_trainer(
        strategy=entry.strategy(balance=[1.0, 1.0], **options),
        accelerator="fake",
        devices=1,
        num_nodes=2,
        max_steps=SKIP + STEPS + 1,
        log_every_n_steps=10**6,
        callbacks=[clock],
    )
    torch.fake.cost("copy", 4 * parameters / RATE / small)
    data = TensorDataset(torch.zeros(2 * (SKIP + STEPS + 1), 1))
    trainer.fit(module, DataLoader(data, batch_size=1))
    torch.fake.cost("copy", 0.0)
    begun, ended = clock.at
    return (ended - begun) / STEPS - STEP


def worker(library: str) -> dict[str, list[float]]:
    fake_device.load(library)
    os.environ.update(GROUP_RANK=os.environ["RANK"], LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    names = [entry.name for entry in ENTRIES if entry.name not in ("hetero_ddp", "hetero_auto")]
    return {name: [fit(name, size, every) for size in SIZES for every in EVERY] for name in names}


def main() -> None:
    jobs.options(__doc__, 1)
    if (why := fake_build.problem()) is not None:
        raise SystemExit(why)
    library = fake_build.library(Path(tempfile.gettempdir()) / "lightning-hetero-fake")
    results = jobs.launch(2, f'"{library}"')
    print(f"\nmilliseconds of the device per step of {1e3 * STEP:.0f} ms that exchanges take; {jobs.machine()}")
    columns = [f"{size / 1e6:.0f} M, every {every}" for size in SIZES for every in EVERY]
    print(f"{'':26}" + "".join(f"{column:>18}" for column in columns))
    for name, seconds in results.items():
        print(f"{name:26}" + "".join(f"{1e3 * one:12.2f} {one / STEP:4.0%}" for one in seconds))


if __name__ == "__main__":
    jobs.start(main, worker)
