"""Rates of `hetero_daso`: exchanges per batch and steps of waiting, never stuck and never out of bounds."""

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint
from ranks import run
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader

from lightning_hetero import DASOStrategy
from lightning_hetero.algorithms.schedules import RateSchedule

# -- the schedule --------------------------------------------------------------------------------------------


class Naive(RateSchedule):
    """The control: starts over only if both arrive at 1 in the same step."""

    def observe_loss(self, loss: float) -> None:
        if self.every == self.wait == 1:
            self.every, self.wait = self.max_every, self.max_every // 4
        else:
            self.every, self.wait = self.every // 2, self.wait // 2


def cycle(schedule: RateSchedule, plateaus: int = 40) -> list[tuple[int, int]]:
    rates = []
    schedule.observe_loss(1.0)
    for _ in range(plateaus):
        schedule.observe_loss(1.0)
        rates.append((schedule.every, schedule.wait))
    return rates


@pytest.mark.parametrize("every", [3, 5, 7])
@pytest.mark.parametrize("largest", [3, 8, 12])
def test_rates_never_stick_at_0(every: int, largest: int) -> None:
    rates = [b for b, _ in cycle(RateSchedule(every, 1, largest, patience=1))]
    assert min(rates) == 1
    ones = [i for i, b in enumerate(rates[:-1]) if b == 1]
    assert len(ones) > 5
    assert all(rates[i + 1] == largest for i in ones)
    assert cycle(Naive(every, 1, largest, patience=1))[-1] == (0, 0)


def test_an_automatic_wait_lies_between_1_and_b() -> None:
    draw = np.random.default_rng(0)
    for every in range(1, 13):
        for largest in (1, 3, 8, 13):
            schedule = RateSchedule(every, "auto", largest, patience=1)
            for _ in range(60):
                if draw.random() < 0.5:
                    schedule.measured(draw.choice([0.0, 0.01, 1.0, 2.5, 7.9, 100.0, np.nan, np.inf], 3).tolist())
                else:
                    schedule.observe_loss(1.0)
                assert 1 <= schedule.wait <= schedule.every


# -- what it looks at -----------------------------------------------------------------------------------------


class Logging(Net):
    """Logs a level that rises on one rank as it falls on the other: the mean stays."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[tuple[int, int]] = []

    def on_train_epoch_end(self) -> None:
        schedule = self.trainer.strategy.averager.schedule
        self.rates.append((schedule.every, schedule.wait))
        self.log("level", 10.0 + self.current_epoch * (1 if self.global_rank else -1))


class Weighed(Net):
    """Its samples weigh as the rank's number and 1; the losses of its ranks differ."""

    def batch_weight(self, batch: Any) -> float:
        return float(1 + self.global_rank)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return 0.0 * super().training_step(batch, batch_idx) + 1.0 + self.global_rank


def _mean_of_weighed() -> float:
    strategy, seen = DASOStrategy(balance="off", warmup=0, cooldown=0, schedule_every_n_steps=2), list[float]()
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_steps": 4})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RateSchedule, "observe_loss", lambda _, loss: seen.append(loss))
        trainer.fit(Weighed(), DataLoader(dataset(96), batch_size=4))
    return seen[0]


def test_the_loss_weighs_as_the_gradients_do() -> None:
    assert run(_mean_of_weighed, 2, nodes=[1, 1]) == [pytest.approx((1 * 1 + 2 * 2) / 3)] * 2


class SaveAtEnd(Checkpoint):
    """Saves at the end of an epoch, when the module has logged."""

    def __init__(self, path: str, epoch: int) -> None:
        self.path, self.epoch = path, epoch

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


def _monitored(path: str = "", resume: bool = False, **options: Any) -> list[tuple[int, int]]:
    warnings.filterwarnings("ignore", ".*recommended to use.*sync_dist=True")
    module, saving = Logging(), SaveAtEnd(path, epoch=9 if resume or not path else 1)
    strategy = DASOStrategy(balance="off", global_batch_size=12, warmup=0, cooldown=0, patience=1, **options)
    settings = {**FAST, "max_epochs": 4, "callbacks": [saving], "enable_checkpointing": True}
    trainer = pl.Trainer(strategy=strategy, **settings)
    trainer.fit(module, DataLoader(dataset(96), batch_size=4), ckpt_path=path if resume else None)
    return module.rates


def test_the_monitored_metric_is_the_mean_of_all_ranks() -> None:
    for rates in run(_monitored, 2, nodes=[1, 1], monitor="level"):
        assert rates == [(4, 1), (4, 1), (2, 1), (1, 1)]


def _undisturbed_and_resumed(path: str, *cases: dict[str, Any]) -> list[Any]:
    return [[_monitored(path, resume, **case) for resume in (False, True)] for case in cases]


def test_a_resumed_run_looks_as_often_as_an_undisturbed_one(tmp_path: Path) -> None:
    """The metric of an epoch that ends with the checkpoint counts in the next step, and no more than once."""
    cases = {"monitor": "level"}, {"monitor": "level", "schedule_every_n_steps": 5}
    found, _ = run(_undisturbed_and_resumed, 2, str(tmp_path / "saved.ckpt"), *cases, nodes=[1, 1])
    for undisturbed, resumed in found:
        assert undisturbed[2] != undisturbed[1]
        assert resumed == undisturbed[2:]
