"""Optimizers with `train()` and `eval()`, such as those of schedulefree: under hetero_ddp as in one process."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry
from oracles import oracle
from ranks import attempt, run
from tasks import FAST, Net, dataset, error, fit, parameters
from torch.utils.data import DataLoader

from lightning_hetero import AutoStrategy, NodeAverageStrategy
from lightning_hetero.errors import UnsupportedError


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al. 2024), with the interface of the package `schedulefree`."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def _move(self, train: bool) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if group["train_mode"] != train and "z" in self.state[p]:
                    p.data.lerp_(self.state[p]["z"], 1 - group["beta"] if train else 1 - 1 / group["beta"])
            group["train_mode"] = train

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)

    def step(self, closure: Any = None) -> Any:
        assert all(group["train_mode"] for group in self.param_groups)
        with torch.enable_grad():
            loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                group["k"] += 1
                for p in group["params"]:
                    z = self.state[p].setdefault("z", p.detach().clone())
                    p.lerp_(z, 1 / group["k"])
                    p.sub_(p.grad, alpha=group["lr"] * (1 - group["beta"] * (1 - 1 / group["k"])))
                    z.sub_(p.grad, alpha=group["lr"])
        return loss


class Free(Net):
    def configure_optimizers(self) -> Any:
        return ScheduleFree(self.parameters(), 0.05)

    def on_train_epoch_start(self) -> None:
        self.optimizers().optimizer.train()

    def on_train_epoch_end(self) -> None:
        self.optimizers().optimizer.eval()


def test_under_hetero_ddp_it_is_that_of_one_process() -> None:
    truth = parameters(oracle(Free, 12))
    for result in run(fit, 2, Free, 12, strategy={"balance": [3.0, 1.0]}):
        assert error(result["parameters"], truth) <= 1e-10


def _where_replicas_differ(string: str) -> None:
    entry = StrategyRegistry[string]
    options = {"ranks_per_node": 1} if string in ("hetero_node", "hetero_daso") else {}
    trainer = pl.Trainer(
        strategy=entry["strategy"](**{**entry["init_params"], **options}), devices=2, max_epochs=1, **FAST
    )
    trainer.fit(Free(), DataLoader(dataset(48), batch_size=4))


@pytest.mark.parametrize(
    "string",
    ["hetero_node", *(pytest.param(f"hetero_{name}", marks=pytest.mark.long) for name in ("daso", "easgd", "gossip"))],
)
def test_where_replicas_differ_it_is_refused(string: str) -> None:
    for outcome in attempt(_where_replicas_differ, 2, string):
        assert isinstance(outcome.error, UnsupportedError), outcome.trace
        assert "ScheduleFree has `train()` and `eval()`" in str(outcome.error)
        assert "Use hetero_ddp" in str(outcome.error)


def _one_replica_or_auto() -> list[torch.Tensor]:
    auto = AutoStrategy(measure=2, every=2)
    results = [fit(Free, 12, strategy_class=NodeAverageStrategy)["parameters"]]
    module = Free()
    trainer = pl.Trainer(strategy=auto, devices=2, **{**FAST, "max_epochs": 2})
    trainer.fit(module, DataLoader(dataset(96), batch_size=4))
    assert auto.chosen is None
    return [*results, parameters(module)]


def test_one_replica_is_no_reason_to_refuse() -> None:
    truth = parameters(oracle(Free, 12))
    first, second = run(_one_replica_or_auto, 2, nodes=[2], timeout=45.0)
    for result in (first, second):
        assert error(result[0], truth) <= 1e-10
    assert torch.equal(first[1], second[1])
