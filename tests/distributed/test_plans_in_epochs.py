"""Strategies without common steps get new shares within an epoch; every step has one plan on all ranks."""

import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import run
from tasks import FAST
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_hetero import EASGDAsyncStrategy, GossipAsyncStrategy
from lightning_hetero.engine.plan_agreement import PlanAgreement
from lightning_hetero.workload.agreement import Leader

PER_SAMPLE = (0.001, 0.002, 0.004, 0.004)  # seconds of a delay that uses no core
STEPS, BATCH = 180, 8


class Numbered(Dataset):
    """Samples that are their own numbers."""

    def __len__(self) -> int:
        return STEPS * BATCH * len(PER_SAMPLE)

    def __getitem__(self, index: int) -> int:
        return index


class Slow(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.taken = nn.Linear(2, 1), []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(0.004 + PER_SAMPLE[self.global_rank] * len(batch))
        self.taken.append(batch.tolist())
        return self.net(torch.ones(len(batch), 2)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Evaluated(Slow):
    """Looks at the validation data in mid-epoch, when some ranks may know of a plan and others not yet."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def on_validation_start(self) -> None:
        self.seen.append([])

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.seen[-1] += batch.tolist()


def agree_often() -> None:
    """An epoch of these tests takes a few seconds."""
    PlanAgreement.POLL, PlanAgreement.QUICK, Leader.WINDOW = 0.1, 0.02, 0.3


def _train(strategy_class: Any, workers: int = 0, **options: Any) -> tuple[list[list[int]], list[list[int]]]:
    agree_often()
    module, strategy = Slow(), strategy_class(ranks_per_node=1, **options)
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_steps": -1, "max_epochs": 1})
    loader = DataLoader(Numbered(), batch_size=BATCH, shuffle=True, num_workers=workers)
    trainer.fit(module, loader)
    return module.taken, [[p.start, *p.split([BATCH * len(PER_SAMPLE)])[0]] for p in strategy.share.planner.plans]


def _train_and_evaluate() -> Any:
    agree_often()
    module = Evaluated()
    options = {**FAST, "max_steps": -1, "max_epochs": 1, "val_check_interval": 30, "limit_val_batches": 1.0}
    trainer = pl.Trainer(strategy=GossipAsyncStrategy(ranks_per_node=1), **options)
    numbers = Numbered()
    trainer.fit(module, DataLoader(numbers, batch_size=BATCH), DataLoader(range(200), batch_size=BATCH))
    return module.taken, module.seen


def check_each_sample_once(ranks: list[list[list[int]]]) -> None:
    assert {len(taken) for taken in ranks} == {STEPS}
    assert sorted(i for taken in ranks for batch in taken for i in batch) == list(range(len(Numbered())))
    for step in zip(*ranks, strict=True):
        assert sum(map(len, step)) == BATCH * len(PER_SAMPLE)


@pytest.mark.parametrize(
    ("strategy_class", "workers", "options"),
    [(GossipAsyncStrategy, 0, {}), (EASGDAsyncStrategy, 1, {"tau": 4, "moving_rate": "auto"})],
)
def test_shares_become_unequal_within_the_first_epoch(
    strategy_class: Any, workers: int, options: dict[str, Any]
) -> None:
    results = run(_train, 4, strategy_class, workers, **options)
    check_each_sample_once([taken for taken, _ in results])
    assert all(plans == results[0][1] for _, plans in results)
    first, last = ([len(taken[step]) for taken, _ in results] for step in (0, STEPS - 1))
    assert first == [BATCH] * 4
    assert last[0] > 1.25 * BATCH
    assert max(last[2:]) < BATCH


def test_off_keeps_shares_even() -> None:
    results = run(_train, 4, GossipAsyncStrategy, balance="off")
    assert all(len(batch) == BATCH for taken, _ in results for batch in taken)


def test_validation_in_mid_epoch_sees_every_sample_once() -> None:
    results = run(_train_and_evaluate, 4)
    check_each_sample_once([taken for taken, _ in results])
    looks = list(zip(*(seen for _, seen in results), strict=True))[1:]  # without the sanity check
    assert len(looks) == STEPS // 30
    for look in looks:
        assert sorted(i for part in look for i in part) == list(range(200))
