"""Conserved sums of gossip: saving, resuming, validating and stopping lose nothing of them."""

import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from center_tasks import Line, StartAt, fit
from oracles import START
from ranks import run
from saved import replicas_of
from test_gossip import Pause

from lightning_hetero import GossipAsyncStrategy, GossipPushSumStrategy

APART, SHARES, STARTS = [1, 1, 1], [3.0, 1.0, 2.0], [8.0, 0.0, -4.0]  # of 12 samples 6, 2 and 4
GOAL = torch.tensor(START) + (6 * 8.0 - 4 * 4.0) / 12


# -- what a checkpoint holds in sum --------------------------------------------------------------------------


class Save(pl.Callback):
    """Saves after a step; until then ranks have different speeds."""

    def __init__(self, path: str, at: int) -> None:
        self.path, self.at = path, at

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        time.sleep((0.03, 0.002, 0.015)[trainer.global_rank])

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, out: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.at:
            trainer.save_checkpoint(self.path)


def _saved_and_resumed(path: str, kind: Any, options: dict[str, Any]) -> Any:
    warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`, callbacks")
    callbacks = [StartAt(STARTS), Save(path, 4)]
    first = fit(kind, Line(lr=0.0), epochs=1, trainer={"callbacks": callbacks}, **options)["final"]
    again = fit(kind, Line(lr=0.0), epochs=2, resume=path, trainer={"callbacks": [Pause()]}, **options)["final"]
    return first, again


class Gap(GossipAsyncStrategy):
    """Rank 2 is late to report its state for a save; no rank exchanges before the others have reported, too."""

    def make_averager(self) -> Any:
        averager = super().make_averager()
        state, consensus = averager.before_save, averager.consensus

        def hold(context: Any) -> Any:
            averager.client.transport.resume = lambda: None
            averager.before_save = state
            mean = consensus(context)
            averager.before_save = late
            del averager.client.transport.resume
            return mean

        def late() -> Any:
            if self.global_rank == 1:  # out of the way
                averager.client.transport.resume = lambda: None
            if self.global_rank == 2:
                time.sleep(0.3)
                averager.client.transport.resume()
                time.sleep(0.5)
            return state()

        averager.before_save, averager.consensus = late, hold
        return averager


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (GossipPushSumStrategy, {"topology": "exponential", "deadline": 0.01}),
        (GossipPushSumStrategy, {"wire": "bf16"}),
        (GossipAsyncStrategy, {"wire": "bf16"}),
        (Gap, {"every_n_steps": 4}),  # a rank that has reported its state must not exchange with one that has not
    ],
)
def test_sums_are_kept_through_a_checkpoint(tmp_path: Path, kind: Any, options: dict[str, Any]) -> None:
    if "deadline" in options:
        warnings.filterwarnings("ignore")
    path = str(tmp_path / "saved.ckpt")
    for first, again in run(_saved_and_resumed, 3, path, kind, options, nodes=APART):
        assert abs(first - GOAL).max() < 1e-9
        assert abs(again - GOAL).max() < 1e-9
    saved = replicas_of(path)
    total, weight = torch.zeros(8, dtype=torch.float64), 0.0
    for replica, samples in zip(saved, (6, 2, 4), strict=True):
        state = replica["algorithm"]
        if kind is GossipPushSumStrategy:
            total += state["x"][0] / 3
            weight += sum(state["weights"])
            for *_, part, vectors in state["mail"]:
                if part == 0:  # it only has the round that its sender has reached
                    continue
                total += (vectors[0].double() + (part * torch.tensor(START) if "wire" in options else 0.0)) / 3
                weight += part
        else:
            late = state["arrived_part"] * state["arrived"][0] if state["arrived"] else 0.0
            total += samples / 12 * (replica["values"][0] + late)
            weight += samples / 4
    assert weight == pytest.approx(3, abs=1e-12)
    assert abs(total - GOAL).max() < 1e-9
