"""What each rank of the emulated cluster runs: every contender in turn, several times, in the same processes."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import contenders
import lightning.pytorch as pl
import network
import torch
import torch.distributed as dist
from digits import Digits, cnn, handwritten
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import EmulatedSpeed
from lightning_hetero.batching.shares import Cost
from lightning_hetero.strategies.replica import ReplicaStrategy

SKIP = 12  # steps before the measured ones: connections open, memory is allocated, a rate is found


def deep() -> nn.Module:
    """2.14 million parameters as well, in eight layers of a mebibyte each."""
    blocks = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8)]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), *blocks, nn.Linear(512, 10))


MODELS = {"cnn": cnn, "deep": deep}


class Watched(pl.LightningModule):
    """Notes when each step begins, of how many samples, what has been sent by then and how long has been waited."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.net = MODELS[model]()
        self.starts: list[float] = []
        self.sizes: list[int] = []
        self.sent: list[int] = []
        self.exposed: list[float] = []
        self.payload: list[int] = []
        self.status: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.starts.append(time.perf_counter())
        self.sizes.append(len(batch[0]))
        self.sent.append(network.bytes_sent())
        strategy = self.trainer.strategy
        if isinstance(strategy, ReplicaStrategy):
            self.exposed.append(strategy.traffic.exposed)
            self.payload.append(strategy.traffic.bytes)
            self.status = strategy.status()
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def fit(contender: str, model: str, steps: int, batch: int, delay: float) -> dict[str, Any]:
    """Train, and measure this rank's steps after the first few."""
    pl.seed_everything(1, verbose=False)
    world = 1 if contenders.is_alone(contender) else int(os.environ["WORLD_SIZE"])
    slowed = [EmulatedSpeed([Cost(delay, 1e-6)] * world)] if delay else []
    trainer = contenders.trainer(contender, max_steps=steps, max_epochs=1, callbacks=slowed)
    module = Watched(model)
    samples = batch * steps * world
    loader = DataLoader(Digits(samples), batch_size=batch, shuffle=True)
    trainer.fit(module, loader)
    elapsed = module.starts[-1] - module.starts[SKIP]
    images, labels = handwritten(training=False)
    with torch.no_grad():
        logits = module.net(images)
    count = len(module.starts) - 1 - SKIP
    theory = (module.payload[-1] - module.payload[SKIP]) / count if module.payload else None
    return {
        "ms": 1e3 * elapsed / count,
        "bytes": (module.sent[-1] - module.sent[SKIP]) / count,
        "exposed": (module.exposed[-1] - module.exposed[SKIP]) / elapsed if module.exposed else None,
        "accuracy": (logits.argmax(1) == labels).float().mean().item(),
        "loss": nn.functional.cross_entropy(logits, labels).item(),
        "theory": theory,
        "status": module.status,
        "starts": module.starts,  # of one clock for all ranks
        "sent": module.sent,
    }


def main() -> None:
    output, model, names = Path(sys.argv[1]), sys.argv[2], sys.argv[7:]
    repeats, steps, batch, delay = int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), float(sys.argv[6])
    rank = int(os.environ["RANK"])
    network.throttle()
    with contenders.on_cluster():
        everything: list[dict[str, Any]] = []
        for repeat in range(repeats):
            for name in names:
                dist.barrier()
                mine = fit(name, model, steps, batch, delay)
                ranks: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(ranks, mine)
                everything.append({"contender": name, "repeat": repeat, "ranks": ranks})
                if rank == 0:
                    output.write_text(json.dumps(everything))
                    print(f"{repeat + 1}/{repeats} {name}: {max(r['ms'] for r in ranks):.1f} ms per step", flush=True)


if __name__ == "__main__":
    main()
