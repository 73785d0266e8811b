"""A replica with values that are not finite is found before it spreads, or is left out; all ranks name it."""

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import attempt, run
from tasks import FAST, Net, dataset, parameters
from torch.utils.data import DataLoader

from lightning_hetero import DASOStrategy, HeteroDDPStrategy, NodeAverageStrategy
from lightning_hetero.algorithms.engine import nonfinite_message
from lightning_hetero.errors import NotFiniteError

NODES = [2, 1]
STRATEGIES = {"node": NodeAverageStrategy, "daso": DASOStrategy, "ddp": HeteroDDPStrategy}
BASE = {"balance": "off", "global_batch_size": 12}
CYCLING = {"warmup": 0, "cooldown": 0, "patience": 99}


def _fit(module: Net, strategy: Any, resume: str | None = None, **options: Any) -> Net:
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 2, **options})
    trainer.fit(module, DataLoader(dataset(96), batch_size=4), ckpt_path=resume)
    return module


# -- a replica that is not finite ----------------------------------------------------------------------------


class Explodes(Net):
    """The loss of rank 2, which is a replica of its own, is NaN once."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.global_rank == 2 and self.trainer.global_step == 5 else loss

    def on_exception(self, exception: BaseException) -> None:
        self.at_the_error = parameters(self)


def _explode(name: str, **options: Any) -> dict[str, Any]:
    module = Explodes()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _fit(module, STRATEGIES[name](**BASE, **options))
        except NotFiniteError as error:
            return {"error": str(error), "parameters": parameters(module)}
    return {"warnings": [str(w.message) for w in caught], "parameters": parameters(module)}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("node", {"every_n_steps": 4}),
        ("daso", {**CYCLING, "global_every": 4, "wait": 2}),
        ("daso", {**CYCLING, "wire": "bf16", "wait": 4}),
        ("daso", {"warmup": 12, "cooldown": 0}),
    ],
)
def test_a_replica_that_is_not_finite_is_found_before_it_spreads(name: str, options: dict[str, Any]) -> None:
    results = run(_explode, 3, name, nodes=NODES, **options)
    for result in results:
        assert "replica 1 (ranks [2]) holds values that are not finite" in result["error"]
        assert "'net.0.weight'" in result["error"]
        assert "of rank 2 at step 6" in result["error"]
        assert "on_nan='skip'" in result["error"]
    assert results[0]["parameters"].isfinite().all()
    assert torch.equal(results[0]["parameters"], results[1]["parameters"])
    assert not results[2]["parameters"].isfinite().all()


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("node", {"every_n_steps": 4}),
        ("node", {"every_n_steps": 4, "average_optimizer_state": True}),
        ("daso", {**CYCLING, "global_every": 4, "wait": 2}),
        ("daso", {**CYCLING, "mixing": "daso", "wire": "bf16"}),
    ],
)
def test_with_skip_it_is_left_out_and_goes_on_with_the_others(name: str, options: dict[str, Any]) -> None:
    results = run(_explode, 3, name, on_nan="skip", nodes=NODES, **options)
    for result in results:
        assert result["parameters"].isfinite().all()
        assert torch.equal(result["parameters"], results[0]["parameters"])
    [told] = [text for text in results[0]["warnings"] if "was left out" in text]
    assert "Replica 1 (ranks [2]) was left out of the average after step" in told


class AllExplode(Explodes):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return Net.training_step(self, batch, batch_idx) * float("nan")


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
