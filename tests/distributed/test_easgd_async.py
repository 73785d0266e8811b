"""Exchanges with a center: who is served when, who waits for whom, and what a replica that is not finite does."""

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from center_tasks import APART, Line, fit
from ranks import run

from lightning_hetero import EASGDAsyncStrategy, EASGDRoundRobinStrategy

PULL = {"moving_rate": 0.2, "beta": 0.7, "tau": 2}


# -- the order of service ------------------------------------------------------------------------------------


def noting(kind: Any) -> Any:
    class Noting(kind):
        """Notes whom the center's host serves."""

        def make_averager(self) -> Any:
            averager = super().make_averager()
            make, self.served = averager.make_center, []

            def watched() -> Any:
                center = make()
                receive = center._receive
                center._receive = lambda index, *args: self.served.append(index) or receive(index, *args)
                return center

            averager.make_center = watched
            return averager

    return Noting


class SlowLine(Line):
    """Rank 1 takes its time."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1:
            time.sleep(0.03)
        return super().training_step(batch, batch_idx)


def _served(kind: Any, **options: Any) -> list[int]:
    module = SlowLine()
    fit(noting(kind), module, epochs=1, **PULL, **options)
    return module.trainer.strategy.served


def test_round_robin_serves_strictly_in_order_and_async_as_they_come() -> None:
    turns = run(_served, 3, EASGDRoundRobinStrategy, nodes=APART)
    assert turns[0] == [0, 1, 2] * 10
    assert turns[1] == turns[2] == []  # the center lives with rank 0
    comes = run(_served, 3, EASGDAsyncStrategy, center="thread", nodes=APART)[0]
    assert sorted(comes) == sorted(turns[0])
    assert comes != turns[0]


# -- nobody waits within an epoch ----------------------------------------------------------------------------


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
