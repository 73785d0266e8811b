"""The same command as a user starts it: torchrun with restarts, a full disk, a job that is asked to stop, YAML."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import free_port, run
from test_start_again import DDP, DILOCO, Killed, train

from lightning_hetero.callbacks.resumable import ResumableCheckpoint
from lightning_hetero.errors import CheckpointError

SCRIPT = """
import os, sys

sys.path.insert(0, {tests!r})
import torch
from test_start_again import DDP, Killed, train

restarts, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
killed = [Killed(1 - restarts, 5, 0.01)] if restarts < 2 else []
result = train({folder!r}, DDP, *killed)
torch.save((restarts, result), {folder!r} + f"-{{rank}}.pt")
"""


@pytest.mark.long
def test_torchrun_with_restarts_finishes_by_itself(tmp_path: Path) -> None:
    whole = run(train, 2, str(tmp_path / "whole"), DDP, nodes=[1, 1])
    folder, script = str(tmp_path / "killed"), tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), folder=folder))
    options = ["--nproc-per-node=2", "--max-restarts=3", f"--master-port={free_port()}", "--monitor-interval=0.2"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script)]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PL_GLOBAL_SEED")
    env = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        command, env={**env, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank, truth in enumerate(whole):
        restarts, result = torch.load(f"{folder}-{rank}.pt", weights_only=False)
        assert restarts == 2
        assert 0 < len(result["seen"]) < 24
        assert result["seen"] == truth["seen"][24 - len(result["seen"]) :]
        assert torch.equal(result["weights"], truth["weights"])


class Fills(pl.Callback):
    """From a step on files on a rank must be smaller than a checkpoint. No checkpoint is left out before that."""

    def __init__(self, rank: int, folder: str) -> None:
        self.rank, self.before = rank, Path(folder, "step=10.ckpt")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, ResumableCheckpoint):
                callback.complete()  # a checkpoint that is due while another one is being written would be left out
        if trainer.global_step == 11 and trainer.global_rank == self.rank:
            until = time.monotonic() + 60
            while not self.before.exists() and time.monotonic() < until:
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


def _full(folder: str, kind: Any, rank: int) -> Any:
    with pytest.raises(CheckpointError) as raised:
        train(folder, kind, Fills(rank, folder), every=5)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return str(raised.value), sorted(name for name in os.listdir(folder) if name.endswith(".ckpt"))


@pytest.mark.long(after=1)
@pytest.mark.parametrize(("kind", "rank"), [(DDP, 0), (DILOCO, 1)], ids=["ddp", "diloco"])
def test_a_full_disk_does_not_lose_the_checkpoint_before(tmp_path: Path, kind: Any, rank: int) -> None:
    whole = run(train, 2, str(tmp_path / "whole"), kind, nodes=[1, 1])
    for message, names in run(_full, 2, str(tmp_path / "full"), kind, rank, nodes=[1, 1]):
        assert "could not be saved: [Errno 27] File too large" in message
        assert names == ["step=10.ckpt", "step=5.ckpt"]
    for result, truth in zip(run(train, 2, str(tmp_path / "full"), kind, nodes=[1, 1]), whole, strict=True):
        assert result["seen"] == truth["seen"][10:]
        assert torch.equal(result["weights"], truth["weights"])


class Asked(pl.Callback):
    """Sends SIGTERM to rank 0, and waits until the request is known."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 5 and trainer.global_rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            until = time.monotonic() + 20
            while not trainer.strategy.stop_request.agreed.asked and time.monotonic() < until:
                time.sleep(0.01)


def _asked(folder: str) -> Any:
    with pytest.raises(SystemExit) as raised:
        train(folder, DILOCO, Asked(), every=2)
    first = raised.value.code, sorted(name for name in os.listdir(folder) if "stopped" in name)
    return *first, train(folder, DILOCO)


def test_a_job_that_was_asked_to_stop_goes_on(tmp_path: Path) -> None:
    whole = run(train, 2, str(tmp_path / "whole"), DILOCO, nodes=[1, 1])
    for truth, (code, names, again) in zip(whole, run(_asked, 2, str(tmp_path / "s"), nodes=[1, 1]), strict=True):
        assert code == 128 + signal.SIGTERM
        step = int(names[0].removeprefix("step=").removesuffix("-stopped.ckpt"))
        assert names[0] == f"step={step}-stopped.ckpt"
        assert 5 <= step <= 7
        assert again["seen"] == truth["seen"][step:]
        assert torch.equal(again["weights"], truth["weights"])


def _timed(folder: str) -> Any:
    slow = Killed(-1, -1, 0)  # takes its time
    return train(folder, DILOCO, slow, every=99, keeps={"every_n_seconds": 0.3, "keep": 9}, max_epochs=12)


def test_by_time_all_save_at_the_same_steps(tmp_path: Path) -> None:
    for result in run(_timed, 2, str(tmp_path), nodes=[1, 1]):
        steps = [name for name in result["files"] if name.endswith(".ckpt") and "-" not in name]
        assert steps
        assert f"step={result['step']}-complete.ckpt" in result["files"]
