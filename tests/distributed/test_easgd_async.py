"""Exchanges with a center: who waits for whom within an epoch."""

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from center_tasks import APART, Line, fit
from ranks import run

PULL = {"moving_rate": 0.2, "beta": 0.7, "tau": 2}


class Stops(pl.Callback):
    """One rank stops in the middle of an epoch until the others are nearly through, or it has waited long enough."""

    def __init__(self, rank: int, folder: str, limit: float) -> None:
        self.rank, self.folder, self.limit = rank, Path(folder), limit
        self.seen: list[int] = []  # exchanges of each of the others meanwhile

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank and batch_idx == 5:
            end = time.monotonic() + self.limit
            while len(list(self.folder.glob("*.done"))) < 2 and time.monotonic() < end:
                time.sleep(0.01)
            self.seen = sorted(int(path.stem.split("-")[1]) for path in self.folder.glob("*.done"))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank != self.rank and batch_idx == 17:
            exchanges = trainer.strategy.traffic.exchanges
            (self.folder / f"{trainer.global_rank}-{exchanges}.done").touch()


def _stop(name: str, rank: int, folder: str, limit: float, **options: Any) -> list[int]:
    stops = Stops(rank, folder, limit)
    fit(name, Line(), epochs=1, trainer={"callbacks": [stops]}, **PULL, **options)
    return stops.seen


@pytest.mark.long(after=1)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("name", "options"), [("async", {"center": "shared_memory"}), ("async", {"center": "thread"}), ("hogwild", {})]
)
def test_a_rank_that_stops_does_not_stop_the_others(
    tmp_path: Path, name: str, rank: int, options: dict[str, Any]
) -> None:
    # Rank 0 is the center's host; batches 0 to 17 are 9 exchanges.
    assert run(_stop, 3, name, rank, str(tmp_path), 30.0, nodes=APART, **options)[rank] == [9, 9]


@pytest.mark.parametrize("name", ["easgd", "round_robin"])
def test_in_lockstep_a_rank_that_stops_stops_the_others(tmp_path: Path, name: str) -> None:
    assert run(_stop, 3, name, 0, str(tmp_path), 1.0, nodes=APART)[0] == []
