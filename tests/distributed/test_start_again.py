"""The same command, started again, goes on from its newest whole checkpoint as if it had never stopped."""

import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from ranks import attempt, run
from saved import consensus
from tasks import FAST, Dropping, Net, dataset, parameters
from torch.utils.data import DataLoader

from lightning_hetero import (
    DiLoCoAsyncStrategy,
    DiLoCoStrategy,
    EASGDAsyncStrategy,
    GossipPushSumStrategy,
    HeteroDDPStrategy,
)
from lightning_hetero.callbacks.resumable import ResumableCheckpoint
from lightning_hetero.errors import UnsupportedError

DDP, DILOCO = (HeteroDDPStrategy, {}), (DiLoCoStrategy, {"tau": 5})


class Killed(pl.Callback):
    """Kills a rank some seconds after a number of batches."""

    def __init__(self, rank: int, batches: int, seconds: float) -> None:
        self.rank, self.batches, self.seconds = rank, batches, seconds

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        time.sleep(0.02)  # for the disk, so that several checkpoints are complete
        self.batches -= 1
        if trainer.global_rank == self.rank and self.batches == 0:
            threading.Timer(self.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def train(folder: str, kind: Any, *callbacks: pl.Callback, every: int = 2, **options: Any) -> dict[str, Any]:
    warnings.filterwarnings("ignore", "No checkpoint was saved")  # steps are faster than the disk
    warnings.filterwarnings("ignore", "Replicas have not met")  # replicas save more often than they meet
    limits = {"max_epochs": options.pop("max_epochs", 3), **options.pop("trainer", {})}
    keeps = ResumableCheckpoint(folder, every_n_steps=every, **options.pop("keeps", {}))
    strategy = kind[0](**{"balance": [2.0, 1.0], "global_batch_size": 12, **kind[1], **options.pop("strategy", {})})
    settings = {**FAST, **limits, "enable_checkpointing": True, "callbacks": [*callbacks, keeps]}
    trainer = pl.Trainer(strategy=strategy, **settings)
    module = options.pop("module", Dropping)()
    torch.manual_seed(trainer.global_rank)  # ranks drop out different units
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(dataset(96), batch_size=4, shuffle=True), **options)
    return {
        "weights": parameters(module),
        "seen": module.seen,
        "step": trainer.global_step,
        "messages": [str(w.message) for w in caught if "passed over" in str(w.message)],
        "files": sorted(os.listdir(folder)),
    }


@pytest.mark.long(after=1)
@pytest.mark.parametrize("kind", [DDP, DILOCO], ids=["ddp", "diloco"])
def test_killed_again_and_again_it_ends_as_if_never_stopped(tmp_path: Path, kind: Any) -> None:
    whole = run(train, 2, str(tmp_path / "whole"), kind, nodes=[1, 1])
    folder, kills, chance = str(tmp_path / "killed"), 0, random.Random(time.time_ns())
    for number in range(9):
        batches = chance.randint(3, 15) if number < 8 else 99  # of 24 steps; the last run is not stopped
        outcomes = attempt(train, 2, folder, kind, Killed(number % 2, batches, chance.uniform(0, 0.04)), nodes=[1, 1])
        assert not any(outcome.late for outcome in outcomes)
        if all(outcome.value for outcome in outcomes):
            break
        kills += any(outcome.exitcode == -signal.SIGKILL for outcome in outcomes)
        assert kills == number + 1, outcomes
    assert kills
    for outcome, truth in zip(outcomes, whole, strict=True):
        assert outcome.value["seen"] == truth["seen"][len(truth["seen"]) - len(outcome.value["seen"]) :]
        assert torch.equal(outcome.value["weights"], truth["weights"])
        assert len(truth["seen"]) == truth["step"] == outcome.value["step"] == 24


def _stopped(folder: str, kind: Any, change: Callable[[Path], None]) -> Any:
    first = train(folder, kind, max_epochs=2)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        change(Path(folder))
    torch.distributed.barrier()
    return first, train(folder, kind), train(folder, kind)


def _keep(folder: Path) -> None:
    """Change nothing."""


def _cut_off(folder: Path) -> None:
    newest = folder / "step=16-complete.ckpt"
    newest.write_bytes(newest.read_bytes()[:-1000])


def _lose_a_shard(folder: Path) -> None:
    next((folder / "step=16-complete.ckpt.shards").glob("replica-1-*")).unlink()


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [(DDP, _keep, None), (DDP, _cut_off, "it was cut off"), (DILOCO, _lose_a_shard, "replica(s) 1 is missing")],
    ids=["complete", "cut off", "without a shard"],
)
def test_it_goes_on_from_the_newest_that_is_whole(tmp_path: Path, kind: Any, change: Any, words: str | None) -> None:
    # With DiLoCo a complete fit makes all replicas equal; a fit resumed from before that is as one without a stop.
    whole = run(train, 2, str(tmp_path / "whole"), kind, nodes=[1, 1])
    results = run(_stopped, 2, str(tmp_path / "stopped"), kind, change, nodes=[1, 1])
    for rank, (truth, (first, second, third)) in enumerate(zip(whole, results, strict=True)):
        assert first["step"] == 16
        assert second["step"] == third["step"] == 24
        assert second["seen"] == truth["seen"][24 - len(second["seen"]) :]  # one may have been left out
        assert words is not None or len(second["seen"]) == 8
        assert torch.equal(second["weights"], truth["weights"])
        assert len(second["messages"]) == (rank == 0 and words is not None)
        assert words is None or all(words in text and "step=16-complete.ckpt" in text for text in second["messages"])
        assert third["seen"] == []  # it is complete
        assert torch.equal(third["weights"], truth["weights"])
        names = [name for name in third["files"] if not name.endswith(".shards")]
        assert "step=24-complete.ckpt" in names
        assert len(names) == 2


class Epochs(pl.Callback):
    """Counts the epochs that begin."""

    begun = 0

    def on_train_epoch_start(self, *_: Any) -> None:
        self.begun += 1


def _twice(folder: str, kind: Any) -> Any:
    sync, epochs = {"keep": 50, "background": False}, Epochs()
    ends = ModelCheckpoint(f"{folder}/ends", "{step}", every_n_train_steps=8, save_top_k=-1)
    whole = train(f"{folder}/whole", kind, ends, keeps=sync)
    results = []
    for end in (8, 16):  # ends of epochs
        train(f"{folder}/{end}", kind, epochs, keeps=sync, ckpt_path=f"{folder}/ends/step={end}.ckpt")
        again = f"{folder}/{end}/step={end + 4}.ckpt"
        results.append(train(f"{folder}/{end}-again", kind, keeps=sync, ckpt_path=again))
    return whole, epochs.begun, results


@pytest.mark.long(after=1)
@pytest.mark.parametrize("kind", [DDP, DILOCO], ids=["ddp", "diloco"])
def test_from_the_end_of_an_epoch_and_then_from_within_the_next(tmp_path: Path, kind: Any) -> None:
    for whole, begun, results in run(_twice, 2, str(tmp_path), kind, nodes=[1, 1]):
        assert begun == 2 + 1
        for again, steps in zip(results, (12, 20), strict=True):
            assert again["seen"] == whole["seen"][steps:]
            assert torch.equal(again["weights"], whole["weights"])


class Slower(Dropping):
    """Lowers its learning rate in each epoch."""

    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}


def _due_at_the_end(folder: str) -> Any:
    options: dict[str, Any] = {"every": 8, "module": Slower, "keeps": {"keep": 50, "background": False}}
    whole = train(f"{folder}/whole", DDP, **options)
    return whole, train(f"{folder}/again", DDP, **options, ckpt_path=f"{folder}/whole/step=9.ckpt")


def test_what_is_due_at_the_end_of_an_epoch_is_saved_after_the_next_batch(tmp_path: Path) -> None:
    """Otherwise the end of the epoch would be lost, with a step of the learning rate."""
    for whole, again in run(_due_at_the_end, 2, str(tmp_path), nodes=[1, 1]):
        names = [name for name in whole["files"] if not name.endswith(".shards")]
        assert names == ["step=17.ckpt", "step=24-complete.ckpt", "step=9.ckpt"]
        assert again["seen"] == whole["seen"][9:]
        assert torch.equal(again["weights"], whole["weights"])


def _one_step_an_epoch(folder: str) -> Any:
    keeps: dict[str, Any] = {"keep": 50, "background": False}
    return train(folder, DDP, every=1, keeps=keeps, trainer={"accumulate_grad_batches": 8})["files"]


def test_where_an_epoch_is_one_step_it_is_saved_at_its_end(tmp_path: Path) -> None:
    """There is no other moment."""
    for files in run(_one_step_an_epoch, 2, str(tmp_path), nodes=[1, 1]):
        names = [name for name in files if not name.endswith(".shards")]
        assert names == ["step=1.ckpt", "step=2.ckpt", "step=3-complete.ckpt", "step=3.ckpt"]


class Plateaued(Dropping):
    """Lowers its learning rate at each look."""

    def __init__(self, monitor: str, interval: str, frequency: int = 1) -> None:
        super().__init__()
        self.looks = {"monitor": monitor, "interval": interval, "frequency": frequency}

    def loss(self, batch: Any) -> torch.Tensor:
        # Lightning draws a number more where a look after a step has followed a validation.
        return Net.loss(self, batch) if self.looks["frequency"] > 1 else super().loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, **self.looks}}


class Terminated(pl.Callback):
    """The job is asked to stop after a batch, and stops some batches later."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        time.sleep(0.05)  # so that ranks agree on a batch that is near
        if trainer.global_step == self.batch and trainer.global_rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def _at_a_look(folder: str, validations: Any, steps: list[int], looks: tuple[Any, ...]) -> Any:
    options: dict[str, Any] = {"every": 4, "module": partial(Plateaued, *looks), "keeps": {"keep": 50}}
    options["val_dataloaders"] = DataLoader(dataset(16), batch_size=4)
    options["trainer"] = {"val_check_interval": validations, "num_sanity_val_steps": 0}
    options["keeps"]["background"] = False

    def run_from(name: str, *callbacks: pl.Callback, **more: Any) -> Any:
        return train(f"{folder}/{name}", DDP, *callbacks, **{**options, **more}, max_epochs=4)

    whole = run_from("whole")
    again = [run_from(f"{step}", ckpt_path=f"{folder}/whole/step={step}.ckpt") for step in steps]
    for batch in (1, 2, 3, 4):  # it stops before the end of an epoch, there, and after it
        with suppress(SIGTERMException):
            run_from(f"stopped {batch}", Terminated(batch), every=99)
        again.append(run_from(f"stopped {batch}"))
    return whole["weights"], [each["weights"] for each in again]


@pytest.mark.parametrize(
    ("validations", "steps", "looks"),
    [(4, [4, 12], ("val", "step", 4)), (1.0, [4], ("train_step", "step")), (4, [4, 12], ("val", "epoch"))],
)
def test_a_validation_and_a_look_of_a_scheduler_come_once(
    tmp_path: Path, validations: Any, steps: list[int], looks: tuple[Any, ...]
) -> None:
    """Also where they follow the step that was saved."""
    for whole, again in run(_at_a_look, 2, str(tmp_path), validations, steps, looks, nodes=[1, 1]):
        assert all(torch.equal(weights, whole) for weights in again)


def _named(folder: str) -> Any:
    first = train(folder, DDP, max_epochs=1)
    return (
        first,
        train(folder, DDP, ckpt_path=f"{folder}/step=8-complete.ckpt", max_epochs=2),
        train(folder, DDP, every=5),
    )


def test_a_path_of_the_users_counts(tmp_path: Path) -> None:
    for first, second, third in run(_named, 2, str(tmp_path), nodes=[1, 1]):
        assert [len(part["seen"]) for part in (first, second, third)] == [8, 8, 8]
        assert third["files"] == ["step=20.ckpt", "step=24-complete.ckpt"]


class SaveAtStart(pl.Callback):
    """Saves a checkpoint before the first step."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


def _complete(folder: str, kind: Any) -> Any:
    first = train(folder, kind, every=99, max_epochs=1)
    again = train(folder, kind, SaveAtStart(f"{folder}/start.ckpt"), every=99, max_epochs=2)
    return first["weights"], again["step"]


@pytest.mark.parametrize(
    "kind",
    [
        (DiLoCoAsyncStrategy, {"tau": 3}),
        (DiLoCoAsyncStrategy, {"tau": 3, "wire": "int4", "momentum_rule": "look_ahead"}),
        (DiLoCoAsyncStrategy, {"tau": 3, "quorum": 2}),
        (GossipPushSumStrategy, {"wire": "bf16"}),
        (EASGDAsyncStrategy, {"tau": 3, "exclude": ["*bias"]}),
    ],
    ids=lambda kind: " ".join(map(str, (kind[0].__name__, *kind[1].values()))),
)
def test_a_complete_run_saves_the_weights_that_it_leaves_and_goes_on_from_them(tmp_path: Path, kind: Any) -> None:
    for weights, steps in run(_complete, 2, str(tmp_path), kind, nodes=[1, 1]):
        assert torch.equal(consensus(tmp_path / "step=8-complete.ckpt"), weights)
        assert (consensus(tmp_path / "start.ckpt") - weights).abs().max() < 1e-12
        assert steps == 16


class Stops(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 5


def _stopped_early(folder: str) -> Any:
    return train(folder, DILOCO, Stops()), train(folder, DILOCO), train(folder, DILOCO, keeps={"background": False})


def test_a_run_that_has_stopped_early_stays_complete(tmp_path: Path) -> None:
    for parts in run(_stopped_early, 2, str(tmp_path), nodes=[1, 1]):
        assert [part["step"] for part in parts] == [5, 5, 5]
        assert [len(part["seen"]) for part in parts] == [5, 0, 0]
        assert all(torch.equal(part["weights"], parts[0]["weights"]) for part in parts)


class StopsAfterOne(pl.Callback):
    """Stops the run after its first epoch, as EarlyStopping may."""

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop |= trainer.current_epoch == 0


def _longer(folder: str) -> Any:
    sync = {"keep": 50, "background": False}
    parts = [train(folder, DDP, StopsAfterOne(), keeps=sync), train(folder, DDP, max_epochs=4, keeps=sync)]
    named = train(f"{folder}-named", DDP, max_epochs=4, ckpt_path=f"{folder}/step=8-complete.ckpt")
    return train(f"{folder}-whole", DDP, max_epochs=4)["weights"], [*parts, named]


def test_a_run_that_has_stopped_early_goes_on_with_more_epochs(tmp_path: Path) -> None:
    for whole, parts in run(_longer, 2, str(tmp_path / "run"), nodes=[1, 1]):
        assert [part["step"] for part in parts] == [8, 32, 32]
        assert all(torch.equal(part["weights"], whole) for part in parts[1:])


class Best(Dropping):
    """Keeps its lowest loss; at first that is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("best", torch.tensor(float("inf"), dtype=torch.float64))

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        self.best.copy_(torch.minimum(self.best, loss.detach()))
        return loss


def _with_best(folder: str) -> Any:
    options: dict[str, Any] = {"every": 6, "module": Best, "keeps": {"keep": 50, "background": False}}
    whole = train(f"{folder}/whole", DILOCO, **options)
    return whole, train(f"{folder}/again", DILOCO, **options, ckpt_path=f"{folder}/whole/step=12.ckpt")


def test_a_buffer_that_was_infinite_at_first(tmp_path: Path) -> None:
    """It is not exchanged, also where it is finite when the run goes on."""
    for whole, again in run(_with_best, 2, str(tmp_path), nodes=[1, 1]):
        assert again["seen"] == whole["seen"][12:]
        assert torch.equal(again["weights"], whole["weights"])


def test_another_strategy_is_refused(tmp_path: Path) -> None:
    settings = {**FAST, "enable_checkpointing": True, "callbacks": [ResumableCheckpoint(tmp_path)]}
    with pytest.raises(UnsupportedError, match="needs a strategy of this package, and this is SingleDeviceStrategy"):
        pl.Trainer(max_epochs=1, **settings).fit(Net(), DataLoader(dataset(96), batch_size=4))
