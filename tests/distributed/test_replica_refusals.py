"""What goes wrong between replicas: found before it spreads, or refused, on every rank, with what to do."""

import os
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from ranks import attempt, run
from tasks import FAST, Net, dataset, parameters
from torch.utils.data import DataLoader

from lightning_hetero import DASOStrategy, HeteroDDPStrategy, NodeAverageStrategy
from lightning_hetero.engine.not_finite import about
from lightning_hetero.errors import (
    ConfigurationError,
    DisagreementError,
    NotFiniteError,
    UnsupportedError,
)
from lightning_hetero.strategies.guards import precision_problem

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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("node", {"every_n_steps": 4}),
        ("node", {"every_n_steps": 4, "average_optimizer_state": True}),
        ("daso", {**CYCLING, "global_every": 4, "wait": 2}),
        ("daso", {**CYCLING, "mixing": "daso", "wire": "bf16"}),
    ],
)
def test_or_is_left_out_and_goes_on_with_the_others(name: str, options: dict[str, Any]) -> None:
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


# -- options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"global_every": 0}, "global_every=0"),
        ({"wait": 5}, "wait=5"),
        ({"wait": "soon"}, "wait='soon'"),
        ({"max_global_every": 0}, "max_global_every=0"),
        ({"mixing": "mean"}, "mixing='mean' must be one of 'daso', 'delta'"),
        ({"wire": "int8"}, "wire='int8' must be one of 'fp32', 'bf16', 'fp16'"),
        ({"warmup": "soon"}, "warmup='soon'"),
        ({"warmup": -1}, "warmup=-1"),
        ({"cooldown": 1.5}, "cooldown=1.5"),
        ({"schedule_every_n_steps": 0}, "schedule_every_n_steps=0"),
        ({"threshold": 1}, "threshold=1"),
        ({"on_nan": "ignore"}, "on_nan='ignore'"),
        ({"warm_up": 1}, "unknown option"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        DASOStrategy(**options)


def _daso(
    by_rank: dict[str, list[Any]] | None = None, trainer: Any = None, averages_weights: bool = False, **options: Any
) -> None:
    mine = {name: values[int(os.environ["RANK"])] for name, values in (by_rank or {}).items()}
    callbacks = {"callbacks": [EMAWeightAveraging()]} if averages_weights else {}
    _fit(Net(), DASOStrategy(**BASE, **options, **mine), **(trainer or {}), **callbacks)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"warmup": 10, "cooldown": 10}, ConfigurationError, "of 16 optimizer steps"),
        ({"warmup": "1 epoch", "cooldown": "2 epochs"}, ConfigurationError, "of 16 optimizer steps"),
        (
            {"trainer": {"max_epochs": -1, "max_steps": -1}},
            ConfigurationError,
            "length of the run is unknown: give steps",
        ),
        ({"monitor": "val_loss", "warmup": 0}, ConfigurationError, "monitor='val_loss' is NaN, or has not been logged"),
        ({"by_rank": {"wire": ["fp32", "bf16"]}}, DisagreementError, "wire: rank 0: fp32, rank 1: bf16"),
        ({"averages_weights": True}, UnsupportedError, "EMAWeightAveraging averages"),
    ],
)
def test_what_cannot_be_is_said_on_every_rank(options: dict[str, Any], error: type, words: str) -> None:
    for outcome in attempt(_daso, 2, nodes=[1, 1], **options):
        assert isinstance(outcome.error, error), outcome.trace
        assert words in str(outcome.error)


class Logging(Net):
    """Logs a level that rises on one rank as it falls on the other: its mean stays."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[tuple[int, int]] = []

    def on_train_epoch_end(self) -> None:
        schedule = self.trainer.strategy.averager.schedule
        self.rates.append((schedule.every, schedule.wait))
        self.log("level", 10.0 + self.current_epoch * (1 if self.global_rank else -1))


def _monitored() -> list[tuple[int, int]]:
    warnings.filterwarnings("ignore", ".*recommended to use.*sync_dist=True")
    module = Logging()
    strategy = DASOStrategy(**BASE, warmup=0, cooldown=0, patience=1, monitor="level")
    _fit(module, strategy, max_epochs=4)
    return module.rates


def test_the_monitored_metric_is_the_mean_of_all_ranks() -> None:
    for rates in run(_monitored, 2, nodes=[1, 1]):
        assert rates == [(4, 1), (4, 1), (2, 1), (1, 1)]


# -- 16-bit scaling ------------------------------------------------------------------------------------------


def test_16_mixed_over_cpus_and_gpus() -> None:
    cpu, gpu = ("cpu", "bf16-mixed"), ("cuda", "16-mixed")  # as Lightning sets them for precision="16-mixed"
    problem = precision_problem([gpu, cpu], [[0, 1]])
    assert isinstance(problem, UnsupportedError)
    assert "rank 1: cpu in bf16-mixed" in str(problem)
    assert precision_problem([gpu, gpu, cpu], [[0, 1], [2]]) is None  # alike within each replica
    assert precision_problem([("cuda", "bf16-mixed"), cpu], [[0, 1]]) is None


def test_where_several_replicas_are_not_finite_the_first_is_named_as_the_cause() -> None:
    replicas, fine = [[0], [1], [2]], (None, None)
    one = about([1], replicas, 20, [fine, ("w", 17), fine], "the mean")
    assert "No value that is not finite has reached the others" in one
    several = about([0, 1, 2], replicas, 20, [("w", 18), ("w", 13), ("w", 18)], "the mean")
    assert "has reached the others" not in several
    assert "The loss of rank 1 was the first that was not finite, at step 13" in several
