"""Lightning's rules for a strategy, where replicas differ. (More in test_node.py, test_events.py and others.)"""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from center_tasks import fit
from ranks import run
from tasks import FAST, GanLike, Net, dataset, error, parameters
from torch.utils.data import DataLoader, DistributedSampler

from lightning_hetero import NodeAverageStrategy

NODES, SHARES = [2, 1], [3.0, 1.0, 2.0]  # of 12 samples: 6, 2 and 4; by node 8 and 4
BASE = {"balance": SHARES, "global_batch_size": 12}


def _fit(module: pl.LightningModule, strategy: Any, samples: int = 96, **options: Any) -> pl.Trainer:
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 2, **options})
    trainer.fit(module, DataLoader(dataset(samples), batch_size=4, shuffle=True))
    return trainer


# -- once per step -------------------------------------------------------------------------------------------

PULL = {"moving_rate": 0.2, "beta": 0.7}
MEET: list[tuple[str, str, dict[str, Any]]] = [
    ("node", "every_n_steps", {"find_unused_parameters": True}),
    ("easgd", "tau", PULL),
    ("async", "tau", PULL),
]


class Met(pl.Callback):
    """Keeps the steps (by hand: batches) after which the number of exchanges has grown."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.number = self.exchanges = 0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.number += 1
        if trainer.strategy.traffic.exchanges > self.exchanges:
            self.exchanges = trainer.strategy.traffic.exchanges
            self.steps.append(self.number if not pl_module.automatic_optimization else trainer.global_step)


def _meeting(make: Any, every: int, **settings: Any) -> list[dict[str, Any]]:
    """Results of a fit of each kind, with the steps after which there was an exchange."""
    results = []
    for name, option, options in MEET:
        data, met = DataLoader(dataset(96), batch_size=4, shuffle=True), Met()
        trainer = {"callbacks": [met], **settings}
        results.append({**fit(name, make(), data, 2, trainer, **{option: every}, **options), "met": met.steps})
    return results


@pytest.mark.parametrize(
    ("make", "every", "settings", "steps"),
    [
        (GanLike, 3, {}, [3, 6, 9, 12, 15]),  # two optimizers by hand: once per batch
        (Net, 2, {"accumulate_grad_batches": 3}, [2, 4, 6]),  # 8 batches an epoch: windows of 3, 3 and 2
    ],
)
def test_replicas_meet_once_per_batch_or_window(
    make: Any, every: int, settings: dict[str, Any], steps: list[int]
) -> None:
    for results in run(_meeting, 3, make, every, nodes=NODES, **settings):
        for (name, *_), result in zip(MEET, results, strict=True):
            assert result["met"] == steps, name
            assert result["traffic"]["exchanges"] == len(steps) + (name == "node"), name  # and the end


# -- clipping ------------------------------------------------------------------------------------------------


def clipped_by_hand(limit: float, whole: bool = False) -> torch.Tensor:
    """Two models that clip their gradient (control: that of each rank) and average every 4 steps."""
    data, models = dataset(96), [Net(), Net()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    order, step = DistributedSampler(data, 1, 0, shuffle=True), 0
    for epoch in range(2):
        order.set_epoch(epoch)
        indices = list(order)
        for first in range(0, 96, 12):
            nodes = [[(0, 6), (6, 8)], [(8, 12)]] if whole else [[(0, 8)], [(8, 12)]]
            for model, optimizer, parts in zip(models, optimizers, nodes, strict=True):
                total, gradient = sum(b - a for a, b in parts), 0.0
                for a, b in parts:
                    optimizer.zero_grad()
                    model.loss(data[indices[first + a : first + b]]).backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
                    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
                    gradient = gradient + (b - a) / total * flat
                torch.nn.utils.vector_to_parameters(gradient, [p.grad for p in model.parameters()])
                optimizer.step()
            step += 1
            if step % 4 == 0:
                mean = (8 * parameters(models[0]) + 4 * parameters(models[1])) / 12
                for model in models:
                    torch.nn.utils.vector_to_parameters(mean.clone(), model.parameters())
    return parameters(models[0])


def _clipped(limit: float) -> torch.Tensor:
    module = Net()
    _fit(module, NodeAverageStrategy(every_n_steps=4, **BASE), gradient_clip_val=limit)
    return parameters(module)


def test_clipping_comes_after_the_replicas_reduction() -> None:
    truth, control = clipped_by_hand(0.3), clipped_by_hand(0.3, whole=True)
    for weights in run(_clipped, 3, 0.3, nodes=NODES):
        assert error(weights, truth) <= 1e-10
        assert error(weights, control) > 1e-3
