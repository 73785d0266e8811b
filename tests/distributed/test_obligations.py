"""What Lightning expects of a strategy, where replicas differ. (More in test_node.py, test_events.py and others.)"""

from typing import Any

import lightning.pytorch as pl
import torch
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


class Counting(NodeAverageStrategy):
    """Notes the step at each call, and whether the replicas met."""

    def make_averager(self) -> Any:
        averager = super().make_averager()
        after, self.steps = averager.after_step, []
        averager.after_step = lambda context: self.steps.append((context.step, averager.due(context))) or after(context)
        return averager


def _by_hand() -> dict[str, Any]:
    module, strategy = GanLike(), Counting(every_n_steps=3, find_unused_parameters=True, **BASE)
    _fit(module, strategy)
    return {"steps": strategy.steps, "parameters": parameters(module), "exchanges": strategy.traffic.exchanges}


def test_two_optimizers_by_hand_meet_once_per_batch() -> None:
    results = run(_by_hand, 3, nodes=NODES)
    for result in results:
        assert result["steps"] == [(step, step % 3 == 0) for step in range(1, 17)]
        assert result["exchanges"] == 5 + 1  # and the end
        assert torch.equal(result["parameters"], results[0]["parameters"])


def _accumulated() -> list[Any]:
    strategy = Counting(every_n_steps=2, **BASE)
    _fit(Net(), strategy, accumulate_grad_batches=3)
    return strategy.steps


def test_accumulation_meets_once_per_window() -> None:
    # 8 batches an epoch: windows of 3, 3 and 2.
    for steps in run(_accumulated, 3, nodes=NODES):
        assert steps == [(step, step % 2 == 0) for step in range(1, 7)]


# -- clipping ------------------------------------------------------------------------------------------------


def clipped_by_hand(limit: float, whole: bool = False) -> torch.Tensor:
    """Two models that clip the gradient of their samples (control: of each rank) and average every 4 steps."""
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
