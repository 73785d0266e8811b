"""The example for SLURM: its own lines, with stand-ins for SLURM's two commands; nodes of two ranks and of one."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from leftovers import completed, watched

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm" / "train.sbatch"
SRUN = """#!/usr/bin/env bash
# As srun does: the command once per node, with the variables of that node; signals are passed on.
[[ "$1" == --kill-on-bad-exit=1 ]] && shift
SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_GPUS_ON_NODE="${FIRST:-2}" "$@" &
first=$!
SLURM_NODEID=1 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_GPUS_ON_NODE=1 "$@" &
second=$!
trap 'kill -TERM "$first" "$second"' TERM
status=0
for task in "$first" "$second"; do
    wait "$task" || status=$?
    while kill -0 "$task" 2> /dev/null; do wait "$task" || status=$?; done
done
exit "$status"
"""
SCONTROL = """#!/usr/bin/env bash
[[ "$*" == "show hostnames localhost,elsewhere" ]] && printf 'localhost\\nelsewhere\\n'
[[ "$1" == requeue ]] && echo "$*" >> "$REQUEUED"
exit 0
"""
#: Script of ranks that train slowly, and save regularly.
TRAIN = """
import sys, time
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_hetero
from lightning_hetero.callbacks import ResumableCheckpoint

class Slow(Callback):
    def on_train_batch_start(self, *_):
        time.sleep(0.2 if {slow} else 0)

trainer = Trainer(
    strategy="hetero_ddp", accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False,
    enable_model_summary=False, limit_val_batches=0, callbacks=[Slow(), ResumableCheckpoint("runs", every_n_steps=5)],
)
trainer.fit(BoringModel())
print(f"rank {{trainer.global_rank}} is at step {{trainer.global_step}}", flush=True)
"""


def _allocation(tmp_path: Path) -> dict[str, str]:
    """Variables that SLURM gives to a batch script on two nodes, with stand-ins for its commands."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "localhost,elsewhere",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NAME": "hetero",
        "SLURM_JOB_ID": str(_job_with_a_free_port()),
    }


@pytest.mark.long
def test_the_example_starts_a_torchrun_per_node(tmp_path: Path) -> None:
    variables = {**_allocation(tmp_path), "SLURM_NTASKS_PER_NODE": "1"}
    command = [SCRIPT, "-m", "lightning_hetero", "doctor", "--accelerator", "cpu", "--timeout", "60"]
    done = completed(command, {**os.environ, **variables})
    assert done.stdout.count("3 ranks on 2 nodes") == 1
    rows = re.findall(r"│ (\d)\s+│ (\d)\s+│", done.stdout)
    assert rows[:3] == [("0", "0"), ("1", "0"), ("2", "1")]
    assert re.search(r"within a node\s+│ 0 - 1", done.stdout)
    assert re.search(r"between nodes\s+│ 0 - 2", done.stdout)
    assert re.search(r"hetero_daso\s+│ available", done.stdout)
    output = " ".join(done.stdout.split())
    assert "in a ring over the slowest link between nodes: 4 x (7.45 MB / 3 / " in output


def _batch(tmp_path: Path, script: str, restarts: int, **more: str) -> subprocess.Popen:
    """Start the batch script with a training."""
    (tmp_path / "train.py").write_text(script)
    variables = {
        **_allocation(tmp_path),
        "SLURM_RESTART_COUNT": str(restarts),
        "FIRST": "1",
        "REQUEUED": str(tmp_path / "requeued"),
    }
    with open(tmp_path / "printed", "w") as printed:
        return subprocess.Popen(
            [SCRIPT, "train.py"], env={**os.environ, **variables, **more}, cwd=tmp_path, stdout=printed, stderr=printed
        )


def _ask_to_stop(job: subprocess.Popen, tmp_path: Path, by: int = signal.SIGUSR1) -> None:
    """Send the signal of SLURM before the time limit, or SIGTERM as `scancel` does, once a checkpoint is there."""
    until = time.monotonic() + 120
    while not list(tmp_path.glob("runs/step=*.ckpt")) and time.monotonic() < until:
        assert job.poll() is None, (tmp_path / "printed").read_text()
        time.sleep(0.1)
    job.send_signal(by)


@pytest.mark.long
def test_a_job_at_its_time_limit_is_put_back_and_goes_on(tmp_path: Path) -> None:
    requeued, printed = tmp_path / "requeued", tmp_path / "printed"
    with watched() as running:
        first = _batch(tmp_path, TRAIN.format(slow=True), restarts=0)
        _ask_to_stop(first, tmp_path)
        assert first.wait(120) != 0
        assert running() == []
        assert requeued.read_text().startswith("requeue ")
        done = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)["global_step"]
        assert 5 <= done < 32

        second = _batch(tmp_path, TRAIN.format(slow=False), restarts=1)
        assert second.wait(200) == 0, printed.read_text()
        assert running() == []
    assert len(requeued.read_text().splitlines()) == 1  # a complete job is not put back
    assert printed.read_text().count("is at step 32") == 2
    assert re.search(r"Restored all states .*hpc_ckpt_1\.ckpt", printed.read_text())


@pytest.mark.long
@pytest.mark.parametrize("end", ["too often", "cancelled", "failed"])
def test_a_job_that_ends_otherwise_is_not_put_back(tmp_path: Path, end: str) -> None:
    script = "raise SystemExit(3)" if end == "failed" else TRAIN.format(slow=True)
    with watched() as running:
        job = _batch(tmp_path, script, restarts=3 if end == "too often" else 0, MAX_REQUEUES="3")
        if end != "failed":
            _ask_to_stop(job, tmp_path, signal.SIGTERM if end == "cancelled" else signal.SIGUSR1)
        status = job.wait(120)
        assert status == -signal.SIGTERM if end == "cancelled" else status != 0
        assert end == "cancelled" or running() == []  # there SLURM ends the steps; here the block does
    assert (tmp_path / "hpc_ckpt_1.ckpt").exists() == (end == "too often")
    assert not (tmp_path / "requeued").exists()


def _job_with_a_free_port() -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if 20000 <= port < 30000:
            return port - 20000
        with socket.socket() as probe:
            port = 20000 + port % 10000
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port - 20000
