"""Collectives that only one rank calls: ranks report where each of them waits, and signals end the wait."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only
from ranks import Outcome, attempt
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader

from lightning_hetero import DiLoCoStrategy, HeteroDDPStrategy
from lightning_hetero.errors import CommunicationError, DisagreementError


class OnOneRank(Net):
    """Rank 0 alone calls a collective at the end of an epoch, or logs, and rank 1 goes on."""

    def __init__(self, do: str, before: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.do, self.before = do, before

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.do == "log" and batch_idx == 3 and self.trainer.is_global_zero:
            self.log("of rank 0", 1.0, sync_dist=True)
        return self.loss(batch)

    @rank_zero_only
    def report(self) -> None:
        self.before()
        if self.do == "all_gather":
            self.all_gather(torch.ones(1))
        elif self.do == "all_reduce":
            dist.all_reduce(torch.ones(3))

    def on_train_epoch_end(self) -> None:
        self.report()


def _train(strategy: type, do: str, timeout: float, before: Any = None, **options: Any) -> None:
    trainer = pl.Trainer(strategy=strategy(balance="off", timeout=timeout, **options), **{**FAST, "max_epochs": 2})
    trainer.fit(OnOneRank(do, *filter(None, [before])), DataLoader(dataset(64), batch_size=8))


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("do", "where"),
    [
        ("all_gather", r"rank 0 waits in all_gather \(test_waits.py:\d+\) to gather a tensor"),
        ("all_reduce", r"rank 0 waits in all_reduce \(test_waits.py:\d+\)"),
        ("log", r"rank 0 waits in fit \(test_waits.py:\d+\) to reduce what training_step logs as 'of rank 0'"),
    ],
)
def test_all_ranks_say_where_each_of_them_waits(do: str, where: str) -> None:
    other = r"rank 1 waits in fit \(test_waits.py:\d+\) to average gradients \(epoch \d, batch \d\)"
    for outcome in attempt(_train, 2, HeteroDDPStrategy, do, 6.0, timeout=60):
        assert isinstance(outcome.error, RuntimeError), outcome.trace
        text = str(outcome.error)
        assert re.search(where, text), text
        assert re.search(other, text), text
        assert "was it called on one rank only?" in text


class LogsMore(Net):
    """Rank 0 logs a value that the others do not, before one that all log."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2 and self.trainer.is_global_zero:
            self.log("more", 1000.0, sync_dist=True)
        self.log("all", 7.0, sync_dist=True)
        return self.loss(batch)


def _fit(module: pl.LightningModule, *callbacks: pl.Callback, **settings: Any) -> None:
    strategy = HeteroDDPStrategy(balance="off", timeout=60)
    trainer = pl.Trainer(strategy=strategy, callbacks=list(callbacks), **{**FAST, "max_epochs": 1, **settings})
    trainer.fit(module, DataLoader(dataset(64), batch_size=8))


def test_a_value_that_one_rank_logs_is_not_averaged_with_another() -> None:
    for outcome in attempt(_fit, 2, LogsMore(), timeout=50):
        assert isinstance(outcome.error, DisagreementError), outcome.trace
        text = str(outcome.error)
        for rank, names in enumerate(("'all', 'more'", "'all'")):
            where = rf"rank {rank} is in fit \(test_waits.py:\d+\) to gather what training_step logs as {names}[,.]"
            assert re.search(where, text), text


def test_ranks_that_meet_in_different_collectives_say_in_which() -> None:
    for outcome in attempt(_train, 2, DiLoCoStrategy, "all_gather", 60.0, tau=2, timeout=50):
        assert isinstance(outcome.error, DisagreementError | CommunicationError), outcome.trace
        text = str(outcome.error)
        assert re.search(r"rank 0 is in all_gather \(test_waits.py:\d+\) to gather a tensor", text), text
        assert re.search(r"rank 1 is in fit \(test_waits.py:\d+\) to gather the parameters that", text), text


class _Broadcasts(pl.Callback):
    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        if trainer.is_global_zero:
            trainer.strategy.broadcast("of rank 0 alone")


def test_a_broadcast_on_the_source_alone_does_not_stand_in_for_another(tmp_path: Path) -> None:
    first, second = attempt(
        _fit, 2, Net(), _Broadcasts(), timeout=90, enable_checkpointing=True, default_root_dir=tmp_path
    )
    assert isinstance(second.error, DisagreementError), second.trace
    assert "rank 0 is in broadcast (test_waits.py:" in str(second.error)
    assert "rank 1 is in fit (test_waits.py:" in str(second.error)
    assert isinstance(first.error, CommunicationError), first.trace
    assert "rank 1 failed with DisagreementError" in str(first.error)


class _SignalSoon:
    """Sends this process a signal in a moment."""

    def __init__(self, signum: int) -> None:
        self.signum = signum

    def __call__(self) -> None:
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in all that a shell runs in its background
            signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(1.0, os.kill, (os.getpid(), self.signum)).start()


def _ended(signum: int, do: str, **options: Any) -> tuple[list[Outcome], float]:
    """Outcomes of ranks, and the seconds until then, where rank 0 gets a signal while both wait."""
    began = time.monotonic()
    return attempt(_train, 2, HeteroDDPStrategy, do, 600.0, _SignalSoon(signum), timeout=90, **options), (
        time.monotonic() - began
    )


@pytest.mark.parametrize("do", ["all_gather", pytest.param("all_reduce", marks=pytest.mark.long)])
def test_ctrl_c_ends_a_wait(do: str) -> None:
    (first, second), _ = _ended(signal.SIGINT, do)
    assert isinstance(first.error, SystemExit | KeyboardInterrupt), first.trace
    assert "KeyboardInterrupt" in first.trace
    assert isinstance(second.error, CommunicationError), second.trace
    assert "rank 0 was interrupted (Ctrl-C)" in str(second.error)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"on_peer_loss": "continue"}])
def test_sigterm_ends_a_wait_in_which_all_ranks_are(options: dict[str, Any]) -> None:
    (first, second), _ = _ended(signal.SIGTERM, "all_gather", **options)
    for outcome in (first, second):
        assert isinstance(outcome.error, RuntimeError), outcome.trace
    text = str(first.error)
    assert "SIGTERM came" in text
    assert re.search(r"rank 0 waits in all_gather \(test_waits.py:\d+\) to gather a tensor", text), text
    assert re.search(r"rank 1 waits in fit \(test_waits.py:\d+\) to average gradients", text), text
    assert "SIGTERM came" in str(second.error) or "rank 0" in str(second.error)


class _Unequal(Net):
    def on_train_epoch_end(self) -> None:
        dist.all_reduce(torch.ones(3 + 1000 * self.global_rank))


def test_a_collective_with_unequal_sizes_is_named_as_a_cause_where_gloo_aborts_a_rank() -> None:
    outcomes = attempt(_fit, 2, _Unequal(), timeout=90)
    assert [outcome.exitcode for outcome in outcomes].count(-signal.SIGABRT) == 1, [o.trace for o in outcomes]
    [text] = [str(outcome.error) for outcome in outcomes if outcome.error is not None]
    assert "has ended without an error message" in text
    assert "gloo has aborted it at a collective of your own with unequal sizes or types" in text
