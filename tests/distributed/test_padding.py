"""A rank without a sample of a batch: nothing of its padding batch may count."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from oracles import oracle
from ranks import attempt, run
from tasks import FAST, EvaluatedNet, Net, dataset, error, fit, parameters
from test_own_shards import Shard
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero import HeteroDDPStrategy

WORLD = 3


class SparseTokens(Net):
    """A mean over tokens, of which many samples have none: a rank's own mean may be 0 / 0."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y, length, _ = batch
        tokens = (length > 3) * length
        return (tokens * (self.net(x) - y) ** 2).sum() / tokens.sum()

    def batch_weight(self, batch: Any) -> torch.Tensor:
        return ((batch[2] > 3) * batch[2]).sum()


def test_a_rank_with_a_part_of_weight_zero() -> None:
    truth = parameters(oracle(SparseTokens, 12))
    assert torch.isfinite(truth).all()
    assert error(truth, parameters(Net())) > 1e-2
    for result in run(fit, WORLD, SparseTokens, 12, strategy={"balance": [8.0, 1.0, 3.0]}):
        assert error(result["parameters"], truth) <= 1e-10


class Spread(Net):
    """A loss that is NaN on one sample, as a padding batch is."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, *_ = batch
        difference = self.net(x) - y
        loss = ((difference - difference.mean()).square().sum() / (len(x) - 1)).sqrt()
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


def test_a_padding_batch_with_a_loss_that_is_not_finite() -> None:
    for result in run(fit, WORLD, Spread, 12, 96, strategy={"balance": [1.0, 0.0, 1.0]}):
        assert torch.isfinite(result["parameters"]).all()
        assert all(value == value for value in result["metrics"].values())


class Logs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        size = float(len(batch[0]))
        options = {"sync_dist": True, "batch_size": len(batch[0]), "on_epoch": True}
        self.log("mean", loss, on_step=False, **options)
        self.log("sum", torch.tensor(size), reduce_fx="sum", on_step=True, **options)
        self.log("largest", batch[3].max().float(), reduce_fx="max", on_step=False, **options)
        self.log("least", batch[3].min().float(), reduce_fx="min", on_step=False, **options)
        return loss


def test_what_a_padding_batch_logs_adds_nothing() -> None:
    single = run(fit, 1, Logs, 12, 98, max_epochs=1)[0]["metrics"]
    assert single["sum_epoch"] == 98
    for result in run(fit, WORLD, Logs, 12, 98, strategy={"balance": [1.0, 0.0, 1.0]}, max_epochs=1):
        assert result["metrics"] == pytest.approx(single, rel=1e-12)


class StepLogs(EvaluatedNet):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated += batch[3].tolist()
        self.log("val", self.loss(batch), sync_dist=True, on_step=True, on_epoch=True)


def _validate(samples: int, batch_size: int) -> tuple[float, float, list[int]]:
    module, strategy = StepLogs(), HeteroDDPStrategy()
    trainer = pl.Trainer(strategy=strategy, **FAST)
    trainer.validate(module, DataLoader(dataset(samples), batch_size=batch_size), verbose=False)
    with torch.no_grad():
        return trainer.callback_metrics["val_epoch"].item(), module.loss(dataset(samples)[:]).item(), module.evaluated


@pytest.mark.parametrize(("samples", "batch_size"), [(10, 1), (7, 4), (5, 1), (101, 4)])
def test_collectives_in_every_validation_step(samples: int, batch_size: int) -> None:
    results = run(_validate, WORLD, samples, batch_size)
    for value, truth, _ in results:
        assert value == pytest.approx(truth, rel=1e-12)
    assert sorted(i for *_, seen in results for i in seen) == list(range(samples))


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).double()


@pytest.mark.long(after=1)
@pytest.mark.parametrize("balance", ["auto", [1.0, 0.0, 1.0], [20.0, 1.0, 1.0]])
def test_batchnorm_never_gets_a_single_sample(balance: Any) -> None:
    # 101 samples in batches of 12: the last one has 5.
    for result in run(fit, WORLD, Normed, 12, 101, strategy={"balance": balance}):
        assert torch.isfinite(result["parameters"]).all()


# -- streams -------------------------------------------------------------------------------------------------


def _stream(loader: Any, options: dict[str, Any], module: Any = Net, **trainer: Any) -> list[int]:
    net = module()
    strategy = HeteroDDPStrategy(**options)
    pl.Trainer(strategy=strategy, **{**FAST, "max_steps": 4, "max_epochs": -1, **trainer}).fit(net, loader)
    return [len(batch) for batch in net.seen]


def test_endless_streams_take_fixed_shares() -> None:
    options = {"balance": [3.0, 1.0], "global_batch_size": 16}
    assert run(_stream, 2, DataLoader(Shard(60, endless=True), batch_size=4), options) == [[12] * 4, [4] * 4]


class Ragged(IterableDataset):
    def __iter__(self) -> Any:
        yield from (torch.ones(1 + i % 3) for i in range(40))


class RaggedNet(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(list(range(len(batch))))
        return torch.stack([self.net(x.mean() * torch.ones(8, dtype=torch.float64)) for x in batch]).square().mean()


class WeighedNet(RaggedNet):
    def batch_weight(self, batch: Any) -> int:
        return len(batch)


def test_a_batch_of_tensors_of_different_lengths_has_no_size_unless_it_is_given() -> None:
    loader = DataLoader(Ragged(), batch_size=4, collate_fn=list)
    first, _ = attempt(_stream, 2, loader, {"balance": "off"}, RaggedNet)
    assert isinstance(first.error, UserWarning), first.trace
    assert "first dimensions [1, 2, 3]" in str(first.error)
    assert run(_stream, 2, loader, {"balance": "off"}, WeighedNet) == [[4] * 4] * 2
