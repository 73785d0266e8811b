"""The state of a module after a padding batch: metrics, buffers and tensors stay as they were."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry
from ranks import run
from tasks import FAST
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import CatMetric, MeanMetric, MetricCollection, MinMaxMetric
from torchmetrics.classification import BinaryAccuracy, BinaryF1Score

SAMPLES = [28, 12]  # of the ranks; in batches of 4 rank 1 runs padding batches four times


class Shard(IterableDataset):
    def __iter__(self) -> Any:
        rank = torch.distributed.get_rank()
        yield from (torch.tensor([float(rank)]) for _ in range(SAMPLES[rank]))


class Counting(pl.LightningModule):
    """Counts samples in all the ways that a module may."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(1, 1), nn.BatchNorm1d(1)
        self.mean, self.logged, self.values = MeanMetric(), MeanMetric(), CatMetric()
        self.both = MetricCollection([BinaryAccuracy(), BinaryF1Score()])
        self.wrapped = MinMaxMetric(MeanMetric())
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.tensor, self.batches = torch.zeros(()), 0
        self.outputs, self.held = list[torch.Tensor](), {"mean": MeanMetric()}
        self.shown = list[tuple[float, float]]()
        self.results: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.mean(batch)
        self.logged(batch)
        self.values.update(batch)
        self.both(batch.flatten() / 2 + 0.4, torch.ones(len(batch), dtype=torch.long))
        self.wrapped.update(batch)
        self.seen = self.seen + len(batch)
        self.tensor += len(batch)
        self.batches += 1
        self.outputs.append(batch)
        self.held["mean"].update(batch)
        self.log("logged", self.logged, on_step=True, on_epoch=True)
        self.log("seven", 7.0)
        self.log("highest", torch.tensor(-3.0), reduce_fx="max")
        return self.layer(self.norm(batch)).pow(2).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        values = self.trainer.callback_metrics
        self.shown.append((values["seven"].item(), values["highest"].item()))

    def on_train_epoch_end(self) -> None:
        self.results = {
            "outputs": len(torch.cat(self.outputs)),
            "held": self.held["mean"].compute().item(),
            "shown": set(self.shown),
            "own": [self.seen.item(), self.tensor.item(), self.batches, self.norm.num_batches_tracked.item()],
            "mean": self.mean.compute().item(),
            "values": sorted(self.values.compute().flatten().tolist()),
            "both": {name: value.item() for name, value in self.both.compute().items()},
            "wrapped": self.wrapped.compute()["raw"].item(),
            "updates": self.mean.update_count,
        }

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


def _fit(string: str) -> dict[str, Any]:
    module = Counting()
    trainer = pl.Trainer(strategy=StrategyRegistry[string]["strategy"](), devices=2, max_epochs=1, **FAST)
    trainer.fit(module, DataLoader(Shard(), 4))
    return {**module.results, "logged": trainer.callback_metrics["logged_epoch"].item()}


@pytest.mark.parametrize("string", ["hetero_ddp", "hetero_node"])
def test_stays_as_it_was(string: str) -> None:
    whole = sum(SAMPLES)
    for rank, result in enumerate(run(_fit, 2, string)):
        batches = SAMPLES[rank] // 4
        assert result["mean"] == result["logged"] == result["wrapped"] == pytest.approx(SAMPLES[1] / whole)
        assert result["values"] == [0.0] * SAMPLES[0] + [1.0] * SAMPLES[1]
        assert result["both"]["BinaryAccuracy"] == pytest.approx(SAMPLES[1] / whole)
        assert result["both"]["BinaryF1Score"] == pytest.approx(2 * SAMPLES[1] / (whole + SAMPLES[1]))
        assert result["updates"] == batches
        assert (result["outputs"], result["held"]) == (SAMPLES[rank], pytest.approx(SAMPLES[1] / whole))
        assert result["shown"] == {(7.0, -3.0)}
        assert result["own"][1:3] == [4.0 * batches, SAMPLES[0] // 4]  # counters of steps go on
        if string == "hetero_node":  # otherwise rank 0's buffers are sent to all ranks
            assert [result["own"][0], result["own"][3]] == [4 * batches, batches]
