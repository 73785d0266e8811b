"""Processes that cannot join end with one clear error, and the job goes on."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import growing
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from growing import JOINS_AT, LATE, fit, grow, values
from ranks import run
from tasks import FAST
from test_growth import one_process
from test_survival import BATCH, Module, Numbered
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import ConfigurationError, HeteroDDPStrategy, HeteroError
from lightning_hetero.comm.agreement import check_equal, raise_on_all
from lightning_hetero.comm.join_requests import Admission
from lightning_hetero.errors import CommunicationError, DisagreementError, JoinRefusedError, UnsupportedError
from lightning_hetero.strategies import join


class Other(Module):
    """Another model."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(3, 5).double()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Do nothing."""


class WaitsForFile(pl.Callback):
    """Ranks wait at some step until a file is there."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        until = time.monotonic() + 120
        while trainer.global_step == JOINS_AT and not self.file.exists() and time.monotonic() < until:
            time.sleep(0.02)


def _refused(folder: str, how: str) -> Any:
    """Fit of a job, and of a process that does not fit it."""
    done, file = Path(folder) / "done", f"{folder}/job"
    if not os.environ.get(LATE):
        return fit("HeteroDDPStrategy", {"balance": "off"}, file, 0, [lambda: WaitsForFile(done)])
    try:
        if how == "version":
            join.__version__ = "0.0.9"  # type: ignore[attr-defined]
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
    records = values(outcomes[:2])  # exactly as if nobody had come
    assert [one.starts for one in records] == [[(0, 0, 2)], [(0, 1, 2)]]
    assert (records[0].weights - one_process(epochs=3, batch=2 * BATCH)).abs().max() < 1e-10


class Fails(Module):
    """A model whose setup fails."""

    def configure_optimizers(self) -> Any:
        raise ValueError("no optimizer today")


def _does_not_fit_after_all(folder: str, how: str) -> Any:
    """Fit of a job, and of a process that fails, or does not fit, when it sets up its fit with the others."""
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
    records = values(outcomes[:2])
    assert any("1 rank(s) could not join, and the fit goes on without: " in one for one in records[0].messages)
    assert [len(one.starts) for one in records] == [2, 2]
    assert [one.starts[-1][1:] for one in records] == [(0, 2), (1, 2)]
    assert (records[0].weights - one_process(epochs=3, batch=2 * BATCH)).abs().max() < 1e-10


def _one_of_two_is_wrong(folder: str, how: str) -> Any:
    """Fit of a job, and of two processes that join together: the second one does not fit at setup."""
    wrong = os.environ.get(LATE) == "2"
    if wrong and how == "loader":
        growing.Numbered = lambda: torch.utils.data.Subset(Numbered(), range(20))
    made = Fails if wrong and how == "model" else Module
    return fit("HeteroDDPStrategy", {"balance": "off"}, f"{folder}/job", 2, module=made, epochs=10)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("loader", DisagreementError, "the ranks differ in the training dataloader"),
        pytest.param("model", ValueError, "no optimizer today", marks=pytest.mark.long),
    ],
)
def test_who_fits_joins_although_another_one_that_comes_with_it_does_not(
    how: str, error: type[Exception], words: str, tmp_path: Path
) -> None:
    outcomes = grow(2, 2, _one_of_two_is_wrong, str(tmp_path), how)
    assert isinstance(outcomes[3].error, error), outcomes[3].trace
    assert words in str(outcomes[3].error)
    records = values(outcomes[:3])
    assert any("2 rank(s) could not join, and the fit goes on without: " in one for one in records[0].messages)
    assert [len(one.starts) for one in records] == [3, 3, 1]
    assert [one.starts[-1][1:] for one in records] == [(0, 3), (1, 3), (2, 3)]
    for one in records:
        assert (one.weights - one_process(epochs=10, batch=2 * BATCH)).abs().max() < 1e-10


def _faults() -> list[Any]:
    """Ranks with the fault, according to the error of each of three ranks."""
    dist.init_process_group("gloo")
    found, me = [], dist.get_rank()
    for value in ({"a": 1, "b": me == 1}, {"a": 1} if me < 2 else {}):
        try:
            check_equal("things", value)
        except DisagreementError as error:
            found.append(error.of_ranks)
    for problems in ((2,), (1, 2)):
        try:
            raise_on_all(ConfigurationError("mine") if me in problems else None, "things")
        except HeteroError as error:
            found.append(error.of_ranks)
    return found


def test_an_error_of_all_ranks_knows_on_which_of_them_the_fault_is() -> None:
    assert run(_faults, 3) == [[(1,), (2,), (2,), (1, 2)]] * 3


@pytest.mark.parametrize(
    ("ranks", "others"), [((3,), True), ((1, 3), True), ((2,), False), ((2, 3), False), ((1,), False), ((), False)]
)
def test_who_asks_again_is_new_and_not_wrong_and_one_that_is_wrong_ends(ranks: tuple[int, ...], others: bool) -> None:
    """Ranks 2 and 3 are new. If the fault is on the old ranks, a new attempt would always fail."""
    ticket = join.JoinTicket(Admission(1, 2, 4, 2, ()), None, None, 0.0)
    assert join.wrong_are_others(ticket, DisagreementError("they differ").of_all(ranks)) is others
    assert join.wrong_are_others(ticket, CommunicationError("rank 3 has ended"))


def _both_are_wrong(folder: str) -> Any:
    """Fit of a job, and of two processes that join together, each with other data."""
    late = os.environ.get(LATE)
    if late:
        growing.Numbered = lambda: torch.utils.data.Subset(Numbered(), range(20 + int(late)))
    return fit("HeteroDDPStrategy", {"balance": "off"}, f"{folder}/job", 2)


@pytest.mark.long
def test_two_that_differ_from_the_job_and_from_each_other_both_end(tmp_path: Path) -> None:
    outcomes = grow(2, 2, _both_are_wrong, str(tmp_path))
    for outcome in outcomes[2:]:
        assert isinstance(outcome.error, DisagreementError), outcome.trace
        assert "the ranks differ in the training dataloader" in str(outcome.error)
    assert [len(one.starts) for one in values(outcomes[:2])] == [2, 2]


def _the_job_ends_meanwhile(folder: str) -> Any:
    """The job is gone when the process that fits asks it again."""
    if os.environ.get(LATE) == "1":
        ask = join.ElasticJoin.find

        def find(strategy: Any) -> Any:
            until = time.monotonic() + 120
            while Path(folder, "job").exists() and time.monotonic() < until:
                time.sleep(0.02)
            return ask(strategy)

        join.ElasticJoin.find = find  # type: ignore[method-assign]
    return _one_of_two_is_wrong(folder, "loader")


@pytest.mark.long
def test_who_asks_a_job_again_that_has_ended_begins_none(tmp_path: Path) -> None:
    outcomes = grow(2, 2, _the_job_ends_meanwhile, str(tmp_path))
    assert isinstance(outcomes[2].error, CommunicationError), outcomes[2].trace
    assert "when it asked again the job was gone" in str(outcomes[2].error)
    values(outcomes[:2])


def _is_terminated(folder: str) -> Any:
    """SIGTERM comes to the process that fits while it asks the job again."""
    if os.environ.get(LATE) == "1":
        join.ElasticJoin.find = lambda _: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(60)
    return _one_of_two_is_wrong(folder, "loader")


@pytest.mark.long
def test_who_asks_again_ends_with_sigterm_and_the_job_does_not(tmp_path: Path) -> None:
    outcomes = grow(2, 2, _is_terminated, str(tmp_path))
    assert outcomes[2].exitcode == -signal.SIGTERM, outcomes[2].trace
    assert [one.starts[-1][1:] for one in values(outcomes[:2])] == [(0, 2), (1, 2)]


def _dies(folder: str) -> Any:
    """A job, and a process that dies when it is admitted."""
    join._HERE = join.timedelta(seconds=2)
    if os.environ.get(LATE):
        join.ElasticJoin.enter = lambda *_: os._exit(9)
    return fit("HeteroDDPStrategy", {"balance": "off"}, f"{folder}/job", 1)


def test_the_job_goes_on_if_a_process_dies_while_it_joins(tmp_path: Path) -> None:
    outcomes = grow(2, 1, _dies, str(tmp_path))
    assert outcomes[2].exitcode == 9
    records = values(outcomes[:2])
    assert [one.starts[-1][1:] for one in records] == [(0, 2), (1, 2)]
    assert torch.equal(records[0].weights, records[1].weights)
    assert (records[0].weights - one_process(epochs=3, batch=2 * BATCH)).abs().max() < 1e-10


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
