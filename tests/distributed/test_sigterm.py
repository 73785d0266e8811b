"""SIGTERM: all ranks stop after the same step and save a checkpoint, from which a run goes on as without the stop."""

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException
from ranks import attempt, run
from tasks import FAST, EvaluatedNet, Net, dataset, parameters
from torch.utils.data import DataLoader

from lightning_hetero import (
    HeteroDDPStrategy,
    NodeAverageStrategy,
)
from lightning_hetero.errors import CommunicationError

TERMINATED = 128 + signal.SIGTERM
BASE: dict[str, Any] = {"balance": [2.0, 1.0], "global_batch_size": 12}
EPOCHS, STEPS = {"max_epochs": 3}, {"max_steps": 22, "max_epochs": -1}  # of 8 batches an epoch
UNSEEN = {**EPOCHS, "limit_val_batches": 0}  # the end of an epoch is its last batch


class Terminated(pl.Callback):
    """Sends SIGTERM to ranks after a step; each of them then waits until the request is known."""

    def __init__(self, step: int, ranks: tuple[int, ...] = (1,), signum: int = signal.SIGTERM) -> None:
        self.step, self.ranks, self.signum = step, ranks, signum

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank in self.ranks and trainer.global_step == self.step:
            os.kill(os.getpid(), self.signum)
            until = time.monotonic() + 20
            while not trainer.strategy.stop_request.agreed.asked and time.monotonic() < until:
                time.sleep(0.01)


class Watched(EvaluatedNet):
    """Counts its epochs, and has a learning rate that changes with the steps and the epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs = 0

    def on_train_epoch_end(self) -> None:
        self.epochs += 1

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.net[0].bias.mul_(0.99)  # the module's own work after a step

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": steps, "interval": "step"}}


def _fit(
    strategy: Any, folder: str, limits: dict[str, Any], stop: int | None = None, resume: str | None = None, **more: Any
) -> dict[str, Any]:
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
    warnings.filterwarnings("ignore", "Replicas have not met")  # steps 21 to 24 of hetero_diloco
    callbacks = [ModelCheckpoint(folder, save_top_k=0, save_last=True), *([] if stop is None else [Terminated(stop)])]
    settings = {**FAST, "enable_checkpointing": True, "num_sanity_val_steps": 0, "val_check_interval": 4, **limits}
    module, trainer = Watched(), pl.Trainer(strategy=strategy, callbacks=callbacks, **settings, **more)
    loaders = DataLoader(dataset(96), batch_size=4, shuffle=True), DataLoader(dataset(24), batch_size=4)
    code = None
    try:
        trainer.fit(module, *loaders, ckpt_path=resume)
    except SIGTERMException as stopped:
        code = stopped.code
    return {
        "code": code,
        "steps": trainer.global_step,
        "epochs": module.epochs,
        "seen": module.seen,
        "evaluated": module.evaluated,
        "weights": parameters(module),
        "files": sorted(name for name in os.listdir(folder) if not name.endswith(".shards")),
    }


def _stopped(folder: str, kind: Any, options: dict[str, Any], cases: list[Any]) -> list[Any]:
    results = []
    for i, (stop, limits) in enumerate(cases):
        whole = _fit(kind(**BASE, **options), f"{folder}/whole", limits)
        first = _fit(kind(**BASE, **options), f"{folder}/{i}", limits, stop)
        results.append((whole, first, _fit(kind(**BASE, **options), f"{folder}/{i}", limits, resume="last")))
    return results


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("kind", "options", "cases"),
    [
        (
            HeteroDDPStrategy,
            {},
            [(3, EPOCHS), (4, EPOCHS), (8, EPOCHS), (24, EPOCHS), (9, STEPS), (12, STEPS), (8, UNSEEN)],
        ),
        (HeteroDDPStrategy, {"checkpoint_io": AsyncCheckpointIO()}, [(8, STEPS)]),
    ],
)
def test_a_stopped_run_goes_on_bitwise(tmp_path: Path, kind: Any, options: dict[str, Any], cases: list[Any]) -> None:
    results = run(_stopped, 2, str(tmp_path), kind, options, cases, nodes=[1, 1], timeout=120)
    for rank, parts in enumerate(results):
        for (stop, limits), (whole, first, second) in zip(cases, parts, strict=True):
            case = f"rank {rank}, step {stop}, {limits}"
            assert whole["code"] is second["code"] is None, case
            assert first["code"] == TERMINATED, case
            assert first["files"] == ["last-sigterm.ckpt"] or "last.ckpt" in first["files"], case
            assert stop <= first["steps"] <= stop + 2, case
            assert limits is not UNSEEN or first["steps"] == 9, case  # not 8, the last of its epoch
            assert first["steps"] == results[0][cases.index((stop, limits))][1]["steps"], case
            assert first["seen"] + second["seen"] == whole["seen"], case
            assert first["evaluated"] + second["evaluated"] == whole["evaluated"], case
            assert first["epochs"] + second["epochs"] == whole["epochs"], case
            assert second["steps"] == whole["steps"], case
            assert torch.equal(second["weights"], whole["weights"]), case


class NoRequest(pl.Callback):
    """Rank 0 does not get the request."""

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.strategy.stop_request.agreed._limit = 3.0  # only here: joining may take longer
        if trainer.is_global_zero:
            trainer.strategy.stop_request.agreed._closed.set()


def _unanswered(kind: Any) -> None:
    settings = {**FAST, "max_epochs": 50, "callbacks": [NoRequest(), Terminated(3)]}
    trainer = pl.Trainer(strategy=kind(**BASE), **settings)
    trainer.fit(Net(), DataLoader(dataset(96), batch_size=4))


@pytest.mark.long(after=1)
@pytest.mark.parametrize("kind", [HeteroDDPStrategy, NodeAverageStrategy])
def test_a_rank_that_does_not_answer_is_not_waited_for_without_end(kind: Any) -> None:
    outcomes = attempt(_unanswered, 2, kind, nodes=[1, 1], timeout=60)
    assert all(isinstance(outcome.error, CommunicationError) for outcome in outcomes), outcomes[1].trace
    message = str(outcomes[1].error)
    assert "could not agree with the others on a step to save and stop at, as SIGTERM asks: no answer from" in message
    assert "rank(s) 0 within 3 s" in message


class Dies(pl.Callback):
    """Rank 1 is killed while rank 0 waits for its answer."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 3:
            trainer.strategy.stop_request.agreed._closed.set()
            time.sleep(3.0)
            os.kill(os.getpid(), signal.SIGKILL)


def _killed_meanwhile() -> None:
    settings = {**FAST, "max_epochs": 50, "callbacks": [Terminated(3, ranks=(0,)), Dies()]}
    trainer = pl.Trainer(strategy=NodeAverageStrategy(every_n_steps=1000, **BASE), **settings)
    trainer.fit(Net(), DataLoader(dataset(96), batch_size=4))


def test_a_rank_that_dies_is_not_waited_for() -> None:
    outcomes = attempt(_killed_meanwhile, 2, nodes=[1, 1], timeout=60)  # `timeout` is half an hour
    assert isinstance(outcomes[0].error, CommunicationError), outcomes[0].trace
    assert "rank 1 has ended without an error message" in str(outcomes[0].error)
    assert "SIGTERM" in str(outcomes[0].error)
