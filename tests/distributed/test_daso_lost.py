"""`hetero_daso` with exchanges in the background, when a replica is lost while the others are steps apart."""

import os
import signal
import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import attempt
from tasks import FAST
from test_survival import Module, Numbered
from torch.utils.data import DataLoader

from lightning_hetero import DASOStrategy

LOST = 9  # steps that replica 2 takes


class UnequalProgress(pl.Callback):
    """Replica 0 gets as far as it can before replica 2 is killed; replica 1 stays at the step of replica 2."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []  # exchanges: at which step, by which member
        self.at = 0  # steps before the loss

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        averager: Any = trainer.strategy.averager  # type: ignore[attr-defined]
        replica, begin = trainer.global_rank, averager._begin  # type: ignore[attr-defined]
        self.pauses = [0.0, 1.2, 0.8][replica]

        def recorded(context: Any) -> None:
            self.begun.append((context.step, averager.turn % averager.links.members))
            begin(context)

        averager._begin = recorded

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.strategy.job.view.count < 3:  # type: ignore[attr-defined]
            return
        self.at = trainer.global_step
        if trainer.global_step == LOST:
            time.sleep(self.pauses)
            if self.pauses == 0.8:
                os.kill(os.getpid(), signal.SIGKILL)


def _fit(wait: int) -> Any:
    module, progress = Module(), UnequalProgress()
    options: dict[str, Any] = {"warmup": 0, "cooldown": 0, "global_every": 4, "wait": wait}
    strategy = DASOStrategy(on_peer_loss="continue", balance="off", timeout=30, **options)
    trainer = pl.Trainer(strategy=strategy, callbacks=[progress], **{**FAST, "max_epochs": 2})
    trainer.fit(module, DataLoader(Numbered(), batch_size=2, shuffle=True))
    weights = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    return weights, progress.begun, progress.at, trainer.global_step


@pytest.mark.parametrize("wait", [3, 2])
def test_replicas_that_remain_exchange_at_the_same_steps(wait: int) -> None:
    outcomes = attempt(_fit, 3, wait, nodes=[1, 1, 1])
    assert outcomes[2].exitcode == -signal.SIGKILL
    assert all(outcome.value for outcome in outcomes[:2]), "\n".join(outcome.trace for outcome in outcomes)
    (first, begun, ahead, steps), (second, others, behind, same) = (outcome.value for outcome in outcomes[:2])
    assert torch.equal(first, second)
    assert steps == same
    assert ahead > behind
    after = [one for one in begun if one[0] > ahead + 1]
    assert after
    assert after == [one for one in others if one[0] > ahead + 1]
