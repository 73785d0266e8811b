"""Shares follow measured speeds, which are exact: the ranks' clocks are virtual."""

import sys
import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import run
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader
from virtual_time import virtual_time

from lightning_hetero import HeteroDDPStrategy, NodeAverageStrategy
from lightning_hetero.batching.shares import Cost, makespan, split

FIXED, PER_SAMPLE = 0.010, (0.002, 0.002, 0.004, 0.008)  # seconds, seconds per sample
CHANGED = (0.002, 0.008, 0.004, 0.002)


class Emulated(Net):
    def __init__(self, per_sample: dict[int, tuple[float, ...]]) -> None:
        super().__init__()
        self.per_sample, self.shares = per_sample, []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        k = next(ks for step, ks in reversed(self.per_sample.items()) if step <= self.global_step)
        time.sleep(FIXED + k[self.global_rank] * len(batch[0]))
        self.shares.append(len(batch[0]))
        return super().training_step(batch, batch_idx)


def _train(
    per_sample: dict[int, tuple[float, ...]],
    steps: int,
    options: dict[str, Any],
    strategy_class: Any = HeteroDDPStrategy,
) -> list[int]:
    with virtual_time(sys.modules[__name__]):
        module, strategy = Emulated(per_sample), strategy_class(**options)
        trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_steps": steps, "max_epochs": -1})
        trainer.fit(module, DataLoader(dataset(64 * 20), batch_size=16, shuffle=True))
    return module.shares


def slowdown(shares: list[int], per_sample: tuple[float, ...]) -> float:
    """How much longer the shares take than the best ones, by the emulated costs."""
    costs = [Cost(FIXED, k) for k in per_sample]
    return makespan(shares, costs) / makespan(split(64, costs), costs)


def test_from_an_even_start_to_the_optimum() -> None:
    steps = list(zip(*run(_train, 4, {0: PER_SAMPLE}, 24, {}), strict=True))
    assert steps[0] == (16, 16, 16, 16)
    assert all(sum(shares) == 64 for shares in steps)
    assert slowdown(list(steps[0]), PER_SAMPLE) > 2.3
    assert min(slowdown(list(shares), PER_SAMPLE) for shares in steps[-6:]) < 1.1


@pytest.mark.long
def test_back_on_the_optimum_after_a_change_of_speed() -> None:
    results = run(_train, 4, {0: PER_SAMPLE, 24: CHANGED}, 72, {"rebalance_every_n_steps": 2})
    steps = [list(shares) for shares in zip(*results, strict=True)]
    assert slowdown(steps[24], CHANGED) > 2
    assert min(slowdown(shares, CHANGED) for shares in steps[24:]) < 1.1


def test_replicas_that_meet_every_few_steps_adapt_too() -> None:
    options = {"every_n_steps": 4, "ranks_per_node": 1}
    steps = list(zip(*run(_train, 4, {0: PER_SAMPLE}, 60, options, NodeAverageStrategy), strict=True))
    assert all(sum(shares) == 64 for shares in steps)
    assert min(slowdown(list(shares), PER_SAMPLE) for shares in steps[-8:]) < 1.1


def test_limits_hold_while_shares_adapt() -> None:
    results = run(_train, 4, {0: PER_SAMPLE}, 24, {"min_batch_size": 8, "max_batch_size": [20, 64, 64, 64]})
    for shares in zip(*results, strict=True):
        assert min(shares) >= 8
        assert shares[0] <= 20
        assert sum(shares) == 64
