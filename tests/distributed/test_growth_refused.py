"""Processes that cannot join end with one clear error, and the job goes on."""

import json
import os
import time
from pathlib import Path
from typing import Any

import growing
import lightning.pytorch as pl
import pytest
import torch
from growing import JOINS_AT, LATE, fit, grow, values
from tasks import FAST
from test_growth import one_process
from test_survival import BATCH, Module, Numbered
from torch import nn
from torch.utils.data import DataLoader

import lightning_hetero
from lightning_hetero import ConfigurationError, HeteroDDPStrategy, HeteroError
from lightning_hetero.errors import DisagreementError, JoinRefusedError, UnsupportedError
from lightning_hetero.strategies import entering


class Other(Module):
    """Another model."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(3, 5).double()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing is looked at."""


class WaitsForFile(pl.Callback):
    """Ranks wait at some step until a file is there."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        until = time.monotonic() + 120
        while trainer.global_step == JOINS_AT and not self.file.exists() and time.monotonic() < until:
            time.sleep(0.02)


def _refused(folder: str, how: str) -> Any:
    """A job, and a process that does not fit it."""
    done, file = Path(folder) / "done", f"{folder}/job"
    if not os.environ.get(LATE):
        return fit("HeteroDDPStrategy", {"balance": "off"}, file, 0, [lambda: WaitsForFile(done)])
    try:
        if how == "version":
            lightning_hetero.__version__ = "0.0.9"
        if how == "secret":
            while not Path(file).exists():
                time.sleep(0.02)
            host, port, _ = json.loads(Path(file).read_text())
            file = f"{folder}/changed"
            Path(file).write_text(json.dumps([host, port, "0" * 32]))
        if how == "validate":
            while not Path(file).exists():
                time.sleep(0.02)
            strategy = HeteroDDPStrategy(on_peer_loss="continue", balance="off", timeout=60, join_file=file)
            pl.Trainer(strategy=strategy, **FAST).validate(Other(), DataLoader(Numbered(), batch_size=BATCH))
        module = Other if how == "model" else Module
        changed = {"options": {"rebalance_every_n_steps": 9}, "strategy": {}}.get(how, {})
        name = "NodeAverageStrategy" if how == "strategy" else "HeteroDDPStrategy"
        epochs = 7 if how == "settings" else 3
        return fit(name, {"balance": "off"}, file, 0, module=module, late_options=changed, epochs=epochs)
    finally:
        done.write_text("")


@pytest.mark.long(after=3)
@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("model", JoinRefusedError, "it trains another model: the job lacks its more.weight [5, 3] torch.float64"),
        ("options", JoinRefusedError, "its options differ (rebalance_every_n_steps: 9, in the job 4)"),
        ("strategy", JoinRefusedError, "strategy: 'NodeAverageStrategy', in the job 'HeteroDDPStrategy'"),
        ("settings", JoinRefusedError, "its Trainer's settings differ (max_epochs: 7, in the job 3)"),
        ("version", JoinRefusedError, "it runs lightning_hetero 0.0.9"),
        ("secret", JoinRefusedError, "A job runs there, but not with the secret that stands in the place"),
        ("validate", UnsupportedError, "it does not call fit() first"),
    ],
)
def test_who_does_not_fit_is_refused(how: str, error: type[HeteroError], words: str, tmp_path: Path) -> None:
    outcomes = grow(2, 1, _refused, str(tmp_path), how)
    assert isinstance(outcomes[2].error, error), outcomes[2].trace
    assert words in str(outcomes[2].error)
    seen = values(outcomes[:2])  # exactly as if nobody had come
    assert [one.starts for one in seen] == [[(0, 0, 2)], [(0, 1, 2)]]
    assert (seen[0].weights - one_process(epochs=3, batch=2 * BATCH)).abs().max() < 1e-10


class Fails(Module):
    """Cannot be set up."""

    def configure_optimizers(self) -> Any:
        raise ValueError("no optimizer today")


def _does_not_fit_after_all(folder: str, how: str) -> Any:
    """A job, and a process that fails, or is found not to fit, when it sets up its fit together with the others."""
    late = bool(os.environ.get(LATE))
    if late and how == "loader":
        growing.Numbered = lambda: torch.utils.data.Subset(Numbered(), range(20))
    return fit(
        "HeteroDDPStrategy", {"balance": "off"}, f"{folder}/job", 1, module=Fails if late and how == "model" else Module
    )


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("loader", DisagreementError, "the ranks differ in the training dataloader"),
        ("model", ValueError, "no optimizer today"),
    ],
)
def test_the_job_goes_on_without_who_does_not_fit_after_all(
    how: str, error: type[Exception], words: str, tmp_path: Path
) -> None:
    outcomes = grow(2, 1, _does_not_fit_after_all, str(tmp_path), how)
    assert isinstance(outcomes[2].error, error), outcomes[2].trace
    assert words in str(outcomes[2].error)
    seen = values(outcomes[:2])
    assert any("1 rank(s) could not join, and the fit goes on without: " in one for one in seen[0].said)
    assert [len(one.starts) for one in seen] == [2, 2]
    assert [one.starts[-1][1:] for one in seen] == [(0, 2), (1, 2)]
    assert (seen[0].weights - one_process(epochs=3, batch=2 * BATCH)).abs().max() < 1e-10


def _dies(folder: str) -> Any:
    """A job, and a process that dies when it is admitted."""
    entering._HERE = entering.timedelta(seconds=2)
    if os.environ.get(LATE):
        entering.enter = lambda *_: os._exit(9)
    return fit("HeteroDDPStrategy", {"balance": "off"}, f"{folder}/job", 1)


def test_the_job_goes_on_if_a_process_dies_while_it_joins(tmp_path: Path) -> None:
    outcomes = grow(2, 1, _dies, str(tmp_path))
    assert outcomes[2].exitcode == 9
    seen = values(outcomes[:2])
    assert [one.starts[-1][1:] for one in seen] == [(0, 2), (1, 2)]
    assert torch.equal(seen[0].weights, seen[1].weights)
    assert (seen[0].weights - one_process(epochs=3, batch=2 * BATCH)).abs().max() < 1e-10


def _meets_a_file(file: str) -> None:
    fit("HeteroDDPStrategy", {"balance": "off"}, file, 0)


def test_a_file_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job").write_text("my notes")
    outcomes = grow(2, 0, _meets_a_file, str(tmp_path / "job"))
    for outcome in outcomes:
        assert isinstance(outcome.error, ConfigurationError)
        assert "is there, but holds no job's address" in str(outcome.error)
    assert (tmp_path / "job").read_text() == "my notes"


def test_the_option_needs_a_fit_that_goes_on() -> None:
    with pytest.raises(ConfigurationError, match="on_peer_loss='error' keeps the ranks as they are"):
        HeteroDDPStrategy(join_file="job")
    with pytest.raises(ConfigurationError, match="give the name of a file"):
        HeteroDDPStrategy(join_file="", on_peer_loss="continue")
