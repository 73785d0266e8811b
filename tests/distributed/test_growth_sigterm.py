"""SIGTERM that comes while others join: the fit that begins with them stops at its first step."""

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from growing import JOINS_AT, LATE, fit, grow
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hetero.callbacks.resumable import ResumableCheckpoint
from lightning_hetero.strategies import join


class Terminated(pl.Callback):
    """Sends SIGTERM to a rank, once, at a moment between its leaving of the fit and its new start."""

    def __init__(self, rank: int, where: str) -> None:
        self.rank, self.where, self.starts = rank, where, 0
        if where == "enter":
            self._usual = join.ElasticJoin.enter
            join.ElasticJoin.enter = lambda *args: self._enter(*args)  # type: ignore[method-assign]

    def _come(self, where: str) -> None:
        own = os.environ["RANK"] == str(self.rank) and not os.environ.get(LATE)
        if own and where == self.where and self.starts == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def _enter(self, *args: Any) -> None:
        self._come("enter")
        self._usual(*args)

    def on_save_checkpoint(self, *_: Any) -> None:
        self._come("save")  # the checkpoint from which all go on; ranks have asked each other for SIGTERM before

    def setup(self, *_: Any, **__: Any) -> None:
        self._come("setup")

    def on_train_start(self, *_: Any) -> None:
        self.starts += 1

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.1)  # ranks hear each other four times a second

    def teardown(self, *_: Any, **__: Any) -> None:
        self._come("teardown")


@pytest.mark.long(after=4)
@pytest.mark.parametrize("rank", [1, 0])
@pytest.mark.parametrize("where", ["save", "teardown", "enter", "setup"])
def test_all_save_and_stop(rank: int, where: str, tmp_path: Path) -> None:
    terminated = functools.partial(Terminated, rank, where)
    resumable = functools.partial(ResumableCheckpoint, str(tmp_path / "saved"), every_n_steps=1000, background=False)
    outcomes = grow(2, 1, fit, "HeteroDDPStrategy", {}, str(tmp_path / "job"), 1, [terminated, resumable])
    for outcome in outcomes:
        assert isinstance(outcome.error, SIGTERMException), outcome.trace
    [saved] = (tmp_path / "saved").glob("*-stopped.ckpt")
    assert JOINS_AT < int(saved.name.removeprefix("step=").removesuffix("-stopped.ckpt")) < 36


def test_the_handler_that_was_there_is_put_back_and_asked() -> None:
    noted, asked = [], []
    before = signal.signal(signal.SIGTERM, lambda *_: asked.append("before"))
    try:
        theirs = signal.getsignal(signal.SIGTERM)
        with join.sigterm_recorded(lambda: bool(noted)):
            signal.raise_signal(signal.SIGTERM)
            noted.append("here")
            signal.raise_signal(signal.SIGTERM)
        assert asked == ["before"]
        assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, before)
