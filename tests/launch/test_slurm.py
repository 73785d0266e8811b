"""The example for SLURM: its own lines, with stand-ins for SLURM's two commands; nodes of two ranks and of one."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from leftovers import watched
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm" / "train.sbatch"
SRUN = """#!/usr/bin/env bash
# As srun does: the command once per node, with the variables of that node.
[[ "$1" == --kill-on-bad-exit=1 ]] && shift
SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_GPUS_ON_NODE=2 "$@" &
first=$!
SLURM_NODEID=1 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_GPUS_ON_NODE=1 "$@" || exit 1
wait "$first"
"""
SCONTROL = """#!/usr/bin/env bash
[[ "$*" == "show hostnames localhost,elsewhere" ]] && printf 'localhost\\nelsewhere\\n'
"""


@pytest.mark.long
def test_the_example_starts_a_torchrun_per_node(tmp_path: Path) -> None:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "localhost,elsewhere",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_JOB_NAME": "hetero",
        "SLURM_JOB_ID": str(_job_with_a_free_port()),
    }
    command = [SCRIPT, "-m", "lightning_hetero", "doctor", "--accelerator", "cpu", "--timeout", "60"]
    with watched() as running:
        done = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert running() == []
    assert done.stdout.count("3 ranks on 2 nodes") == 1
    rows = re.findall(r"│ (\d)\s+│ (\d)\s+│", done.stdout)
    assert rows[:3] == [("0", "0"), ("1", "0"), ("2", "1")]
    assert re.search(r"within a node\s+│ 0 - 1", done.stdout)
    assert re.search(r"between nodes\s+│ 0 - 2", done.stdout)
    assert re.search(r"hetero_daso\s+│ available", done.stdout)
    assert "Gradients between the nodes: 2 x (7.45 MB / 2 / " in done.stdout


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


TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
SLURM = {
    "SLURM_NTASKS": "3",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NAME": "hetero",
    "SLURM_JOB_ID": "7",
    "SLURM_NODELIST": "n[3-4]",
}


@pytest.mark.parametrize(
    ("variables", "kind", "place"),
    [
        # torchrun within a SLURM job: torchrun is who has started the rank
        ({**SLURM, "SLURM_NTASKS": "2", **TORCHRUN}, TorchElasticEnvironment, (3, 1, 1, 0)),
        # a rank per task, also where the nodes are not alike: no `devices` to match
        (SLURM, SLURMEnvironment, (3, 2, 0, 1)),
    ],
)
def test_the_environment_that_has_started_this_rank(monkeypatch, variables, kind, place):
    for name in {*TORCHRUN, *SLURM}:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment = Trainer(strategy="hetero_ddp", accelerator="cpu", logger=False).strategy.cluster_environment
    assert type(environment) is kind
    says = environment.world_size(), environment.global_rank(), environment.local_rank(), environment.node_rank()
    assert says == place
