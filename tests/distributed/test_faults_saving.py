"""A rank is killed while it validates, while it saves, or before training starts; the disk is full."""

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from faults import DIED, Fault, FaultyNet, Record, fit, fit_with_faults, went_on
from lightning.pytorch.callbacks import ModelCheckpoint
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader

from lightning_hetero.callbacks.resumable import ResumableCheckpoint
from lightning_hetero.errors import CheckpointError, CommunicationError

FEW = ["ddp", "node", "easgd", "gossip"]


class Killed(pl.Callback):
    """A rank is killed in a hook, the second time that this is called if ``later``."""

    def __init__(self, rank: int, hook: str, later: bool = False) -> None:
        self.rank, self.calls, self.first = rank, 0, 1 if later else 0
        setattr(self, hook, self._called)

    def _called(self, trainer: pl.Trainer, module: FaultyNet, *_: Any) -> None:
        self.calls += 1
        if os.environ["RANK"] == str(self.rank) and self.calls > self.first:
            os.kill(os.getpid(), signal.SIGKILL)


def _validates(folder: str, name: str, faults: list[Fault], options: dict[str, Any]) -> Record:
    callbacks = [Killed(faults[0].rank, "on_validation_batch_end", later=True)]
    settings = {"limit_val_batches": 1.0, "num_sanity_val_steps": 0, "callbacks": callbacks}
    return fit(folder, name, faults, options, **settings)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("name", FEW)
def test_a_rank_that_is_killed_while_it_validates(tmp_path: Path, name: str) -> None:
    rank = len(name) % 3
    went_on(fit_with_faults(tmp_path, name, [Fault(rank, -1, "killed")], run=_validates), {rank: DIED})


def _begins(folder: str, name: str, faults: list[Fault], options: dict[str, Any], hook: str) -> Record:
    callbacks = [Killed(faults[0].rank, hook)]
    return fit(folder, name, faults, options, limit_val_batches=2, num_sanity_val_steps=2, callbacks=callbacks)


@pytest.mark.parametrize(
    ("name", "hook"), [("ddp", "on_validation_batch_end"), ("node", "on_fit_start"), ("gossip", "on_sanity_check_end")]
)
def test_a_rank_that_is_killed_before_training_starts_ends_all(tmp_path: Path, name: str, hook: str) -> None:
    outcomes = fit_with_faults(tmp_path, name, [Fault(2, -1, "killed")], run=_begins, settings={"hook": hook})
    for outcome in outcomes[:2]:
        assert isinstance(outcome.error, CommunicationError), outcome.trace
        assert f"rank 2 {DIED}" in str(outcome.error)


def _saves(folder: str, name: str, faults: list[Fault], options: dict[str, Any], full: bool) -> Record:
    """Fit with saves after steps 4 and 8; rank 0 writes half of the second one."""
    write = torch.save

    def half(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, dict) and value.get("global_step") == 8:
            file.write(b"half")
            if full:
                raise OSError(errno.ENOSPC, "No space left on device")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        write(value, file, *args, **kwargs)

    if os.environ["RANK"] == "0":
        torch.save = half
    saving = ModelCheckpoint(f"{folder}/saved", filename="{step}", save_top_k=-1, every_n_train_steps=4)
    return fit(folder, name, faults, options, callbacks=[saving], enable_checkpointing=True)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("name", ["ddp"])
def test_a_rank_that_is_killed_while_it_saves(tmp_path: Path, name: str) -> None:
    outcomes = fit_with_faults(tmp_path, name, [Fault(0, -1, "killed")], run=_saves, settings={"full": False})
    rest = went_on(outcomes, {0: DIED})
    files = sorted(path for path in (tmp_path / "saved").iterdir() if path.suffix == ".ckpt")
    saved = {path.name: torch.load(path, weights_only=True) for path in files}
    assert {file: value["global_step"] for file, value in saved.items()} == {
        f"step={n}.ckpt": n for n in (4, 8, 12, 16)
    }
    last = saved["step=16.ckpt"]["state_dict"]
    assert torch.equal(torch.cat([value.double().reshape(-1) for value in last.values()]), rest[0].weights)
    trainer = pl.Trainer(devices=1, **{**FAST, "max_epochs": 3})
    trainer.fit(Net(), DataLoader(dataset(96), batch_size=12), ckpt_path=str(tmp_path / "saved" / "step=8.ckpt"))
    assert trainer.global_step > 16


@pytest.mark.parametrize("name", ["ddp", "node"])
def test_a_full_disk_ends_all_and_leaves_the_checkpoint_before(tmp_path: Path, name: str) -> None:
    for outcome in fit_with_faults(tmp_path, name, [], run=_saves, settings={"full": True}):
        assert isinstance(outcome.error, CheckpointError), outcome.trace
        assert "No space left on device" in str(outcome.error)
    assert torch.load(tmp_path / "saved" / "step=4.ckpt", weights_only=True)["global_step"] == 4


class Waits(pl.Callback):
    """Rank 2 waits at step 5 until rank 0 has failed to write the checkpoint of step 4, and is lost after that."""

    def __init__(self, there: Path) -> None:
        self.there = there

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        until = time.monotonic() + 60
        while os.environ["RANK"] == "2" and trainer.global_step == 5 and not self.there.exists():
            assert time.monotonic() < until
            time.sleep(0.01)


def _saves_beside(folder: str, name: str, faults: list[Fault], options: dict[str, Any]) -> Record:
    """Fit with a save after every fourth step, in the background; rank 0 cannot write the first one."""
    write = torch.save

    def full(value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, dict) and value.get("global_step") == 4:
            there.touch()
            raise OSError(errno.ENOSPC, "No space left on device")
        write(value, *args, **kwargs)

    there = Path(folder) / "could not write"
    if os.environ["RANK"] == "0":
        torch.save = full
    saving = ResumableCheckpoint(f"{folder}/saved", every_n_steps=4)
    return fit(folder, name, faults, options, callbacks=[saving, Waits(there)], enable_checkpointing=True)


@pytest.mark.parametrize("name", ["ddp", "gossip_async"])
def test_what_could_not_be_written_before_a_loss_is_heard_after_it(tmp_path: Path, name: str) -> None:
    outcomes = fit_with_faults(tmp_path, name, [Fault(2, 6, "killed")], run=_saves_beside)
    for outcome in outcomes[:2]:
        assert isinstance(outcome.error, CheckpointError), outcome.trace
        assert "No space left on device" in str(outcome.error)
