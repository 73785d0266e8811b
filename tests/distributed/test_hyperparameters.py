"""Ranks that average gradients must have the same hyperparameters; replicas need not."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import attempt, run
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader

from lightning_hetero import DiLoCoStrategy, HeteroDDPStrategy, NodeAverageStrategy
from lightning_hetero.errors import DisagreementError


class OwnSetting(pl.Callback):
    """Sets a hyperparameter to a value of its own on each rank."""

    def __init__(self, name: str, values: list[Any], by_node: bool = False) -> None:
        self.name, self.values, self.by_node = name, values, by_node

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 5:
            rank = trainer.node_rank if self.by_node else trainer.global_rank
            trainer.optimizers[0].param_groups[0][self.name] = self.values[rank]


class Optimized(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW if self.optimizer == "adamw" else torch.optim.SGD
        return kind(self.net.parameters(), lr=0.01)


def _fit(strategy: Any, *setting: Any) -> float:
    module = Optimized("adamw" if setting[0] == "betas" else "sgd")
    options = {**FAST, "max_epochs": 2, "callbacks": [OwnSetting(*setting)]}
    pl.Trainer(strategy=strategy, **options).fit(module, DataLoader(dataset(64), batch_size=4))
    return module.net[0].weight.sum().item()


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("lr", [0.1, 1e-8], ["rank 0: 0.1", "rank 1: 1e-08"]),
        ("momentum", [0.5, 0.75], ["momentum", "rank 0: 0.5", "rank 1: 0.75"]),
        ("weight_decay", [torch.tensor(0.25), torch.tensor(0.5)], ["rank 0: 0.25", "rank 1: 0.5"]),
        ("betas", [(0.9, 0.99), (0.9, 0.9)], ["betas[1]", "rank 0: 0.99", "rank 1: 0.9"]),
    ],
)
def test_ranks_of_a_replica_differ(name: str, values: list[Any], told: list[str]) -> None:
    for outcome in attempt(_fit, 2, HeteroDDPStrategy(), name, values):
        assert isinstance(outcome.error, DisagreementError), outcome.trace
        assert all(part in str(outcome.error) for part in told), outcome.error


def test_ranks_of_one_replica_among_others_differ() -> None:
    outcomes = attempt(_fit, 4, NodeAverageStrategy(every_n_steps=2), "lr", [0.1, 0.1, 0.1, 0.2], nodes=[2, 2])
    for outcome in outcomes[2:]:
        assert isinstance(outcome.error, DisagreementError), outcome.trace
        assert "rank 2: 0.1, rank 3: 0.2" in str(outcome.error)
    assert all(outcome.error is not None for outcome in outcomes)


def test_replicas_may_differ() -> None:
    assert all(run(_fit, 2, DiLoCoStrategy(tau=2), "lr", [0.1, 0.2]))
    assert all(run(_fit, 2, HeteroDDPStrategy(), "lr", [0.1, 0.1 * (1 + 1e-12)]))  # as unlike machines compute
