"""One rank fails before training begins, or cannot join: the others hear of it at once, though its process lives on."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from ranks import attempt
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader

from lightning_hetero import DiLoCoStrategy, HeteroDDPStrategy
from lightning_hetero.errors import CommunicationError

LIVES = 30.0  # seconds that a process lives on, unless the ranks that must notice the failure have ended


def _live_until(ended: list[Path]) -> None:
    until = time.monotonic() + LIVES
    while time.monotonic() < until and not all(path.exists() for path in ended):
        time.sleep(0.05)


class Fails(Net):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def setup(self, stage: str) -> None:
        self._fail("setup")

    def configure_model(self) -> None:
        self._fail("configure_model")

    def on_fit_start(self) -> None:
        self._fail("on_fit_start")

    def _fail(self, where: str) -> None:
        if where == self.where and self.trainer.global_rank == 1:
            raise ValueError(f"a fault in {where}")


def _fit(kind: Any, where: str, noticed: Path) -> None:
    trainer = pl.Trainer(strategy=kind(), max_epochs=1, **FAST)
    began = time.monotonic()
    try:
        trainer.fit(Fails(where), _loader())
    except ValueError:
        _live_until([noticed])
        raise
    finally:
        if trainer.global_rank == 0 and time.monotonic() - began < LIVES - 5:
            noticed.touch()


@pytest.mark.parametrize("where", ["setup", "configure_model", "on_fit_start"])
def test_the_others_hear_of_it_at_once(where: str, tmp_path: Path) -> None:
    kind, noticed = DiLoCoStrategy if where == "setup" else HeteroDDPStrategy, tmp_path / "heard"
    first, second = attempt(_fit, 2, kind, where, noticed, nodes=[1, 1])
    assert noticed.exists(), first.trace
    assert isinstance(second.error, ValueError)
    assert isinstance(first.error, CommunicationError), first.trace
    assert f"rank 1 failed with ValueError: a fault in {where}" in str(first.error)


SCRIPT = """
import os, sys
if os.environ.get("LOCAL_RANK") == "1":
    sys.exit("a fault before it joins")
import lightning.pytorch as pl
import lightning_hetero
from lightning.pytorch.demos.boring_classes import BoringModel
settings = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
pl.Trainer(strategy="hetero_ddp", **settings).fit(BoringModel())
"""


@pytest.mark.long
def test_a_process_that_ends_before_it_joins_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1  # and not killed after the launcher's grace
    assert "a fault before it joins" in done.stderr
    assert "could not join the job: local rank 1 ended with exit code 1 before it had joined" in done.stderr


# -- two jobs at one port ------------------------------------------------------------------------------


def _one_of_two_jobs(folder: str) -> None:
    there = Path(folder) / "trains"
    if os.environ["TORCHELASTIC_RUN_ID"] == "second":
        while not there.exists():
            time.sleep(0.05)
        try:
            pl.Trainer(strategy=HeteroDDPStrategy(timeout=20), max_epochs=1, **FAST).fit(Net(), _loader())
        finally:
            Path(folder, f"rank {os.environ['RANK']} has ended").touch()
        return
    trainer = pl.Trainer(strategy=HeteroDDPStrategy(), max_epochs=1, callbacks=[TrainsUntil(there)], **FAST)
    trainer.fit(Net(), _loader())


def _loader() -> DataLoader:
    return DataLoader(dataset(48), batch_size=4)


class TrainsUntil(pl.Callback):
    """Trains until the other job has ended."""

    def __init__(self, there: Path) -> None:
        self.there = there

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.there.touch()
        _live_until([self.there.with_name(f"rank {rank} has ended") for rank in range(2)])


def test_the_second_job_at_a_port_says_so(tmp_path: Path) -> None:
    def of(number: int) -> dict[str, str]:
        job = {"RANK": str(number % 2), "LOCAL_RANK": str(number % 2), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        return job | {"TORCHELASTIC_RUN_ID": "first" if number < 2 else "second"}

    outcomes = attempt(_one_of_two_jobs, 4, str(tmp_path), env_of=of)
    assert not any(outcome.error for outcome in outcomes[:2]), outcomes[0].trace
    for outcome in outcomes[2:]:
        assert isinstance(outcome.error, CommunicationError), outcome.trace
        assert "port" in str(outcome.error)
        assert "another job" in str(outcome.error)
        assert "Set MASTER_PORT to a free one" in str(outcome.error) or "set MASTER_PORT" in str(outcome.error)
