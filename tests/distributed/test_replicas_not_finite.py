"""Several replicas, or all of them, with values that are not finite; of a single one see test_events.py."""

from typing import Any

import lightning.pytorch as pl
import torch
from ranks import attempt
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader

from lightning_hetero import NodeAverageStrategy
from lightning_hetero.algorithms.engine import nonfinite_message
from lightning_hetero.errors import NotFiniteError

NODES = [2, 1]
BASE = {"balance": "off", "global_batch_size": 12}


def _fit(module: Net, strategy: Any) -> None:
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 2})
    trainer.fit(module, DataLoader(dataset(96), batch_size=4))


class AllExplode(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * float("nan")


def _all_explode() -> None:
    _fit(AllExplode(), NodeAverageStrategy(every_n_steps=2, on_nan="skip", **BASE))


def test_nobody_is_left_to_go_on_with() -> None:
    for outcome in attempt(_all_explode, 3, nodes=NODES):
        assert isinstance(outcome.error, NotFiniteError), outcome.trace
        assert "replica 0 (ranks [0, 1])" in str(outcome.error)
        assert "replica 1 (ranks [2])" in str(outcome.error)


def test_where_several_replicas_are_not_finite_the_first_is_named_as_the_cause() -> None:
    replicas, fine = [[0], [1], [2]], (None, None)
    one = nonfinite_message([1], replicas, 20, [fine, ("w", 17), fine], "the mean")
    assert "No value that is not finite has reached the others" in one
    several = nonfinite_message([0, 1, 2], replicas, 20, [("w", 18), ("w", 13), ("w", 18)], "the mean")
    assert "has reached the others" not in several
    assert "The loss of rank 1 was the first that was not finite, at step 13" in several
