"""Python's garbage collector does not go through all objects while all ranks wait."""

import gc
import weakref
from typing import Any

import lightning.pytorch as pl
import pytest
from ranks import run
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader

import lightning_hetero as lh
from lightning_hetero.comm import threads


class Cycle:
    def __init__(self) -> None:
        self.me = self


def test_what_is_made_later_is_still_collected() -> None:
    threads.freeze_gc()
    assert gc.get_freeze_count() > 10_000
    assert len(gc.get_objects()) < 10_000
    later = weakref.ref(Cycle())
    gc.collect()
    assert later() is None
    threads.unfreeze_gc()
    threads.unfreeze_gc()
    assert gc.get_freeze_count() == 0


def test_a_second_call_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # Counting goes through all objects that are left out: others would wait 0.1 s for a rank that joins them.
    threads.freeze_gc()
    try:
        monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("counted again"))
        threads.freeze_gc()
    finally:
        threads.unfreeze_gc()


def test_what_the_user_has_frozen_stays_so() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        threads.freeze_gc()
        threads.unfreeze_gc()
        assert gc.get_freeze_count() == count
    finally:
        gc.unfreeze()


class Looks(pl.Callback):
    def __init__(self, fails: bool) -> None:
        self.fails, self.frozen = fails, 0

    def on_train_batch_end(self, *_: object) -> None:
        self.frozen = gc.get_freeze_count()
        if self.fails:
            raise ValueError("of the user")


def _fit(fails: bool, options: dict[str, Any]) -> tuple[bool, int]:
    """Whether objects were left out during a fit, and their number after it."""
    gc.unfreeze()  # objects that the server, from which ranks are forked, has frozen
    looks = Looks(fails)
    trainer = pl.Trainer(strategy=lh.HeteroDDPStrategy(**options), **{**FAST, "max_epochs": 1}, callbacks=[looks])
    try:
        trainer.fit(Net(), DataLoader(dataset(8), batch_size=4))
    except ValueError:
        assert fails
    return looks.frozen > 0, gc.get_freeze_count()


@pytest.mark.parametrize("fails", [False, True])
def test_only_during_a_fit_that_survives(fails: bool) -> None:
    assert run(_fit, 1, fails, {})[0] == (False, 0)
    assert run(_fit, 1, fails, {"on_peer_loss": "continue"})[0] == (True, 0)
