"""A job is killed in the middle of a cycle, with an exchange in flight; another resumes it."""

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import attempt, run
from tasks import FAST, Dropping, dataset, parameters
from test_node import NODES, SHARES
from torch.utils.data import DataLoader

from lightning_hetero import DASOStrategy


class Killed(pl.Callback):
    """Kills rank 1 at a step, as a scheduler or the kernel would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == self.step:
            assert trainer.strategy.averager._pending is not None  # in flight
            os.kill(os.getpid(), signal.SIGKILL)


def _train(folder: str, kill: bool = False, resume: str | None = None) -> torch.Tensor:
    # B = 4 and W = 3 after 3 steps of warm-up: exchanges begin after steps 7, 11, 15, ... and arrive 3 steps later.
    strategy = DASOStrategy(3, 2, 4, 3, balance=SHARES, global_batch_size=12, patience=99)
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
    callbacks = [ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1, filename="{step}")]
    callbacks += [Killed(13)] if kill else []
    options = {**FAST, "max_epochs": 2, "enable_checkpointing": True, "callbacks": callbacks}
    module = Dropping()
    trainer = pl.Trainer(strategy=strategy, **options)
    loader = DataLoader(dataset(96), batch_size=4, shuffle=True, num_workers=1)
    torch.manual_seed(trainer.global_rank)  # each rank drops out other units
    trainer.fit(module, loader, ckpt_path=resume)
    return parameters(module)


def test_a_job_killed_with_an_exchange_in_flight_resumes_bitwise(tmp_path: Path) -> None:
    whole = run(_train, 3, str(tmp_path / "whole"), nodes=NODES)
    outcomes = attempt(_train, 3, str(tmp_path / "killed"), kill=True, nodes=NODES)
    assert not any(outcome.late for outcome in outcomes)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert "rank 1 has ended without a word" in str(outcomes[rank].error), outcomes[rank].trace
    latest = tmp_path / "killed" / "step=12.ckpt"
    assert latest == max((tmp_path / "killed").iterdir(), key=lambda path: path.stat().st_mtime)
    resumed = run(_train, 3, str(tmp_path / "killed"), resume=str(latest), nodes=NODES)
    for weights, truth in zip(resumed, whole, strict=True):
        assert torch.equal(weights, truth)
