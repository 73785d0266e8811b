"""Models, data and fits that the distributed tests run on ranks."""

import os
import signal
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.batching.plan import Plan
from lightning_hetero.batching.shares import Cost

FAST = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def dataset(samples: int = 101, dtype: torch.dtype = torch.float64) -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 8, generator=g, dtype=torch.float64)
    y = torch.sin(x.sum(1, keepdim=True)) + 0.1 * torch.randn(samples, 1, generator=g, dtype=torch.float64)
    length = torch.randint(1, 6, (samples, 1), generator=g)
    return TensorDataset(x.to(dtype), y.to(dtype), length, torch.arange(samples))


class Net(pl.LightningModule):
    """A small regression; logs its losses and keeps the samples that it saw."""

    def __init__(self, optimizer: str = "sgd", dtype: torch.dtype = torch.float64, lr: float = 0.05) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
        self.optimizer, self.lr = optimizer, lr
        self.seen: list[list[int]] = []

    def loss(self, batch: Any) -> torch.Tensor:
        x, y, *_ = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen = [*self.seen, batch[3].tolist()]  # a new list: a padding batch stays in it
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class EvaluatedNet(Net):
    """Also validates, tests and predicts, and keeps the samples that it saw then."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.evaluated: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated += batch[3].tolist()
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated += batch[3].tolist()
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> list[int]:
        return batch[3].tolist()


class Dropping(Net):
    """Draws random numbers in every step, which differ between ranks."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y, *_ = batch
        return nn.functional.mse_loss(self.net(nn.functional.dropout(x, 0.3)), y)


class TokenNet(Net):
    """Has a loss that is a mean over tokens; samples have different numbers of these."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y, length, _ = batch
        return (length * (self.net(x) - y) ** 2).sum() / length.sum()

    def batch_weight(self, batch: Any) -> torch.Tensor:
        return batch[2].sum()


class GanLike(Net):
    """Has two optimizers that are stepped by hand, and two backward passes a step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False
        torch.manual_seed(11)
        self.critic = nn.Linear(1, 1).to(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.seen = [*self.seen, batch[3].tolist()]  # a new list: a padding batch stays in it
        first, second = self.optimizers()
        x, y, *_ = batch
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self.net(x), y) + self.critic(self.net(x)).pow(2).mean())
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        second.zero_grad()
        self.manual_backward((self.critic(self.net(x).detach()) - y).abs().mean())
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9),
            torch.optim.AdamW(self.critic.parameters(), lr=0.01),
        ]


class Predictions(BasePredictionWriter):
    """Keeps the indices of each batch, and what was predicted of it."""

    def __init__(self) -> None:
        super().__init__("epoch")
        self.pairs: list[tuple[list[int], list[int]]] = []

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.pairs = list(zip(batch_indices[0], predictions, strict=True))


class Memory(Logger):
    """Keeps what is logged."""

    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


class Save(pl.Callback):
    """Saves a checkpoint after a step, and stops there if told to, as a preempted job does."""

    def __init__(self, path: str, step: int, stop: bool) -> None:
        self.path, self.step, self.stop = path, step, stop

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = self.stop


class ChangePlan(pl.Callback):
    """Changes the shares at given steps, on all ranks alike."""

    def __init__(self, changes: dict[int, list[float]]) -> None:
        self.changes = changes

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        planner = trainer.strategy.accounting.planner
        for step, shares in self.changes.items():
            costs = tuple(Cost(0.0, 1 / s) if s else Cost(0.0, 1.0) for s in shares)
            high = tuple(0 if s == 0 else 10**6 for s in shares)
            planner.plans.append(Plan(step, costs, (0,) * len(shares), high))


class Killed(pl.Callback):
    """The process of one rank is killed at some step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.mine = trainer.global_rank == self.rank  # ranks get other numbers later

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.mine and trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def parameters(module: nn.Module) -> torch.Tensor:
    """All parameters, flat, in float64; of shards the whole parameters (collective over the replica)."""
    values = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    return torch.cat([value.detach().double().reshape(-1) for value in values])


def rank() -> int:
    return int(os.environ["RANK"])


def train(
    module: pl.LightningModule, strategy: Any, data: Any, validated: Any = None, path: Any = None, **options: Any
) -> pl.Trainer:
    """Train, perhaps from a checkpoint, and for one epoch by default; returns the Trainer."""
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 1, **options})
    trainer.fit(module, data, validated, ckpt_path=path)
    return trainer


def one_process(
    samples: int, batches: list[list[int]], epochs: int = 2, make: Any = Net, **options: Any
) -> torch.Tensor:
    """The parameters after one process of Lightning has trained on these batches of a dataset."""
    module = make()
    train(module, "auto", DataLoader(dataset(samples), batch_sampler=batches), devices=1, max_epochs=epochs, **options)
    return parameters(module)


def fit(
    make: Callable[[], pl.LightningModule],
    batch_size: int,
    samples: int = 101,
    dtype: torch.dtype = torch.float64,
    strategy: dict[str, Any] | None = None,
    changes: dict[int, list[float]] | None = None,
    loader: dict[str, Any] | None = None,
    strategy_class: Any = HeteroDDPStrategy,
    **trainer: Any,
) -> dict[str, Any]:
    """Train on one rank of a hetero_ddp job; ``batch_size`` is the global one."""
    module = make()
    chosen = strategy_class(**{"global_batch_size": batch_size, **(strategy or {})})
    callbacks = [ChangePlan(changes)] if changes else []
    instance = pl.Trainer(strategy=chosen, **{**FAST, "max_epochs": 3, "callbacks": callbacks, **trainer})
    instance.fit(module, DataLoader(dataset(samples, dtype), batch_size=2, shuffle=True, **(loader or {})))
    return {
        "parameters": parameters(module),
        "seen": module.seen,
        "metrics": {name: value.item() for name, value in instance.callback_metrics.items()},
        "shares": chosen.accounting.planner.shares(chosen.accounting.step),
        "steps": instance.global_step,
    }


def fits(calls: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Results of several fits in one job of ranks, one after the other, by their names."""
    results = {}
    for name, call in calls.items():
        try:
            results[name] = fit(**call)
        except Exception as failure:
            raise AssertionError(f"the fit {name!r} failed") from failure
    return results


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative difference of two vectors."""
    return ((a - b).norm() / b.norm()).item()
