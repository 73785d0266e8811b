"""Evaluation with every kind of dataloader: each sample counts exactly once."""

from collections import Counter
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from oracles import oracle
from ranks import run
from tasks import FAST, EvaluatedNet, Net, dataset, error, parameters
from test_data import UNEVEN, WORLD
from torch.utils.data import (
    DataLoader,
)

from lightning_hetero import HeteroDDPStrategy

# -- evaluation ----------------------------------------------------------------------------------------------


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("epoch")
        self.pairs: list[tuple[list[int], list[int]]] = []

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.pairs = list(zip(batch_indices[0], predictions, strict=True))


def _evaluate(samples: int, batch_size: int, balance: Any) -> dict[str, Any]:
    module, writer = EvaluatedNet(), Writer()
    strategy = HeteroDDPStrategy(balance=balance)
    trainer = pl.Trainer(
        strategy=strategy, **{**FAST, "max_epochs": 1, "num_sanity_val_steps": 0, "callbacks": [writer]}
    )
    loader = DataLoader(dataset(samples), batch_size=batch_size)
    trainer.fit(module, DataLoader(dataset(30), batch_size=4), loader)
    result = {"val": module.evaluated, "metrics": {k: v.item() for k, v in trainer.callback_metrics.items()}}
    module.evaluated = []
    result["metrics"] |= trainer.test(module, loader, verbose=False)[0]
    result["test"] = module.evaluated
    with torch.no_grad():
        result["truth"] = module.loss(dataset(samples)[:]).item()
    result["predict"] = [i for batch in trainer.predict(module, loader) for i in batch]
    result["written"] = writer.pairs
    return result


@pytest.mark.long(after=1)
@pytest.mark.parametrize("balance", ["auto", UNEVEN, [1.0, 0.0, 1.0]])
@pytest.mark.parametrize(("samples", "batch_size"), [(101, 4), (7, 4), (10, 1), (12, 4)])
def test_evaluation_sees_every_sample_once(samples: int, batch_size: int, balance: Any) -> None:
    results = run(_evaluate, WORLD, samples, batch_size, balance)
    for stage in ("val", "test", "predict"):
        assert Counter(i for r in results for i in r[stage]) == Counter(range(samples)), stage
    assert all(indices == predicted for result in results for indices, predicted in result["written"])
    assert Counter(i for r in results for indices, _ in r["written"] for i in indices) == Counter(range(samples))
    for result in results:  # the mean over samples, however they were split
        assert result["metrics"]["val"] == pytest.approx(result["truth"], rel=1e-12)
        assert result["metrics"]["test"] == pytest.approx(result["truth"], rel=1e-12)


def test_oracle_differs_from_an_untrained_model() -> None:
    # The control of this file's comparisons: they tell weights apart.
    assert error(parameters(oracle(Net, 12, 96)), parameters(partial(Net)())) > 1e-2
