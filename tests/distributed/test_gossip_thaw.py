"""Push-sum beside a rank that is frozen and thaws: it keeps its weight, and no step of it is blown up."""

import os
import signal
import time
from typing import Any

import lightning.pytorch as pl
import torch
from center_tasks import Line, StartAt, fit
from oracles import START, loader
from ranks import run

from lightning_hetero import GossipPushSumStrategy

DEADLINE, FROZEN = 0.4, 2.5  # seconds
STARTS = [8.0, 0.0]


class Freezes(pl.Callback):
    """The last rank is stopped for a while in mid-epoch, from outside, so that its threads are, too."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(0.03)
        if trainer.global_rank == trainer.world_size - 1 and batch_idx == 10:
            if os.fork() == 0:
                os.kill(os.getppid(), signal.SIGSTOP)
                time.sleep(FROZEN)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.wait()


class Watch(pl.Callback):
    """Notes the weight after each step; and, when all have met, the weight here and that of what has come."""

    def __init__(self) -> None:
        self.weights: list[float] = []
        self.held = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.weights.append(trainer.strategy.averager.status(0)["weight"])

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        averager = trainer.strategy.averager
        self.held = self.weights[-1] + sum(push.weight for push in averager._transport.waiting())


def _thawing(rates: list[float], starts: list[float]) -> Any:
    results = []
    for rate in rates:
        watch = Watch()
        callbacks = [StartAt(starts), Freezes(), watch]
        options: dict[str, Any] = {"balance": "off", "deadline": DEADLINE}
        found = fit(GossipPushSumStrategy, Line(lr=rate), loader(960), 1, {"callbacks": callbacks}, **options)
        results.append({**found, "weights": watch.weights, "held": watch.held})
    return results


def test_a_rank_that_thaws_has_kept_its_weight() -> None:
    # At this rate a step of 8 times the size leads away from the goal, and one of 128 times far away.
    results = run(_thawing, 2, [0.03, 0.0], STARTS, nodes=[1, 1])
    for moving, still in results:
        for found in (moving, still):
            assert len(found["weights"]) == 80
            assert min(found["weights"]) > 1 / 8  # not halved in every round in which the other did not come
        assert moving["path"].abs().max() < 9.5  # it begins at 9, and comes nearer to the goal
        assert moving["path"][-1].abs().max() < 4
        # Without steps what all began with must be there at the end.
        assert abs(still["final"] - (torch.tensor(START) + sum(STARTS) / 2)).max() < 1e-9
    for case in range(2):
        assert abs(sum(found[case]["held"] for found in results) - 2.0) < 1e-12
