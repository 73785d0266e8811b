"""Failures of replicas with a center: one is not finite, one fails, one is told to stop."""

import os
import pickle
import signal
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from center_tasks import APART, STRATEGIES, Line, fit
from oracles import loader
from ranks import attempt, run
from tasks import FAST, Net, dataset, parameters
from torch.utils.data import DataLoader

from lightning_hetero import DASOStrategy
from lightning_hetero.algorithms.engine import nonfinite_message
from lightning_hetero.errors import CommunicationError, NotFiniteError

PULL = {"moving_rate": 0.2, "beta": 0.7, "tau": 2}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("easgd", PULL),
    ("easgd", {**PULL, "wire": "bf16"}),
    ("overlap", PULL),
    ("eamsgd", PULL),
    ("diloco", {"tau": 2}),
    ("diloco", {"tau": 2, "fragments": 2, "delay": 1}),
]


class Explodes(Net):
    """The loss of rank 1 is NaN once, or that of all ranks."""

    def __init__(self, nesterov: bool = False, everywhere: bool = False) -> None:
        super().__init__()
        self.nesterov, self.everywhere = nesterov, everywhere

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        mine = self.everywhere or self.global_rank == 1
        return loss * float("nan") if mine and self.trainer.global_step == 4 else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=self.nesterov)


def _explode(name: str, options: dict[str, Any], everywhere: bool = False) -> dict[str, Any]:
    module = Explodes(name == "eamsgd", everywhere)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = fit(name, module, DataLoader(dataset(96), batch_size=4), epochs=2, **options)
        except NotFiniteError as error:
            return {"error": str(error), "parameters": parameters(module)}
    return {**result, "messages": [str(w.message) for w in caught]}


def _explode_all(**more: Any) -> list[dict[str, Any]]:
    return [_explode(name, {**options, **more}) for name, options in KINDS]


@pytest.mark.long
def test_with_skip_all_go_on_and_the_replica_takes_over_the_center() -> None:
    for results in zip(*run(_explode_all, 3, on_nan="skip", nodes=APART), strict=True):
        for result in results:
            assert result["path"][6:].isfinite().all()
            assert result["centers"].isfinite().all()
            assert torch.equal(result["centers"], results[0]["centers"])
            assert torch.equal(result["final"], results[0]["final"])
        path, centers = results[1]["path"], results[1]["centers"]
        assert not path[4].isfinite().all()
        assert torch.equal(path[5], centers[5])
        [message] = [text for text in results[0]["messages"] if "was left out" in text]
        assert "Replica 1 (ranks [1]) was left out of the average after step 6" in message


@pytest.mark.parametrize("name", ["easgd", "async", "round_robin"])
def test_a_replica_that_takes_over_the_center_has_all_values_again(name: str) -> None:
    results = run(_explode, 3, name, {**PULL, "on_nan": "skip", "exclude": ["*bias"]}, nodes=APART)
    for result in results:
        assert result["path"][8:].isfinite().all()
        assert result["final"].isfinite().all()


@pytest.mark.parametrize(("name", "options"), [("easgd", PULL), ("node", {"every_n_steps": 2})])
def test_nobody_is_left_to_go_on_with(name: str, options: dict[str, Any]) -> None:
    for result in run(_explode, 3, name, {**options, "on_nan": "skip"}, True, nodes=[2, 1]):
        assert ("replica 0 (ranks [0, 1])" if name == "node" else "replica 0 (ranks [0])") in result["error"]
        assert ("replica 1 (ranks [2])" if name == "node" else "replica 2 (ranks [2])") in result["error"]


def test_where_several_replicas_are_not_finite_the_first_is_named_as_the_cause() -> None:
    replicas, fine = [[0], [1], [2]], (None, None)
    one = nonfinite_message([1], replicas, 20, [fine, ("w", 17), fine], "the mean")
    assert "No value that is not finite has reached the others" in one
    several = nonfinite_message([0, 1, 2], replicas, 20, [("w", 18), ("w", 13), ("w", 18)], "the mean")
    assert "has reached the others" not in several
    assert "The loss of rank 1 was the first that was not finite, at step 13" in several


class Far(Net):
    """On rank 1 a weight is far from those of the others, or a buffer is, if there is one."""

    def __init__(self, level: bool) -> None:
        super().__init__()
        if level:
            self.register_buffer("level", torch.zeros(2, dtype=torch.float64))

    def on_train_start(self) -> None:
        with torch.no_grad():
            values = self.level if hasattr(self, "level") else self.net[0].bias
            values.add_(1e6 if self.global_rank == 1 else 0.0)


def _too_far(name: Any, level: bool, options: dict[str, Any]) -> None:
    fit(name, Far(level), DataLoader(dataset(96), batch_size=4), epochs=1, wire="fp16", **options)


CYCLING = {"warmup": 0, "cooldown": 0, "patience": 99}


@pytest.mark.parametrize(("name", "level", "options"), [("easgd", False, PULL), (DASOStrategy, True, CYCLING)])
def test_differences_that_are_too_large_for_the_wire(name: Any, level: bool, options: dict[str, Any]) -> None:
    for outcome in attempt(_too_far, 2, name, level, options, nodes=[1, 1]):
        assert isinstance(outcome.error, NotFiniteError), outcome.trace
        assert "the changes of replica 1 (ranks [1]) are too large for the wire; use 'bf16'" in str(outcome.error)
        assert str(pickle.loads(pickle.dumps(outcome.error))) == str(outcome.error)


# -- failures and signals ------------------------------------------------------------------------------------

HOMES: list[tuple[str, dict[str, Any]]] = [
    ("easgd", PULL),
    ("overlap", PULL),
    ("diloco", {"tau": 2}),
    ("async", {**PULL, "center": "shared_memory"}),
    ("async", {**PULL, "center": "thread"}),
    ("round_robin", PULL),
]


class Dies(Line):
    """The center's host is killed while the others wait for it at the end of the epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 0 and batch_idx == 9:
            time.sleep(1.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def _dies(options: dict[str, Any]) -> None:
    fit("async", Dies(), epochs=1, **options)


@pytest.mark.long(after=1)
@pytest.mark.parametrize(("name", "options"), HOMES[3:5])
def test_ranks_that_wait_at_the_epochs_end_learn_that_the_host_has_died(name: str, options: dict[str, Any]) -> None:
    outcomes = attempt(_dies, 3, options, nodes=APART)
    assert outcomes[0].exitcode == -signal.SIGKILL
    for outcome in outcomes[1:]:
        assert isinstance(outcome.error, CommunicationError), outcome.trace
        assert "rank 0 has ended without an error message" in str(outcome.error)


# -- once more -----------------------------------------------------------------------------------------------


def _twice() -> list[list[Any]]:
    found = []
    for name, options in HOMES:
        module = Line()
        strategy = STRATEGIES[name](balance=[3.0, 1.0, 2.0], global_batch_size=12, **options)
        trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 1})
        trainer.fit(module, loader())
        first = parameters(module)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, loader())
        found.append([first, parameters(module), trainer.global_step])
    return found


@pytest.mark.long
def test_a_second_fit_goes_on() -> None:
    for results in zip(*run(_twice, 3, nodes=APART), strict=True):
        for first, second, steps in results:
            assert steps == 40
            assert torch.equal(first, results[0][0])
            assert torch.equal(second, results[0][1])
            assert not torch.equal(first, second)
