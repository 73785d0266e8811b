"""What evaluation steps fetch, log and reduce: nothing is skipped, and means weigh ranks by samples."""

import os
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from ranks import run
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroDDPStrategy

SAMPLES = 32
SHARES = [3.0, 1.0]  # of two ranks


class Numbers(Net):
    """Keeps the numbers that each step saw, and what a mean over ranks made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[list[float], float]] = []

    def evaluate(self, numbers: torch.Tensor, **log: Any) -> None:
        reduced = self.trainer.strategy.reduce(numbers.mean(), reduce_op="mean").item()
        self.steps.append((numbers.tolist(), reduced))
        if log:
            self.log("mean", numbers.mean(), on_step=True, on_epoch=True, sync_dist=True, **log)


class FromIterator(Numbers):
    def take(self, dataloader_iter: Iterator[Any]) -> torch.Tensor:
        batch, _, _ = next(dataloader_iter)
        return batch[0]

    def validation_step(self, dataloader_iter: Iterator[Any]) -> None:
        numbers = self.take(dataloader_iter)
        self.evaluate(numbers, batch_size=len(numbers))

    def test_step(self, dataloader_iter: Iterator[Any]) -> None:
        self.evaluate(self.take(dataloader_iter), batch_size=None)  # Lightning would take the batch before

    def predict_step(self, dataloader_iter: Iterator[Any]) -> int:
        self.evaluate(self.take(dataloader_iter))
        return 0


class Box:
    """A batch of which Lightning cannot tell the size."""

    def __init__(self, samples: list[Any]) -> None:
        self.numbers = torch.stack([number for (number,) in samples])


class FromBoxes(Numbers):
    def validation_step(self, batch: Box, batch_idx: int) -> None:
        numbers = batch.numbers
        self.log("mean", numbers.mean(), on_step=True, on_epoch=True, sync_dist=True, batch_size=len(numbers))
        self.steps.append((numbers.tolist(), float("nan")))

    def test_step(self, batch: Box, batch_idx: int) -> None:
        self.evaluate(batch.numbers)

    def predict_step(self, batch: Box, batch_idx: int) -> int:
        self.evaluate(batch.numbers)
        return 0


class Steps(DummyLogger):
    """Keeps what each evaluation step logs."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        steps = [name for name in metrics if name.startswith("mean") and "epoch" not in name]
        self.means += [float(metrics[name]) for name in steps]


STAGES = ("validate", "test", "predict")


def _evaluate(kind: str) -> dict[str, dict[str, Any]]:
    warnings.filterwarnings("ignore", "Found `dataloader_iter` argument")  # Lightning calls it experimental
    collate = Box if kind == "boxes" else None
    data = TensorDataset(torch.arange(SAMPLES, dtype=torch.float64))
    loader = DataLoader(data, batch_size=4, collate_fn=collate)
    logger, module = Steps(), FromBoxes() if kind == "boxes" else FromIterator()
    trainer = pl.Trainer(strategy=HeteroDDPStrategy(balance=SHARES), **{**FAST, "logger": logger})
    results = {}
    for stage in STAGES:
        module.steps, logger.means = [], []
        getattr(trainer, stage)(module, loader)
        epoch = trainer.callback_metrics.get("mean_epoch", torch.tensor(float("nan"))).item()
        results[stage] = {"steps": module.steps, "logged": logger.means, "epoch": epoch}
    return results


def _truth(results: list[dict[str, Any]]) -> list[float]:
    """Of each step, the mean of the numbers that both ranks saw; all numbers once."""
    seen = [[np.array(numbers) for numbers, _ in result["steps"]] for result in results]
    together = [np.concatenate(parts) for parts in zip(*seen, strict=True)]
    assert sorted(np.concatenate(together)) == list(range(SAMPLES))
    assert any(len(mine) != len(other) for mine, other in zip(*seen, strict=True))
    return [numbers.mean() for numbers in together]


def test_a_step_that_fetches_its_batches_sees_all_of_them() -> None:
    jobs = run(_evaluate, 2, "iterator")
    for stage in STAGES:
        results = [job[stage] for job in jobs]
        truth = _truth(results)
        for result in results:
            assert [mean for _, mean in result["steps"]] == pytest.approx(truth)
            if stage != "predict":  # where nothing can be logged
                assert result["logged"] == pytest.approx(truth)
                assert result["epoch"] == pytest.approx(15.5)


def _evaluate_warned() -> Any:
    if os.environ["RANK"] != "0":
        return _evaluate("boxes")
    with pytest.warns(UserWarning, match="counted every rank the same") as caught:
        result = _evaluate("boxes")
    assert len([w for w in caught if "counted every rank" in str(w.message)]) == 1  # not once per step
    return result


def test_batches_of_a_class_that_lightning_cannot_look_into() -> None:
    jobs = run(_evaluate_warned, 2)
    results = [job["validate"] for job in jobs]
    truth = _truth(results)
    for result in results:  # the batch_size that the user gives is the weight
        assert result["logged"] == pytest.approx(truth)
        assert result["epoch"] == pytest.approx(15.5)
    for stage in ("test", "predict"):  # none is given: every rank counts the same, with a warning
        results = [job[stage] for job in jobs]
        parts = [[np.mean(numbers) for numbers, _ in result["steps"]] for result in results]
        plain = [np.mean(means) for means in zip(*parts, strict=True)]
        for result in results:
            assert [mean for _, mean in result["steps"]] == pytest.approx(plain)


class Tokens(Net):
    """Says itself how much its training loss counts."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss, tokens = self.loss(batch), int(batch[2].sum())
        self.log("mean", loss, on_step=True, sync_dist=True, batch_size=tokens)
        self.kept.append((loss.item(), tokens))
        return loss


def _tokens() -> dict[str, Any]:
    module, logger = Tokens(), Steps()
    strategy = HeteroDDPStrategy(balance=SHARES)
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 1, "logger": logger, "log_every_n_steps": 1})
    trainer.fit(module, DataLoader(dataset(32), batch_size=4))
    return {"kept": module.kept, "logged": logger.means}


def test_the_users_batch_size_is_the_weight_in_training_too() -> None:
    results = run(_tokens, 2)
    truth = [
        np.average([loss for loss, _ in parts], weights=[tokens for _, tokens in parts])
        for parts in zip(*(result["kept"] for result in results), strict=True)
    ]
    for result in results:
        assert result["logged"] == pytest.approx(truth)


# -- buffers -------------------------------------------------------------------------------------------------


class Normed(Net):
    """With BatchNorm; keeps the statistics that it validates with."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, torch.nn.BatchNorm1d(16).double())
        self.statistics: list[torch.Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.statistics.append(self.net[1].running_mean.clone())


def _normed() -> list[torch.Tensor]:
    module, options = Normed(), {"accumulate_grad_batches": 3, "val_check_interval": 2, "max_epochs": 1}
    trainer = pl.Trainer(strategy=HeteroDDPStrategy(balance=SHARES), **{**FAST, **options})
    data = dataset(64)
    trainer.fit(module, DataLoader(data, batch_size=4), DataLoader(data, batch_size=32))
    return module.statistics


def test_all_ranks_validate_with_the_same_statistics_also_within_an_accumulation_window() -> None:
    first, second = run(_normed, 2)
    assert len(first) == 5
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
