"""Evaluation has each sample once, however steps fetch them; logged and reduced values weigh ranks by samples."""

import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from ranks import run
from refused import Logs, parts
from tasks import FAST, EvaluatedNet, Memory, Net, Predictions, dataset, train
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroDDPStrategy

SAMPLES = 32
SHARES = [3.0, 1.0]  # of two ranks


class Evaluated(EvaluatedNet):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated += batch[3].tolist()
        self.log("val", self.loss(batch), sync_dist=True, on_step=True, on_epoch=True)  # all ranks meet in each step
        self.log("one", torch.tensor(1.0), batch_size=len(batch[0]), sync_dist=True)


#: Samples, and those of a rank's batch.
SIZES = [(101, 4), (7, 4), (10, 1), (12, 4), (5, 1), (49, 4)]


def _stages(balance: Any) -> list[dict[str, Any]]:
    results = []
    for samples, batch_size in SIZES:
        module, writer, loader = Evaluated(), Predictions(), DataLoader(dataset(samples), batch_size=batch_size)
        options = {"num_sanity_val_steps": 0, "callbacks": [writer]}
        data = DataLoader(dataset(30), batch_size=4)
        trainer = train(module, HeteroDDPStrategy(balance=balance), data, loader, **options)
        found: dict[str, Any] = {"val": module.evaluated, "metrics": {**trainer.callback_metrics}}
        module.evaluated = []
        found["metrics"] |= trainer.test(module, loader, verbose=False)[0]
        found["test"] = module.evaluated
        with torch.no_grad():
            found["truth"] = module.loss(dataset(samples)[:]).item()
        found["predict"] = [i for batch in trainer.predict(module, loader) for i in batch]
        results.append({**found, "written": writer.pairs})
    return results


@pytest.mark.long(after=1)
@pytest.mark.parametrize("balance", ["auto", [3.0, 2.0, 1.0], [1.0, 0.0, 1.0]])
def test_evaluation_sees_every_sample_once(balance: Any) -> None:
    for (samples, _), *results in zip(SIZES, *run(_stages, 3, balance), strict=True):
        for stage in ("val", "test", "predict"):
            assert sorted(i for result in results for i in result[stage]) == list(range(samples)), (samples, stage)
        written = [pair for result in results for pair in result["written"]]
        assert all(indices == predicted for indices, predicted in written)
        assert sorted(i for indices, _ in written for i in indices) == list(range(samples))
        for result in results:  # the mean over samples, for any split
            for name in ("val_epoch", "test"):
                assert float(result["metrics"][name]) == pytest.approx(result["truth"], rel=1e-12), samples
            assert float(result["metrics"]["one"]) == 1.0


class Numbers(Net):
    """Keeps the numbers of each step, and their mean over ranks."""

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
    """A batch whose size Lightning cannot tell."""

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


def means(logger: Memory) -> list[float]:
    """The mean that each step has logged."""
    names = [(name, row) for _, row in logger.rows for name in row if name.startswith("mean") and "epoch" not in name]
    return [float(row[name]) for name, row in names]


STAGES = ("validate", "test", "predict")


def _evaluate(kind: str) -> dict[str, dict[str, Any]]:
    warnings.filterwarnings("ignore", "Found `dataloader_iter` argument")  # Lightning calls it experimental
    collate = Box if kind == "boxes" else None
    data = TensorDataset(torch.arange(SAMPLES, dtype=torch.float64))
    loader = DataLoader(data, batch_size=4, collate_fn=collate)
    logger, module = Memory(), FromBoxes() if kind == "boxes" else FromIterator()
    trainer = pl.Trainer(strategy=HeteroDDPStrategy(balance=SHARES), **{**FAST, "logger": logger})
    results = {}
    for stage in STAGES:
        module.steps, logger.rows = [], []
        getattr(trainer, stage)(module, loader)
        epoch = trainer.callback_metrics.get("mean_epoch", torch.tensor(float("nan"))).item()
        results[stage] = {"steps": module.steps, "logged": means(logger), "epoch": epoch}
    return results


def _truth(results: list[dict[str, Any]]) -> list[float]:
    """For each step the mean of the numbers of both ranks. Fails if a number is missing or comes twice."""
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
    """Sets the weight of its training loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss, tokens = self.loss(batch), int(batch[2].sum())
        self.log("mean", loss, on_step=True, sync_dist=True, batch_size=tokens)
        self.kept.append((loss.item(), tokens))
        return loss


def _tokens() -> dict[str, Any]:
    module, logger, data = Tokens(), Memory(), DataLoader(dataset(32), batch_size=4)
    train(module, HeteroDDPStrategy(balance=SHARES), data, logger=logger, log_every_n_steps=1)
    return {"kept": module.kept, "logged": means(logger)}


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
    module, data = Normed(), dataset(64)
    loaders = DataLoader(data, batch_size=4), DataLoader(data, batch_size=32)
    options = {"accumulate_grad_batches": 3, "val_check_interval": 2}
    train(module, HeteroDDPStrategy(balance=SHARES), *loaders, **options)
    return module.statistics


def test_all_ranks_validate_with_the_same_statistics_also_within_an_accumulation_window() -> None:
    first, second = run(_normed, 2)
    assert len(first) == 5
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


# -- data of which every rank has its own --------------------------------------------------------------------


def _parts(stage: str, kind: str, sizes: list[int], log: dict[str, Any], **options: Any) -> tuple[float, int]:
    """The mean of the logged values, and the number of this rank's steps."""
    module, strategy, data = Logs(**log), HeteroDDPStrategy(timeout=60.0), parts(kind, sizes)
    options = {"use_distributed_sampler": False, **options}
    if stage == "fit":
        trainer = train(module, strategy, parts("stream", [8, 8]), data, **options)
    else:
        trainer = pl.Trainer(strategy=strategy, **FAST, **options)
        getattr(trainer, stage)(module, data)
    return trainer.callback_metrics.get("number", torch.tensor(torch.nan)).item(), module.steps


PARTS: list[tuple[list[int], dict[str, Any], dict[str, Any]]] = [
    ([4, 12], {}, {}),  # only at the end of the epoch
    ([8, 8], {"on_step": True}, {}),
    ([7, 5], {"on_step": True}, {}),  # as many batches, of other sizes
    ([8, 12], {"on_step": True}, {"limit_val_batches": 1}),
    ([0, 0], {"on_step": True}, {}),
]
KINDS = {"sized": PARTS[:-1], "stream": PARTS}  # Lightning warns of the length 0


def _all_parts(kind: str) -> list[Any]:
    found = [_parts("fit", kind, sizes, log, num_sanity_val_steps=0, **options) for sizes, log, options in KINDS[kind]]
    return [*found, _parts("predict", "stream", [8, 0], {})]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_unlike_length_are_evaluated_where_no_step_meets_others(kind: str) -> None:
    *ranks, predicted = zip(*run(_all_parts, 2, kind), strict=True)
    for (sizes, log, options), results in zip(KINDS[kind], ranks, strict=True):
        limit = options.get("limit_val_batches", 99)
        seen = [50 * rank + i for rank, size in enumerate(sizes) for i in range(min(size, 4 * limit))]
        assert [steps for _, steps in results] == [min(-(-size // 4), limit) for size in sizes]
        assert log or [mean for mean, _ in results] == pytest.approx([sum(seen) / len(seen)] * 2)
    assert [steps for _, steps in predicted] == [2, 0]  # a rank may have nothing to predict


def _endless(**options: Any) -> list[str]:
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(Keep())
    _parts("fit", "stream", [8, 8], {}, **options)
    return [message for message in messages if "limit_val_batches" in message]


def test_a_validation_without_an_end_is_announced() -> None:
    first, second = run(_endless, 2)
    assert len(first) == 1
    assert not second
    assert run(_endless, 2, limit_val_batches=2) == [[], []]
