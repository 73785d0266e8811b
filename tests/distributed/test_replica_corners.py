"""Rare cases where replicas differ: ends of epochs, sparse metrics, odd buffers, second fits."""

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from ranks import run
from tasks import FAST, Dropping, EvaluatedNet, Net, Save, dataset, error, parameters
from test_node import NODES, SHARES
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import (
    DASOStrategy,
    DiLoCoStrategy,
    EASGDStrategy,
    GossipPushSumStrategy,
    GossipStrategy,
    NodeAverageStrategy,
)

BASE = {"balance": SHARES, "global_batch_size": 12}
CYCLING = {"warmup": 0, "cooldown": 0, "patience": 99}


def _fit(module: pl.LightningModule, strategy: Any, resume: str | None = None, **options: Any) -> pl.Trainer:
    validation = DataLoader(dataset(24), batch_size=4) if isinstance(module, EvaluatedNet) else None
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 3, **options})
    torch.manual_seed(trainer.global_rank)
    trainer.fit(module, DataLoader(dataset(96), batch_size=4, shuffle=True), validation, ckpt_path=resume)
    return trainer


# -- resume --------------------------------------------------------------------------------------------------


class Counting(Dropping):
    """Has BatchNorm, and a counter of its own; ranks of a node do not share these buffers between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8).double()
        self.register_buffer("count", torch.zeros(1, dtype=torch.long))

    def loss(self, batch: Any) -> torch.Tensor:
        if self.training:
            self.count += len(batch[0])
        x = nn.functional.dropout(self.norm(batch[0]), 0.3) + 1e-3 * self.count
        return nn.functional.mse_loss(self.net(x), batch[1])


def _resumed(folder: str, step: int, options: dict[str, Any]) -> list[torch.Tensor]:
    weights = []
    for resume in (None, f"{folder}/saved.ckpt"):
        model, saves = Counting(), [] if resume else [Save(f"{folder}/saved.ckpt", step, False)]
        _fit(model, DASOStrategy(**BASE, **CYCLING, **options), resume, callbacks=saves)
        weights.append(torch.cat([value.double().reshape(-1) for value in model.state_dict().values()]))
    return weights


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("step", "options"),
    [
        (16, {"wait": 3}),
        (10, {"wait": 4, "mixing": "delta"}),
        (5, {"wait": 3, "global_every": 3, "mixing": "delta"}),
    ],
)
def test_resuming_is_as_if_never_stopped(tmp_path: Path, step: int, options: dict[str, Any]) -> None:
    for whole, second in run(_resumed, 3, str(tmp_path), step, options, nodes=NODES):
        assert torch.equal(whole, second)


def _phases_after(folder: str) -> list[str]:
    path, phases = f"{folder}/node.ckpt", []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            phases.append(trainer.strategy.status()["phase"])

    keep = ModelCheckpoint(folder, every_n_train_steps=8, filename="node", save_top_k=-1)
    _fit(Net(), NodeAverageStrategy(**BASE), max_epochs=1, enable_checkpointing=True, callbacks=keep)
    warnings.filterwarnings("ignore", "The checkpoint was saved by|Be aware that when using `ckpt_path`")
    _fit(Net(), DASOStrategy(warmup=4, cooldown=4, **BASE), path, callbacks=[Watch()])
    return phases


def test_phases_count_the_steps_of_another_strategys_checkpoint(tmp_path: Path) -> None:
    for phases in run(_phases_after, 3, str(tmp_path), nodes=NODES):
        assert phases == ["cycling"] * 12 + ["cool-down"] * 4


# -- validation ----------------------------------------------------------------------------------------------


class ChecksLoss(EvaluatedNet):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.loss(batch).isfinite()
        super().validation_step(batch, batch_idx)


class SaveAtStart(pl.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 8:
            trainer.save_checkpoint(self.path)

    def on_validation_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_step == 8:
            self.validated = parameters(module)


def _validated(path: str) -> torch.Tensor:
    save = SaveAtStart(path)
    _fit(
        ChecksLoss(),
        NodeAverageStrategy(every_n_steps=5, **BASE),
        max_epochs=1,
        num_sanity_val_steps=2,
        callbacks=[save],
    )
    return save.validated


def test_the_sanity_check_is_sane_and_saving_before_validation_saves_the_consensus(tmp_path: Path) -> None:
    validated = run(_validated, 3, str(tmp_path / "start.ckpt"), nodes=NODES)[0]
    module = ChecksLoss()
    module.load_state_dict(torch.load(tmp_path / "start.ckpt", weights_only=True)["state_dict"])
    assert torch.equal(parameters(module), validated)


class Improving(EvaluatedNet):
    """A validation loss that halves at every validation."""

    def on_validation_epoch_end(self) -> None:
        self.log("level", 0.5**self.current_epoch, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.rates = [*getattr(self, "rates", []), self.trainer.strategy.averager.schedule.every]


def _sparse(every: int | None) -> list[int]:
    module = Improving()
    strategy = DASOStrategy(**BASE, **CYCLING | {"patience": 2}, monitor="level", schedule_every_n_steps=every)
    options = {"check_val_every_n_epoch": 3, "num_sanity_val_steps": 0}
    trainer = _fit(module, strategy, max_epochs=7, **options)
    trainer.fit_loop.max_epochs = 10
    trainer.fit(module, DataLoader(dataset(96), batch_size=4, shuffle=True), DataLoader(dataset(24), batch_size=4))
    return module.rates


@pytest.mark.long
@pytest.mark.parametrize("every", [None, 3])
def test_a_metric_counts_once_each_time_it_is_logged(every: int | None) -> None:
    for rates in run(_sparse, 3, every, nodes=NODES):
        assert rates == [4] * 10


# -- ends ----------------------------------------------------------------------------------------------------


class Teacher(Net):
    """Moves a frozen copy of itself, and has state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 16).double().requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.net[0].weight, 0.1)

    def get_extra_state(self) -> dict[str, Any]:
        return {"words": ["no", "tensor"]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state["words"] == ["no", "tensor"]


def _with_teacher(folder: str) -> torch.Tensor:
    module = Teacher()
    keep = ModelCheckpoint(folder, every_n_train_steps=3)
    _fit(module, DASOStrategy(**BASE, **CYCLING), enable_checkpointing=True, callbacks=keep)
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def test_at_the_end_frozen_values_are_alike_too(tmp_path: Path) -> None:
    results = run(_with_teacher, 3, str(tmp_path), nodes=NODES)
    assert all(torch.equal(result, results[0]) for result in results)


LOOKING: list[tuple[Any, dict[str, Any]]] = [
    (DASOStrategy, {**CYCLING, "ranks_per_node": 1}),
    (EASGDStrategy, {"moving_rate": 0.5}),
    (DiLoCoStrategy, {"tau": 3}),
    (GossipStrategy, {}),
    (GossipPushSumStrategy, {"every_n_steps": 2}),
]


def _looked(folder: str) -> list[list[torch.Tensor]]:
    warnings.filterwarnings("ignore", "`weights_only` was not set")
    results = []
    for kind, options in LOOKING:
        ends = []
        for looks in (False, True):
            module, strategy = Net(), kind(balance=[1.0, 3.0], **options)
            trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 2, "default_root_dir": folder})
            data = DataLoader(dataset(48), batch_size=4)
            if looks:
                Tuner(trainer).lr_find(module, data, num_training=7, early_stop_threshold=None, update_attr=False)
            trainer.fit(module, data)
            ends.append(parameters(module))
        results.append(ends)
    return results


@pytest.mark.long
def test_looking_for_a_learning_rate_leaves_no_trace(tmp_path: Path) -> None:
    for found in zip(*run(_looked, 2, str(tmp_path)), strict=True):
        plain = found[0][0]
        assert error(plain, parameters(Net())) > 1e-6
        assert all(torch.equal(end, plain) for ends in found for end in ends)
    assert list(tmp_path.iterdir()) == []  # no shards of checkpoints of the search


SHORT: list[tuple[Any, dict[str, Any]]] = [
    (0.1, {"max_steps": 11, "max_epochs": None}),
    (3, {"max_steps": 11, "max_epochs": -1}),
    ("4 epochs", {"fast_dev_run": True}),
    (0, {"limit_train_batches": 3}),
]


def _short() -> list[torch.Tensor]:
    modules = [Net() for _ in SHORT]
    for module, (warmup, options) in zip(modules, SHORT, strict=True):
        _fit(module, DASOStrategy(**BASE, warmup=warmup), **options)
    return [parameters(module) for module in modules]


def test_short_runs() -> None:
    for results in zip(*run(_short, 3, nodes=NODES), strict=True):
        assert error(results[0], parameters(Net())) > 1e-6
        assert all(torch.equal(result, results[0]) for result in results)
