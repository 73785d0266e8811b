"""Callbacks that average weights over time: against one process and loops by hand."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from oracles import oracle
from ranks import attempt, run
from tasks import FAST, EvaluatedNet, Net, dataset, error, parameters
from test_node import by_hand
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy, NodeAverageStrategy
from lightning_hetero.algorithms.engine import Engine
from lightning_hetero.errors import DisagreementError

NODES, SHARES = [2, 1], [3.0, 1.0, 2.0]
APART: dict[str, Any] = {"balance": SHARES, "timeout": 30, "ranks_per_node": 1}
EMA = partial(EMAWeightAveraging, decay=0.8)


class ByEpoch(WeightAveraging):
    """The plain mean, updated after every epoch."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None


CALLBACKS: dict[str, Any] = {
    "ema": EMA,
    "mean": WeightAveraging,
    "by epoch": ByEpoch,
    "swa": partial(StochasticWeightAveraging, 0.01, swa_epoch_start=1, annealing_epochs=1),
}


def fit_averaged(strategy: Any, module: Any, *callbacks: pl.Callback, resume: str | None = None, **options: Any) -> Any:
    keeps = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    settings = {**FAST, "max_epochs": 4, "num_sanity_val_steps": 0, "enable_checkpointing": keeps, **options}
    trainer = pl.Trainer(strategy=strategy, callbacks=list(callbacks), **settings)
    data = DataLoader(dataset(50), batch_size=4) if isinstance(module, EvaluatedNet) else None
    trainer.fit(module, DataLoader(dataset(96), batch_size=4, shuffle=True), data, ckpt_path=resume)
    return module


class Averages:
    """Averages that a callback must have after each of its updates, which are made where replicas meet."""

    def __init__(self, path: list[torch.Tensor], name: str, period: int, epoch: int = 8) -> None:
        self.validated: list[torch.Tensor] = []
        count, asked, self.final = 0, 0, path[0]
        for step, consensus in enumerate(path, 1):
            asked += name != "by epoch"
            for when in ("meeting", "validation", "end of epoch"):
                if when == "validation" and step % epoch == 0:
                    self.validated.append(self.final)
                asked += when == "end of epoch" and step % epoch == 0 and name == "by epoch"
                if step % (period if when == "meeting" else epoch) or when == "validation":
                    continue
                for _ in range(asked):
                    part = 1.0 if count == 0 else 0.2 if name == "ema" else 1 / (count + 1)
                    self.final, count = self.final + part * (consensus - self.final), count + 1
                asked = 0


# -- against one process -------------------------------------------------------------------------------------


def _flat(kind: Any, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: parameters(fit_averaged(kind(**options), Net(), make())) for name, make in CALLBACKS.items()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (HeteroDDPStrategy, {"balance": SHARES}),
        (NodeAverageStrategy, {"balance": SHARES, "every_n_steps": 1, "average_optimizer_state": True}),
    ],
)
def test_replicas_that_meet_at_every_step_are_one_process(kind: Any, options: dict[str, Any]) -> None:
    plain = parameters(oracle(Net, 12, 96, max_epochs=4))
    results = run(_flat, 3, kind, options, nodes=NODES)
    for name, make in CALLBACKS.items():
        truth = parameters(oracle(Net, 12, 96, max_epochs=4, callbacks=[make()]))
        assert error(plain, truth) > 1e-3
        for result in results:
            assert error(result[name], truth) <= 1e-10
            assert torch.equal(result[name], results[0][name])


# -- against a loop by hand ----------------------------------------------------------------------------------


class Watched(EvaluatedNet):
    """Keeps the weights after every step, and those that it validates with."""

    def __init__(self) -> None:
        super().__init__()
        self.path: list[torch.Tensor] = []
        self.validated: list[torch.Tensor] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.path.append(parameters(self))

    def on_validation_epoch_start(self) -> None:
        self.validated.append(parameters(self))


def _watched(folder: str, mutant: bool) -> dict[str, list[Any]]:
    if mutant:  # callbacks take in each replica's own weights
        Engine.hold = lambda self, sanity_check: None  # type: ignore[method-assign]
    found = {}
    for name in ("ema",) if mutant else ("none", "ema", "mean", "by epoch"):
        strategy = NodeAverageStrategy(every_n_steps=3, balance=SHARES)
        keep = ModelCheckpoint(f"{folder}/{name}", "{epoch}", save_top_k=-1, save_on_train_epoch_end=False)
        module, callbacks = Watched(), [CALLBACKS[name]()] if name in CALLBACKS else []
        if os.environ["RANK"] == "2":  # starts elsewhere
            nn.init.zeros_(module.net[0].weight)
        fit_averaged(strategy, module, *callbacks, keep, num_sanity_val_steps=1)
        found[name] = [module.path, module.validated, parameters(module)]
    return found


@pytest.mark.long(after=1)
@pytest.mark.parametrize("mutant", [False, True])
def test_averages_of_nodes_against_a_loop_by_hand(mutant: bool, tmp_path: Path) -> None:
    _, path = by_hand(3, 4, False, Watched)
    start = parameters(Watched())
    results = run(_watched, 3, str(tmp_path), mutant, nodes=NODES)
    for name in ("ema",) if mutant else ("ema", "mean", "by epoch"):
        truth = Averages(path, name, 3)
        begun = 1 if name == "by epoch" else 0  # before its first update it is the initial model
        if mutant:
            assert max(error(result[name][2], truth.final) for result in results) > 1e-4
            continue
        for result in results:
            assert all(torch.equal(own, other) for own, other in zip(result[name][0], result["none"][0], strict=True))
            own, validated, final = result[name]
            assert len(own) == 32
            assert error(final, truth.final) <= 1e-10
            assert torch.equal(final, results[0][name][2])
            assert all(torch.equal(seen, first) for seen, first in zip(validated, results[0][name][1], strict=True))
            assert torch.equal(validated[0], start)  # the sanity check
            for seen, mine in zip(validated[1 + begun :], truth.validated[begun:], strict=True):
                assert error(seen, mine) <= 1e-10
        for epoch, seen in enumerate(results[0][name][1][1:]):  # as Lightning writes them
            saved = torch.load(tmp_path / name / f"epoch={epoch}.ckpt", weights_only=True)
            average, current = Watched(), Watched()
            average.load_state_dict(saved["state_dict"])
            current.load_state_dict(saved["current_model_state"])
            assert torch.equal(parameters(average), seen)
            assert error(parameters(current), path[8 * epoch + 7]) <= 1e-10
            assert set(saved["averaging_state"]) == {"n_averaged"}


# -- what cannot be ------------------------------------------------------------------------------------------


class OnOneRank(WeightAveraging):
    """Asks for updates on the first rank only."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and os.environ["RANK"] == "0"


def test_ranks_that_do_not_ask_alike() -> None:
    for outcome in attempt(fit_averaged, 2, NodeAverageStrategy(every_n_steps=3, ranks_per_node=1), Net(), OnOneRank()):
        assert isinstance(outcome.error, DisagreementError), outcome.trace
        assert "OnOneRank: rank 0: 3, rank 1: 0" in str(outcome.error)
