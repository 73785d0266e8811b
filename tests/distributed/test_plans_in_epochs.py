"""Strategies without common steps get new shares within an epoch; every step has one plan on all ranks."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import attempt, run
from tasks import FAST
from torch import nn
from torch.utils.data import DataLoader, Dataset
from virtual_time import VirtualTime, virtual_time

from lightning_hetero import EASGDAsyncStrategy, GossipAsyncStrategy
from lightning_hetero.batching.plan_agreement import PlanLeader
from lightning_hetero.batching.plan_thread import PlanAgreement

really_sleep = time.sleep
PER_SAMPLE = (0.001, 0.002, 0.004, 0.004)  # seconds of a delay that uses no core
STEPS, BATCH = 180, 8


class Numbered(Dataset):
    """A dataset of numbered samples."""

    def __len__(self) -> int:
        return STEPS * BATCH * len(PER_SAMPLE)

    def __getitem__(self, index: int) -> int:
        return index


class Slow(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.taken = nn.Linear(2, 1), []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(0.004 + PER_SAMPLE[int(os.environ["RANK"])] * len(batch))
        self.taken.append(batch.tolist())
        return self.net(torch.ones(len(batch), 2)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Evaluated(Slow):
    """Validates within an epoch, when some ranks may know of a plan and others not yet."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def on_validation_start(self) -> None:
        self.seen.append([])

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.seen[-1] += batch.tolist()


@contextmanager
def measured_exactly() -> Iterator[None]:
    """Steps take real time, of which only the delay is measured; ranks agree often, as epochs take seconds here."""
    with virtual_time(sys.modules[__name__]) as clock:
        clock.sleep = lambda seconds: (VirtualTime.sleep(clock, seconds), really_sleep(seconds))  # type: ignore[method-assign]
        agree_often()
        yield


def agree_often() -> None:
    PlanAgreement.POLL, PlanAgreement.QUICK, PlanLeader.WINDOW = 0.1, 0.02, 0.3


@measured_exactly()
def _train(strategy_class: Any, workers: int = 0, **options: Any) -> tuple[list[list[int]], list[list[int]]]:
    module, strategy = Slow(), strategy_class(ranks_per_node=1, **options)
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_steps": -1, "max_epochs": 1})
    loader = DataLoader(Numbered(), batch_size=BATCH, shuffle=True, num_workers=workers)
    trainer.fit(module, loader)
    return module.taken, [[p.start, *p.split([BATCH * len(PER_SAMPLE)])[0]] for p in strategy.accounting.planner.plans]


@measured_exactly()
def _train_and_evaluate() -> Any:
    module = Evaluated()
    options = {**FAST, "max_steps": -1, "max_epochs": 1, "val_check_interval": 30, "limit_val_batches": 1.0}
    trainer = pl.Trainer(strategy=GossipAsyncStrategy(ranks_per_node=1), **options)
    numbers = Numbered()
    trainer.fit(module, DataLoader(numbers, batch_size=BATCH), DataLoader(range(200), batch_size=BATCH))
    return module.taken, module.seen


@measured_exactly()
def _train_until_one_is_killed(rank: int) -> Any:
    tell = PlanAgreement._publish

    def die(agreement: PlanAgreement, *messages: Any) -> None:
        if rank == 0:
            tell(agreement, *messages)  # the others answer, and wait for a decision
        os.kill(os.getpid(), signal.SIGKILL)

    if int(os.environ["RANK"]) == rank:
        setattr(PlanAgreement, "_publish" if rank == 0 else "_answer", die)
    module, strategy = Slow(), GossipAsyncStrategy(ranks_per_node=1, on_peer_loss="continue", grace=2.0)
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_steps": -1, "max_epochs": 1})
    trainer.fit(module, DataLoader(Numbered(), batch_size=BATCH, shuffle=True))
    return [len(batch) for batch in module.taken], [[p.start, p.costs] for p in strategy.accounting.planner.plans]


def check_each_sample_once(ranks: list[list[list[int]]]) -> None:
    assert {len(taken) for taken in ranks} == {STEPS}
    assert sorted(i for taken in ranks for batch in taken for i in batch) == list(range(len(Numbered())))
    for step in zip(*ranks, strict=True):
        assert sum(map(len, step)) == BATCH * len(PER_SAMPLE)


@pytest.mark.clock
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


@pytest.mark.long
def test_validation_in_mid_epoch_sees_every_sample_once() -> None:
    results = run(_train_and_evaluate, 4)
    check_each_sample_once([taken for taken, _ in results])
    looks = list(zip(*(seen for _, seen in results), strict=True))[1:]  # without the sanity check
    assert len(looks) == STEPS // 30
    for look in looks:
        assert sorted(i for part in look for i in part) == list(range(200))


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_dies_while_shares_are_agreed_on_holds_nobody_up(rank: int) -> None:
    outcomes = attempt(_train_until_one_is_killed, 4, rank, timeout=90)
    living = [outcome.value for number, outcome in enumerate(outcomes) if number != rank]
    assert all(value is not None for value in living), "\n".join(outcome.trace for outcome in outcomes)
    assert outcomes[rank].value is None
    assert all(len(sizes) == STEPS and plans == living[0][1] for sizes, plans in living)
    assert all(sum(step) == BATCH * 4 for step in zip(*((sizes[-20:]) for sizes, _ in living), strict=True))
