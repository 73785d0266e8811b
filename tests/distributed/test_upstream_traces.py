"""Threads and other traces that a fit leaves, and its calls, as with Lightning's `ddp`: its own tests check both."""

import pickle
import threading
from typing import Any
from unittest.mock import Mock

import torch
from ranks import run
from tasks import Net, dataset, train
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy


def fit(path: str, world: int) -> tuple[list[str], int]:
    """The names of the threads that a fit has left, and how often a rank has written a file."""
    before = set(threading.enumerate())
    torch.save = Mock(wraps=torch.save)
    options = {"devices": world, "enable_checkpointing": True, "max_epochs": 2, "default_root_dir": path}
    train(Net(), "hetero_ddp", DataLoader(dataset(16), batch_size=4), **options)
    return [thread.name for thread in set(threading.enumerate()) - before], torch.save.call_count


def test_a_rank_alone_has_nobody_whose_failure_it_could_hear_of(tmp_path: Any) -> None:
    assert run(fit, 1, str(tmp_path), 1) == [([], 2)]


def test_only_rank_0_saves_and_once_per_checkpoint(tmp_path: Any) -> None:
    assert [saves for _, saves in run(fit, 2, str(tmp_path), 2)] == [2, 0]


def after_a_fit() -> tuple[int, int]:
    """Number of wrapped optimizers that a strategy has after a fit, and number of those that a copy gets."""
    trainer = train(Net(), "hetero_ddp", DataLoader(dataset(16), batch_size=4), devices=1)
    return len(trainer.strategy._lightning_optimizers), len(trainer.strategy.__getstate__()["_lightning_optimizers"])


def test_copies_leave_out_what_lightnings_strategies_leave_out() -> None:
    """Lightning wraps optimizers in classes of its own making, which cannot be pickled."""
    assert run(after_a_fit, 1) == [(1, 0)]


def test_a_strategy_can_be_pickled_before_a_fit() -> None:
    strategy = HeteroDDPStrategy(max_batch_size="auto", max_batch_memory="1GiB", start_method="spawn")
    assert pickle.loads(pickle.dumps(strategy)).options == strategy.options
