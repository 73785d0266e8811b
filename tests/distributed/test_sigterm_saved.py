"""SIGTERM: the place of the checkpoint, under SLURM and after a real kill."""

import os
import signal
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from ranks import run
from scripts import run_script
from tasks import FAST, Net, dataset, parameters
from test_sigterm import BASE, TERMINATED, Terminated
from torch.utils.data import DataLoader

from lightning_hetero import EASGDStrategy, HeteroDDPStrategy

# -- where it is saved ---------------------------------------------------------------------------------------

SCONTROL = """#!/usr/bin/env bash
echo "$@" >> "$(dirname "$0")/asked"
"""


def _under_slurm(folder: str, signum: int) -> Any:
    del os.environ["TORCHELASTIC_RUN_ID"]
    found = []
    for callbacks in ([Terminated(3, (0, 1), signum)], []):
        settings = {**FAST, "max_epochs": 2, "default_root_dir": folder, "num_nodes": 1, "devices": 2}
        trainer = pl.Trainer(strategy=HeteroDDPStrategy(**BASE), callbacks=callbacks, **settings)
        assert isinstance(trainer._accelerator_connector.cluster_environment, SLURMEnvironment)
        module, code = Net(), None
        try:
            trainer.fit(module, DataLoader(dataset(96), batch_size=4))
        except SIGTERMException as stopped:
            code = stopped.code
        found.append((code, len(module.seen), parameters(module)))
    return found


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_under_slurm_the_job_is_requeued_and_goes_on(tmp_path: Path, signum: int) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "scontrol").write_text(SCONTROL)
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    job = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_ID": "4711",
        "SLURM_NODEID": "0",
    }

    def of(rank: int) -> dict[str, str]:
        return {**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}

    for (code, before, _), (none, after, _) in run(_under_slurm, 2, str(tmp_path / "root"), signum, env_of=of):
        assert code == TERMINATED
        assert none is None
        assert 3 <= before < 16
        assert before + after == 16
    assert (tmp_path / "bin" / "asked").read_text() == "requeue 4711\n"
    assert os.listdir(tmp_path / "root") == ["hpc_ckpt_1.ckpt"]


# -- a real kill ---------------------------------------------------------------------------------------------

SCRIPT = """
import sys
sys.path.insert(0, {here!r})
from test_sigterm_saved import SlowSteps, train
if __name__ == "__main__":
    train({kind!r}, {folder!r}, callbacks=[SlowSteps({folder!r})], devices=2)
"""


class SlowSteps(pl.Callback):
    """Trains slowly; reports that it has begun."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        Path(f"{self.folder}/begun-{trainer.global_rank}-{os.getpid()}").touch()
        time.sleep(1.0)


def train(kind: str, folder: str, callbacks: Any = (), resume: str | None = None, **options: Any) -> torch.Tensor:
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
    strategy = STRATEGIES[kind](**BASE)
    keep = ModelCheckpoint(f"{folder}/kept", every_n_train_steps=100, save_top_k=0)
    settings = {**FAST, "enable_checkpointing": True, "max_epochs": 3, **options}
    module, trainer = Net(), pl.Trainer(strategy=strategy, callbacks=[*callbacks, keep], **settings)
    trainer.fit(module, DataLoader(dataset(96), batch_size=4, shuffle=True), ckpt_path=resume)
    return parameters(module)


def _kill_rank_0_once_both_have_begun(folder: Path) -> None:
    until = time.monotonic() + 150
    while len(list(folder.glob("begun-*"))) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    for path in folder.glob("begun-0-*"):
        os.kill(int(path.name.split("-")[-1]), signal.SIGTERM)


STRATEGIES = {"ddp": HeteroDDPStrategy, "easgd": partial(EASGDStrategy, moving_rate=0.3, tau=3)}


@pytest.mark.long(after=1)
@pytest.mark.parametrize("kind", list(STRATEGIES))
def test_a_job_that_is_killed_ends_as_terminated_and_goes_on(tmp_path: Path, kind: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(here=str(Path(__file__).parent), kind=kind, folder=str(tmp_path)))
    killer = threading.Thread(target=_kill_rank_0_once_both_have_begun, args=(tmp_path,))
    killer.start()
    [(status, output)] = run_script(script, folder=tmp_path)
    killer.join()
    assert status == TERMINATED, output
    assert f"saved {tmp_path}/kept/last-sigterm.ckpt" in output
    assert "local rank 1" not in output  # which has not failed
    saved = torch.load(tmp_path / "kept" / "last-sigterm.ckpt", weights_only=True)
    assert 1 <= saved["global_step"] < 24
    whole = run(train, 2, kind, str(tmp_path / "whole"), nodes=[2])
    again = run(train, 2, kind, str(tmp_path), resume="last", nodes=[2])
    for one, other in zip(whole, again, strict=True):
        assert torch.equal(one, other)
