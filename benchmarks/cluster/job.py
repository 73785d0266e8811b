"""Rank of the emulated cluster: every contender in turn, several times, in the same processes."""

import json
import os
import statistics
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
from lightning_hetero.strategies.replica import ReplicaStrategy


def deep() -> nn.Module:
    """2.14 million parameters as well, in eight layers of a mebibyte each."""
    blocks = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8)]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), *blocks, nn.Linear(512, 10))


MODELS = {"cnn": cnn, "deep": deep}


class Watched(pl.LightningModule):
    """Keeps when each step begins, of how many samples, what has been sent by then and how long has been waited."""

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


def fit(contender: str, model: str, steps: int, skip: int, batch: int, costs: list[list[float]]) -> dict[str, Any]:
    """Train, and measure this rank's steps after the first ``skip``.

    Args:
        contender: its string.
        model: one of ``MODELS``.
        steps: in all.
        skip: steps that are not measured: connections open, memory is allocated, shares and rates are found.
        batch: samples per rank and step, on average.
        costs: seconds of a batch and of each of its samples, for every rank's device; empty: as fast as they can.
    """
    pl.seed_everything(1, verbose=False)
    alone = contenders.is_alone(contender)
    world = 1 if alone else int(os.environ["WORLD_SIZE"])
    own = [costs[int(os.environ["RANK"])]] if alone and costs else costs
    slowed = [EmulatedSpeed([(fixed, per_sample) for fixed, per_sample in own])] if costs else []
    trainer = contenders.trainer(contender, max_steps=steps, max_epochs=1, callbacks=slowed)
    module = Watched(model)
    trainer.fit(module, DataLoader(Digits(batch * steps * world), batch_size=batch, shuffle=True))
    images, labels = handwritten(training=False)
    with torch.no_grad():
        logits = module.net(images)
    seconds = [b - a for a, b in zip(module.starts[skip:], module.starts[skip + 1 :], strict=False)]
    elapsed, count = sum(seconds), len(seconds)
    return {
        "ms": 1e3 * statistics.mean(seconds),
        "worst": 1e3 * max(seconds),
        "rate": sum(module.sizes[skip:-1]) / elapsed,
        "bytes": (module.sent[-1] - module.sent[skip]) / count,
        "exposed": (module.exposed[-1] - module.exposed[skip]) / elapsed if module.exposed else None,
        "accuracy": (logits.argmax(1) == labels).float().mean().item(),
        "loss": nn.functional.cross_entropy(logits, labels).item(),
        "theory": (module.payload[-1] - module.payload[skip]) / count if module.payload else None,
        "status": module.status,
    }


def main() -> None:
    output, model, names = Path(sys.argv[1]), sys.argv[2], sys.argv[8:]
    repeats, steps, skip, batch = map(int, sys.argv[3:7])
    costs = json.loads(sys.argv[7])
    network.throttle()
    with contenders.on_cluster():
        everything: list[dict[str, Any]] = []
        for repeat in range(repeats):
            for name in names:
                dist.barrier()
                mine = fit(name, model, steps, skip, batch, costs)
                ranks: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(ranks, mine)
                everything.append({"contender": name, "repeat": repeat, "ranks": ranks})
                if dist.get_rank() == 0:
                    output.write_text(json.dumps(everything))
                    print(f"{repeat + 1}/{repeats} {name}: {max(r['ms'] for r in ranks):.1f} ms per step", flush=True)


if __name__ == "__main__":
    main()
