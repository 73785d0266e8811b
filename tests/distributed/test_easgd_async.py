"""Exchanges with a center: which ranks wait for which within an epoch."""

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from center_tasks import APART, Line, fit
from ranks import run

PULL = {"moving_rate": 0.2, "beta": 0.7, "tau": 2}


class Stops(pl.Callback):
    """Stops one rank within an epoch until the others are nearly through, or for a time."""

    def __init__(self, rank: int, folder: str, limit: float) -> None:
        self.rank, self.folder, self.limit = rank, Path(folder), limit
        self.seen: list[int] = []  # exchanges of each of the others during the stop

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


class Rates(pl.Callback):
    """Keeps the rates of exchanges that each rank knows, where it saves and where a resumed fit begins."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.counts: list[list[int]] = []
        self.factor = 1.0

    def _look(self, trainer: pl.Trainer) -> None:
        rates = trainer.strategy.averager._rates
        self.counts, self.factor = [counts for _, counts in rates.state_dict()], rates.factor

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._look(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 18 and trainer.current_epoch == 0:
            self._look(trainer)
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def _rates_before_and_after(folder: str) -> tuple[Rates, Rates]:
    path = str(Path(folder) / "18.ckpt")
    saved, resumed = Rates(path), Rates(path)
    fit("async", Line(), epochs=1, trainer={"callbacks": [Stops(2, folder, 30.0), saved]}, center="thread", **PULL)
    fit("async", Line(), epochs=1, trainer={"callbacks": [resumed]}, resume=path, center="thread", **PULL)
    return saved, resumed


def test_a_resumed_fit_knows_how_often_each_replica_came(tmp_path: Path) -> None:
    found = run(_rates_before_and_after, 3, str(tmp_path), nodes=APART)
    for saved, resumed in found:
        assert len(saved.counts) > 1
        assert resumed.counts[: len(saved.counts)] == saved.counts
    assert found[0][0].factor < 1 - 1e-3  # rank 0 came more often than rank 2, so it pulls less
    assert found[0][1].factor == found[0][0].factor
