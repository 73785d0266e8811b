"""Ranks that Lightning has started on this machine: none is left, and each kind of end has its message."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_hetero import HeteroDDPStrategy

how, here = sys.argv[1], Path(sys.argv[2])
here.joinpath(f"rank-{os.environ.get('LOCAL_RANK', 0)}").write_text(str(os.getpid()))


class Net(BoringModel):
    def training_step(self, batch, i):
        if how == "killed" and self.global_rank == 1:
            here.joinpath("sleeps").touch()
            time.sleep(300)
        if how == "killed":
            while not here.joinpath("sleeps").exists():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "ctrl-c" and i == 2 and self.global_rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(batch, i)


trainer = Trainer(strategy=HeteroDDPStrategy(timeout=600), accelerator="cpu", devices=2, max_epochs=2, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, limit_val_batches=0)
trainer.strategy.launcher.grace = 1.0
trainer.fit(Net())
"""


def _run(folder: Path, how: str, port: int | None = None) -> tuple[int, str]:
    """Exit status of rank 0, and output of all ranks. Fails if a process is left."""
    script, printed = folder / "train.py", folder / "printed"
    script.write_text(SCRIPT)
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    with open(printed, "w") as out:
        job = subprocess.Popen(
            [sys.executable, script, how, folder],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env if port is None else {**env, "MASTER_PORT": str(port)},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )
        status = job.wait(300)
    until, wrote = time.monotonic() + 90, folder / "rank-1"
    while not (wrote.exists() and wrote.read_text()) and time.monotonic() < until:  # it may still be importing
        time.sleep(0.1)
    child = int(wrote.read_text())
    while _alive(child) and time.monotonic() < until:
        time.sleep(0.1)
    if _alive(child):
        psutil.Process(child).kill()
        pytest.fail(f"rank 1 stays behind; printed: {printed.read_text()}")
    return status, printed.read_text()


def _alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.long
def test_no_rank_waits_to_join_a_job_whose_first_rank_has_ended(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        status, printed = _run(tmp_path, "trains", stranger.getsockname()[1])
    assert status == 1
    assert "holds port" in printed
    assert "rank 1 of 2 could not join the job: local rank 0, which has started this process, has ended" in printed


@pytest.mark.long
def test_no_rank_outlives_a_first_rank_that_is_killed(tmp_path: Path) -> None:
    status, printed = _run(tmp_path, "killed")
    assert status == -9
    assert "is ended, since local rank 0, which has started it, ended 1 s ago" in printed


@pytest.mark.long
def test_ctrl_c_is_called_by_its_name(tmp_path: Path) -> None:
    status, printed = _run(tmp_path, "ctrl-c")
    assert status == 130
    assert "Traceback" not in printed
    assert "lightning_hetero: Ctrl-C. Rank 0 ends, and ends the other ranks." in printed
    assert "killed by signal" not in printed
