"""Parameters that become trainable, or frozen, during a fit, where replicas differ."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from oracles import oracle
from ranks import run
from tasks import FAST, Net, dataset, parameters
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_hetero import (
    DiLoCoStrategy,
    EASGDOverlapStrategy,
    EASGDStrategy,
    NodeAverageStrategy,
)

SHARES = [3.0, 1.0, 2.0]
APART: dict[str, Any] = {"balance": SHARES, "timeout": 30, "ranks_per_node": 1}


class Backboned(Net):
    """The first layer is a backbone."""

    def __init__(self, nesterov: bool = False, momentum: float = 0.0) -> None:
        super().__init__()
        self.backbone = self.net[0]
        self.nesterov, self.momentum = nesterov, momentum

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trainable = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trainable, lr=0.05, momentum=self.momentum, nesterov=self.nesterov)


class Freezes(pl.Callback):
    """Freezes the first layer after an epoch, and unfreezes it after another one."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.backbone.requires_grad_(trainer.current_epoch != 1)


def _fit(strategy: Any, module: Any, *callbacks: pl.Callback, resume: str | None = None, **options: Any) -> Any:
    trainer = pl.Trainer(strategy=strategy, callbacks=list(callbacks), **{**FAST, "max_epochs": 4, **options})
    trainer.fit(module, DataLoader(dataset(96), batch_size=4, shuffle=True), ckpt_path=resume)
    return module


# -- against loops by hand -----------------------------------------------------------------------------------


class Thaws(BaseFinetuning):
    """Trains the first layer from an epoch on, at the same rate."""

    def __init__(self, epoch: int = 2) -> None:
        super().__init__()
        self.epoch = epoch

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == self.epoch:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.05)


def _flat(kind: Any) -> list[torch.Tensor]:
    results = []
    for callback in (Thaws(), BackboneFinetuning(unfreeze_backbone_at_epoch=2), Freezes()):
        strategy = kind(every_n_steps=1, average_optimizer_state=True, balance=[5.0, 1.0, 2.0], timeout=30)
        results.append(parameters(_fit(strategy, Backboned(momentum=0.9), callback)))
    return results


@pytest.mark.long(after=1)
@pytest.mark.parametrize("nodes", [[1, 1, 1], [2, 1]])
def test_replicas_that_meet_at_every_step_are_one_process(nodes: list[int]) -> None:
    truths = []
    for callback in (Thaws(), BackboneFinetuning(unfreeze_backbone_at_epoch=2), Freezes()):
        make = partial(Backboned, momentum=0.9)
        truths.append(parameters(oracle(make, 12, samples=96, callbacks=[callback], max_epochs=4)))
    for results in run(_flat, 3, NodeAverageStrategy, nodes=nodes):
        for result, truth in zip(results, truths, strict=True):
            assert (result - truth).abs().max() < 1e-12


def by_hand(name: str, tau: int, alpha: float) -> torch.Tensor:
    """Three replicas and a center; the first layer is frozen for two epochs, and then trained and exchanged."""
    data, parts = dataset(96), torch.tensor([0.5, 1 / 6, 1 / 3], dtype=torch.float64)
    nets = [Backboned() for _ in parts]
    still, center, velocity = parameters(nn.ModuleList([nets[0].backbone])).numel(), parameters(nets[0]), 0.0
    order = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)
    for step in range(1, 33):
        order.set_epoch((step - 1) // 8)
        values = torch.stack([parameters(net) for net in nets])
        batch = list(order)[12 * ((step - 1) % 8) :]
        moved = []
        for net, value, rows in zip(nets, values, (slice(0, 6), slice(6, 8), slice(8, 12)), strict=True):
            net.zero_grad()
            net.loss([part[batch[rows]] for part in data.tensors]).backward()
            gradient = torch.cat([p.grad.reshape(-1) for p in net.parameters()])
            if step <= 16:
                gradient[:still] = 0  # the backbone's parameters come first
            moved.append(value - 0.05 * gradient)
        new = torch.stack(moved)
        if step % tau == 0 and name == "easgd":
            away = values - center
            new, center = new - alpha * away, center + 3 * alpha * (parts @ away)
        elif step % tau == 0:
            gradient = center - parts @ new
            velocity = 0.9 * velocity + gradient
            center = center - 0.7 * (gradient + 0.9 * velocity)
            new = center.expand_as(new)
        for net, value in zip(nets, new, strict=True):
            nn.utils.vector_to_parameters(value, net.parameters())
    return center


def _centered(kind: Any, options: dict[str, Any]) -> torch.Tensor:
    return parameters(_fit(kind(**options, **APART), Backboned(), Thaws()))


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        (EASGDStrategy, {"moving_rate": 0.2, "tau": 3}, "easgd"),
        (EASGDOverlapStrategy, {"moving_rate": 0.2, "tau": 3}, "easgd"),
        (DiLoCoStrategy, {"tau": 4}, "diloco"),
    ],
)
def test_a_center_grows(kind: Any, options: dict[str, Any], name: str) -> None:
    truth = by_hand(name, options["tau"], 0.2)
    for result in run(_centered, 3, kind, options, nodes=[1, 1, 1]):
        assert (result - truth).abs().max() < 1e-12
