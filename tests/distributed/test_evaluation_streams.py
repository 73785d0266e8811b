"""Evaluation data of which every rank has its own: an empty part, and parts of unequal length."""

import logging
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import attempt, run
from tasks import FAST, Net, dataset
from test_data import _env
from torch.utils.data import DataLoader, IterableDataset, Subset

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.errors import DataError


class Part(IterableDataset):
    """Some samples, as a stream."""

    def __init__(self, samples: range) -> None:
        self.data, self.samples = dataset(), samples

    def __iter__(self) -> Iterator[Any]:
        for i in self.samples:
            yield self.data[i]


def _loader(kind: str, sizes: list[int]) -> DataLoader:
    rank = int(_env("RANK"))
    samples = range(50 * rank, 50 * rank + sizes[rank])
    return DataLoader(Part(samples) if kind == "stream" else Subset(dataset(), samples), batch_size=4)


class Logs(Net):
    def __init__(self, **log: Any) -> None:
        super().__init__()
        self.log_options, self.steps = {"sync_dist": True, **log}, 0

    def evaluate(self, batch: Any) -> None:
        self.steps += 1
        if self.log_options.get("gather"):
            self.all_gather(batch[0][:1])
        else:
            self.log("number", batch[3].double().mean(), **self.log_options)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> list[int]:
        self.steps += 1
        return batch[3].tolist()


def _evaluate(stage: str, kind: str, sizes: list[int], log: dict[str, Any], **options: Any) -> Any:
    module, strategy = Logs(**log), HeteroDDPStrategy(timeout=60.0)
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 1, "use_distributed_sampler": False, **options})
    loader = _loader(kind, sizes)
    if stage == "fit":
        trainer.fit(module, _loader("stream", [8, 8]), loader)
    else:
        getattr(trainer, stage)(module, loader)
    return trainer.callback_metrics.get("number", torch.tensor(torch.nan)).item(), module.steps


@pytest.mark.parametrize("kind", ["stream", "sized"])
@pytest.mark.parametrize("stage", ["fit", "test"])
def test_a_rank_without_evaluation_data(stage: str, kind: str) -> None:
    for outcome in attempt(_evaluate, 2, stage, kind, [8, 0], {}):
        assert isinstance(outcome.error, DataError), outcome.trace
        assert "rank(s) 1 got no" in str(outcome.error)


def test_a_rank_may_have_nothing_to_predict() -> None:
    assert [steps for _, steps in run(_evaluate, 2, "predict", "stream", [8, 0], {})] == [2, 0]


@pytest.mark.parametrize("kind", ["stream", "sized"])
@pytest.mark.parametrize("sizes", [[4, 12], [12, 4], [8, 12]])
def test_unequal_parts_and_a_value_of_each_step(kind: str, sizes: list[int]) -> None:
    for outcome in attempt(_evaluate, 2, "validate", kind, sizes, {"on_step": True}):
        assert isinstance(outcome.error, DataError), outcome.trace
        assert "different numbers of validation batches" in str(outcome.error)
        assert "on_step=False" in str(outcome.error)


@pytest.mark.parametrize("kind", ["stream", "sized"])
def test_unequal_parts_and_a_gather_in_the_step(kind: str) -> None:
    for outcome in attempt(_evaluate, 2, "test", kind, [4, 12], {"gather": True}):
        assert isinstance(outcome.error, DataError), outcome.trace


@pytest.mark.parametrize("kind", ["stream", "sized"])
@pytest.mark.parametrize(
    ("sizes", "log", "options"),
    [
        ([4, 12], {}, {}),  # only at the end of the epoch
        ([8, 8], {"on_step": True}, {}),
        ([7, 5], {"on_step": True}, {}),  # as many batches, of other sizes
        ([8, 12], {"on_step": True}, {"limit_val_batches": 1}),
    ],
)
def test_what_works(kind: str, sizes: list[int], log: dict[str, Any], options: dict[str, Any]) -> None:
    results = run(_evaluate, 2, "fit", kind, sizes, log, num_sanity_val_steps=0, **options)
    limit = options.get("limit_val_batches", 99)
    seen = [50 * rank + i for rank, size in enumerate(sizes) for i in range(min(size, 4 * limit))]
    for (mean, steps), size in zip(results, sizes, strict=True):
        assert steps == min(-(-size // 4), limit)
        if seen and not log:
            assert mean == pytest.approx(sum(seen) / len(seen))


def test_no_rank_has_data() -> None:
    assert [steps for _, steps in run(_evaluate, 2, "fit", "stream", [0, 0], {"on_step": True})] == [0, 0]


def _endless(**options: Any) -> list[str]:
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(Keep())
    _evaluate("fit", "stream", [8, 8], {}, **options)
    return [message for message in messages if "limit_val_batches" in message]


def test_a_validation_without_an_end_is_announced() -> None:
    first, second = run(_endless, 2)
    assert len(first) == 1
    assert not second
    assert run(_endless, 2, limit_val_batches=2) == [[], []]


def _constant() -> tuple[float, float]:
    class Ones(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("one", torch.tensor(1.0), batch_size=len(batch[0]), sync_dist=True)

    trainer = pl.Trainer(strategy=HeteroDDPStrategy(balance=[3.0, 2.0, 1.0]), **FAST)
    result = trainer.validate(Ones(), DataLoader(dataset(49), batch_size=4), verbose=False)
    return result[0]["one"], trainer.callback_metrics["one"].item()


def test_the_mean_of_ones_is_one() -> None:
    assert run(_constant, 3) == [(1.0, 1.0)] * 3
