"""Common parts of the tests with a center: a linear model, a fit of it, and the record of that fit."""

import os
from typing import Any

import lightning.pytorch as pl
import torch
from oracles import START, loader
from tasks import FAST, parameters
from torch import nn

from lightning_hetero import (
    DiLoCoStrategy,
    EAMSGDStrategy,
    EASGDAsyncStrategy,
    EASGDHogwildStrategy,
    EASGDOverlapStrategy,
    EASGDRoundRobinStrategy,
    EASGDStrategy,
    MEASGDAsyncStrategy,
    NodeAverageStrategy,
)

SHARES = {
    1: [1.0],
    2: [2.0, 1.0],
    3: [3.0, 1.0, 2.0],
    4: [5.0, 2.0, 3.0, 2.0],
}  # of 12 samples three ranks take 6, 2, 4
APART = [1, 1, 1]  # nodes of three ranks that are each a replica
STRATEGIES = {
    "easgd": EASGDStrategy,
    "overlap": EASGDOverlapStrategy,
    "eamsgd": EAMSGDStrategy,
    "round_robin": EASGDRoundRobinStrategy,
    "async": EASGDAsyncStrategy,
    "measgd": MEASGDAsyncStrategy,
    "hogwild": EASGDHogwildStrategy,
    "diloco": DiLoCoStrategy,
    "node": NodeAverageStrategy,
}


class Line(pl.LightningModule):
    """Linear model ``x @ w`` with the squared error."""

    def __init__(self, lr: float = 0.01, momentum: float = 0.0, nesterov: bool = False, schedule: Any = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(START))
        self.lr, self.momentum, self.nesterov, self.schedule = lr, momentum, nesterov, schedule

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return ((x @ self.w - y) ** 2).mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)
        if self.schedule is None:
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.schedule)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Recorder(pl.Callback):
    """Keeps the weights, and the center if every rank has one, after each batch."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.centers: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.weights.append(parameters(pl_module))
        center = getattr(getattr(trainer.strategy, "averager", None), "center", None)
        if center and isinstance(center, list):  # otherwise it is the center's address
            self.centers.append(torch.cat([part.double() for part in center]))


class StartAt(pl.Callback):
    """Moves the start of each rank."""

    def __init__(self, starts: list[float]) -> None:
        self.starts = starts

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with torch.no_grad():
            for p in pl_module.parameters():
                p.add_(self.starts[trainer.global_rank])


def fit(
    name: Any, module: pl.LightningModule, data: Any = None, epochs: int = 3, trainer: Any = None, **options: Any
) -> dict[str, Any]:
    """Train on the samples of the oracle, or others; ``options`` are the strategy's, but for ``resume``."""
    recorder, trainer, resume = Recorder(), dict(trainer or {}), options.pop("resume", None)
    shares = SHARES[int(os.environ["WORLD_SIZE"])]
    kind = STRATEGIES.get(name, name) if isinstance(name, str) else name
    strategy = kind(**{"balance": shares, "global_batch_size": 12, **options})
    callbacks = [recorder, *trainer.pop("callbacks", [])]
    instance = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": epochs, "callbacks": callbacks, **trainer})
    instance.fit(module, loader() if data is None else data, ckpt_path=resume)
    return {
        "path": torch.stack(recorder.weights) if recorder.weights else torch.zeros(0),
        "centers": torch.stack(recorder.centers) if recorder.centers else torch.zeros(0),
        "final": parameters(module),
        "traffic": vars(strategy.traffic),
    }


def line(name: Any, model: Any = None, **options: Any) -> dict[str, Any]:
    """A fit of the linear model."""
    return fit(name, Line(**(model or {})), **options)


def lines(*fits: tuple[Any, dict[str, Any]]) -> list[dict[str, Any]]:
    """Several fits, one after the other."""
    return [line(name, **options) for name, options in fits]


def same(a: Any, b: Any) -> bool:
    """Whether two fits are alike bit for bit."""
    return all(torch.equal(a[key], b[key]) for key in ("path", "centers", "final"))
