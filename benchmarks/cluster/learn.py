"""What each rank runs to compare accuracies: every contender trains to the end, once per seed."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import contenders
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.callbacks.emulation import EmulatedSpeed

EPOCHS, SAMPLES, BATCH, RATE = 15, 8192, 16, 0.1  # samples per rank and step; peak learning rate


def overlaid(training: bool, samples: int) -> TensorDataset:
    """Two handwritten digits on top of each other, to be told both; those of the test are never trained on."""
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    chosen = (torch.arange(len(images)) % 5 != 0) == training
    images, labels = images[chosen], labels[chosen]
    first, second = torch.randint(len(images), (2, samples), generator=torch.Generator().manual_seed(int(training)))
    low, high = torch.minimum(labels[first], labels[second]), torch.maximum(labels[first], labels[second])
    return TensorDataset(torch.maximum(images[first], images[second]), 10 * low + high)


class Reader(pl.LightningModule):
    """A small convolutional network, which notes how well it reads, and when."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, 100),
        )
        self.test = overlaid(False, 2048).tensors
        self.course: list[tuple[float, float]] = []  # seconds of training, accuracy
        self._began, self._paused = 0.0, 0.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._began = self._began or time.perf_counter()
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_validation_start(self) -> None:
        self._started = time.perf_counter()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing: the test below is the same for all ranks."""

    def on_validation_epoch_end(self) -> None:
        correct = (self.net(self.test[0]).argmax(1) == self.test[1]).float().mean()
        self.course.append((self._started - self._began - self._paused, correct.item()))

    def on_validation_end(self) -> None:
        self._paused += time.perf_counter() - self._started  # the test is no part of the training's time

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.9, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=self.steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def learn(contender: str, seed: int, epochs: int, step: float) -> tuple[list[tuple[float, float]], float]:
    """Train to the end; the course of the accuracy on the test digits, and this rank's exchanges per step."""
    pl.seed_everything(seed, verbose=False)
    world = int(os.environ["WORLD_SIZE"])
    module = Reader(epochs * (SAMPLES // (BATCH * world)))
    slowed = [EmulatedSpeed([(step, 0.0)] * world)] if step else []
    trainer = contenders.trainer(contender, max_epochs=epochs, num_sanity_val_steps=0, callbacks=slowed)
    glance = DataLoader(TensorDataset(torch.zeros(world, 1)), batch_size=1)
    trainer.fit(module, DataLoader(overlaid(True, SAMPLES), batch_size=BATCH, shuffle=True, drop_last=True), glance)
    traffic = getattr(trainer.strategy, "traffic", None)
    return module.course, traffic.exchanges / module.steps if traffic else 0.0


def main() -> None:
    output, epochs, seeds, step, names = Path(sys.argv[1]), *map(int, sys.argv[2:4]), float(sys.argv[4]), sys.argv[5:]
    with contenders.on_cluster():
        courses: list[dict[str, Any]] = []
        for seed in range(1, seeds + 1):
            for name in names:
                course, exchanges = learn(name, seed, epochs, step)
                of_ranks = torch.tensor(exchanges)
                dist.all_reduce(of_ranks)
                exchanges = of_ranks.item() / dist.get_world_size()
                courses.append({"contender": name, "seed": seed, "course": course, "exchanges": exchanges})
                if dist.get_rank() == 0:
                    output.write_text(json.dumps(courses))
                    seconds, accuracy = course[-1]
                    print(f"seed {seed} {name}: {accuracy:.2%} after {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
