"""Ranks that are lost while others join."""

import os
import re
import signal
import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from growing import JOINS_AT, LATE, fit, grow, values
from ranks import attempt

from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.join_requests import LauncherStore
from lightning_hetero.errors import CommunicationError, JoinRefusedError
from lightning_hetero.strategies import join

OPTIONS = {"balance": "off", "grace": 2.0}


def _end_or_freeze(how: str) -> None:
    """End this process, or freeze it for longer than the others take."""
    if how == "frozen":
        subprocess.Popen(["sh", "-c", f"sleep 20; kill -KILL {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)


class LostAt(pl.Callback):
    """A rank is lost when it leaves the fit (``teardown``), or when it enters it again, with others."""

    def __init__(self, rank: int, where: str, how: str) -> None:
        self.rank, self.where, self.how, self.starts = rank, where, how, 0

    def _come(self, where: str) -> None:
        own = os.environ["RANK"] == str(self.rank) and not os.environ.get(LATE)
        if own and where == self.where and self.starts:
            _end_or_freeze(self.how)

    def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self._come("setup")

    def on_train_start(self, *_: Any) -> None:
        self._come("on_train_start")
        self.starts += 1

    def teardown(self, *_: Any, **__: Any) -> None:
        self._come("teardown")


def _check(outcomes: list[Any], lost: int, reason: str) -> None:
    assert outcomes[lost].exitcode == -signal.SIGKILL
    newcomer, rest = outcomes[-1], [outcome for rank, outcome in enumerate(outcomes[:-1]) if rank != lost]
    joined = newcomer.value is not None  # it has asked again in time
    ended = isinstance(newcomer.error, JoinRefusedError) and "it has come to its end" in str(newcomer.error)
    assert joined or ended or isinstance(newcomer.error, CommunicationError), newcomer.trace
    records = values(rest)
    world = 3 if joined else 2
    assert [one.starts[-1][1:] for one in records] == [(0, world), (1, world)]
    assert torch.equal(records[0].weights, records[1].weights)
    for one in records:
        [message] = [text for text in one.messages if "Training goes on with 2" in text]
        assert f"rank {lost} {reason}" in message
        [seconds] = re.findall(r"paused for ([\d.]+) s", message)
        assert float(seconds) < 15  # ranks may wait 60 s for each other
    assert any("1 rank(s) could not join, and the fit goes on without" in text for text in records[0].messages)


CASES = [
    *((rank, where, "killed") for where in ("teardown", "setup", "on_train_start") for rank in (0, 2)),
    (0, "setup", "frozen"),
    (1, "on_train_start", "frozen"),
]


@pytest.mark.parametrize(
    ("rank", "where", "how"),
    [pytest.param(*case, marks=[] if case in CASES[2:3] else pytest.mark.long(after=1)) for case in CASES],
)
def test_the_others_go_on(rank: int, where: str, how: str, tmp_path: Path) -> None:
    lost_at = partial(LostAt, rank, where, how)
    outcomes = grow(3, 1, fit, "HeteroDDPStrategy", OPTIONS, str(tmp_path / "job"), 1, [lost_at])
    _check(outcomes, rank, "has not been heard of" if how == "frozen" else "has ended without an error message")


class LostLater(pl.Callback):
    """Rank 1 is killed two steps after another one has joined."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.begun.append(trainer.global_step)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        own = os.environ["RANK"] == "1" and not os.environ.get(LATE)
        if own and len(self.begun) == 2 and trainer.global_step == self.begun[-1] + 2:
            _end_or_freeze("killed")


def test_a_loss_after_a_join_says_the_step_of_the_whole_fit(tmp_path: Path) -> None:
    outcomes = grow(2, 1, fit, "HeteroDDPStrategy", OPTIONS, str(tmp_path / "job"), 1, [LostLater], epochs=10)
    records = values([outcomes[0], outcomes[2]])
    for one in records:
        [step] = [re.findall(r"after step (\d+)", text) for text in one.messages if "Training goes on with 2" in text]
        assert int(step[0]) == one.starts[-1][0] + 2


@pytest.mark.long(after=1)
@pytest.mark.parametrize("strategy", ["NodeAverageStrategy", "GossipAsyncStrategy", "EASGDAsyncStrategy"])
def test_replicas_go_on(strategy: str, tmp_path: Path) -> None:
    options = {**OPTIONS, "replica": "rank", **({"moving_rate": "auto"} if strategy == "EASGDAsyncStrategy" else {})}
    lost_at = partial(LostAt, 0, "setup", "killed")
    _check(
        grow(3, 1, fit, strategy, options, str(tmp_path / "job"), 1, [lost_at]), 0, "has ended without an error message"
    )


class BothLost(pl.Callback):
    """Ranks 3 and 2 are killed, one after the other, before another one joins."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        at = {"3": JOINS_AT - 4, "2": JOINS_AT - 2}.get(os.environ["RANK"])
        if trainer.global_step == at and not os.environ.get(LATE):
            _end_or_freeze("killed")


def test_a_quorum_of_all_goes_on_with_fewer_and_a_newcomer(tmp_path: Path) -> None:
    options = {**OPTIONS, "replica": "rank", "tau": 2, "quorum": 4}
    outcomes = grow(4, 1, fit, "DiLoCoAsyncStrategy", options, str(tmp_path / "job"), 1, [BothLost], epochs=6)
    assert [outcome.exitcode for outcome in outcomes[2:4]] == [-signal.SIGKILL] * 2
    records = values([*outcomes[:2], outcomes[4]])
    assert [one.starts[-1][1:] for one in records] == [(0, 3), (1, 3), (2, 3)]
    assert all(torch.equal(one.weights, records[0].weights) for one in records)


class Averaging(pl.Callback):
    """Rank 1 is killed while the replicas compute the mean from which all, with the newcomers, are to begin."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if os.environ["RANK"] == "1" and not os.environ.get(LATE):
            strategy: Any = trainer.strategy
            strategy.engine.join_values = partial(_end_or_freeze, "killed")


@pytest.mark.long(after=1)
@pytest.mark.parametrize("strategy", ["GossipAsyncStrategy", "NodeAverageStrategy"])
def test_who_finds_the_mean_again_does_so_among_those_that_remain(strategy: str, tmp_path: Path) -> None:
    options = {**OPTIONS, "replica": "rank"}
    outcomes = grow(3, 1, fit, strategy, options, str(tmp_path / "job"), 1, [Averaging], epochs=10)
    assert outcomes[1].exitcode == -signal.SIGKILL
    records = values([outcomes[0], *outcomes[2:]])
    assert [one.starts[-1][1:] for one in records] == [(0, 3), (1, 3), (2, 3)]


class FirstFails(pl.Callback):
    """Rank 0 fails when the other process waits to join."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        first = os.environ["RANK"] == "0" and not os.environ.get(LATE)
        if first and trainer.global_step >= JOINS_AT and strategy.recovery.newcomers.wanted:
            raise ValueError("no more")


@pytest.mark.long
def test_who_waits_to_join_is_taken_in_by_the_successor_of_a_rank_that_fails(tmp_path: Path) -> None:
    """It is not refused, and the file by which it finds the job stays."""
    outcomes = grow(3, 1, fit, "NodeAverageStrategy", OPTIONS, str(tmp_path / "job"), 1, [FirstFails], epochs=10)
    assert isinstance(outcomes[0].error, ValueError)
    assert [one.starts[-1][1:] for one in values(outcomes[1:])] == [(0, 3), (1, 3), (2, 3)]


class NoAnswer(pl.Callback):
    """Rank 1 does not answer after which step others may join, and is killed while the others wait for that."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if os.environ["RANK"] != "1" or os.environ.get(LATE) or trainer.global_step != JOINS_AT:
            return
        request: Any = trainer.strategy.stop_request  # type: ignore[attr-defined]
        asked = threading.Event()
        request.agreed._agree = lambda *_: asked.set()
        asked.wait(60)
        time.sleep(2.0)
        _end_or_freeze("killed")


@pytest.mark.long
def test_a_rank_that_is_lost_before_it_has_said_when_others_may_join(tmp_path: Path) -> None:
    """The others wait for its answer, and not for a gradient."""
    options = {**OPTIONS, "every_n_steps": 1000}
    outcomes = grow(3, 1, fit, "NodeAverageStrategy", options, str(tmp_path / "job"), 1, [NoAnswer], epochs=10)
    assert outcomes[1].exitcode == -signal.SIGKILL
    records = values([outcomes[0], *outcomes[2:]])
    assert [one.starts[-1][1:] for one in records] == [(0, 3), (1, 3), (2, 3)]


def _one_is_behind(file: str) -> Any:
    """Rank 0 has left the fit when rank 1 learns, in the last collective of the fit, that rank 2 is lost."""

    def last(value: Any, what: str) -> Any:
        everyone = gather(value, what)
        if what == "who was lost" and os.environ["RANK"] == "2":
            _end_or_freeze("killed")
        if what == "who was lost" and os.environ["RANK"] == "1" and not join.again:
            join.again = True
            strategy.recovery._recover(time.monotonic())
            raise AssertionError("it has not left the fit")
        return everyone

    strategy: Any = None

    class Finds(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
            nonlocal strategy
            strategy = trainer.strategy

    join.gather, join.again = last, False  # type: ignore[attr-defined]
    return fit("HeteroDDPStrategy", OPTIONS, file, 1, [Finds])


def test_who_is_behind_leaves_the_fit_as_well(tmp_path: Path) -> None:
    outcomes = grow(3, 1, _one_is_behind, str(tmp_path / "job"))
    _check(outcomes, 2, "has ended without an error message")


class Hosts(pl.Callback):
    """Checks that a process that joins hosts no store of its launcher's job, with any rank there."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        elastic, late = strategy.recovery.newcomers, bool(os.environ.get(LATE))
        places = [place for place in elastic.addresses() if isinstance(place, LauncherStore)]
        first = os.environ["RANK"] == "0" and not late
        assert [place._hosted for place in places] == [first]


def test_a_first_rank_that_is_started_again_does_not_look_for_its_former_store(tmp_path: Path) -> None:
    """As the first rank it would otherwise wait for a store that has ended with the process before it."""

    def env_of(rank: int) -> dict[str, str]:
        same = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": str(rank % 2), "LOCAL_RANK": str(rank % 2)}
        return {**same, LATE: "1"} if rank == 2 else same

    outcomes = attempt(fit, 3, "HeteroDDPStrategy", OPTIONS, str(tmp_path / "job"), 1, [Hosts], env_of=env_of)
    assert [one.starts[-1][1:] for one in values(outcomes)] == [(0, 3), (1, 3), (2, 3)]
