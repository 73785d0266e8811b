"""Fits with callbacks that average weights over time, and what these averages must come to."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from tasks import FAST, EvaluatedNet, dataset
from torch.utils.data import DataLoader

NODES, SHARES = [2, 1], [3.0, 1.0, 2.0]
APART: dict[str, Any] = {"balance": SHARES, "timeout": 30, "ranks_per_node": 1}
EMA = partial(EMAWeightAveraging, decay=0.8)


class ByEpoch(WeightAveraging):
    """The plain mean, updated after every epoch."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None


CALLBACKS: dict[str, Any] = {
    "ema": EMA,
    "mean": WeightAveraging,
    "by epoch": ByEpoch,
    "swa": partial(StochasticWeightAveraging, 0.01, swa_epoch_start=1, annealing_epochs=1),
}


def fit_averaged(strategy: Any, module: Any, *callbacks: pl.Callback, resume: str | None = None, **options: Any) -> Any:
    keeps = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    settings = {**FAST, "max_epochs": 4, "num_sanity_val_steps": 0, "enable_checkpointing": keeps, **options}
    trainer = pl.Trainer(strategy=strategy, callbacks=list(callbacks), **settings)
    data = DataLoader(dataset(50), batch_size=4) if isinstance(module, EvaluatedNet) else None
    trainer.fit(module, DataLoader(dataset(96), batch_size=4, shuffle=True), data, ckpt_path=resume)
    return module


class Averages:
    """What a callback's average is after each of its updates, which are made where replicas meet."""

    def __init__(self, path: list[torch.Tensor], name: str, period: int, epoch: int = 8) -> None:
        self.validated: list[torch.Tensor] = []
        count, asked, self.final = 0, 0, path[0]
        for step, consensus in enumerate(path, 1):
            asked += name != "by epoch"
            for when in ("meeting", "validation", "end of epoch"):
                if when == "validation" and step % epoch == 0:
                    self.validated.append(self.final)
                asked += when == "end of epoch" and step % epoch == 0 and name == "by epoch"
                if step % (period if when == "meeting" else epoch) or when == "validation":
                    continue
                for _ in range(asked):
                    part = 1.0 if count == 0 else 0.2 if name == "ema" else 1 / (count + 1)
                    self.final, count = self.final + part * (consensus - self.final), count + 1
                asked = 0
