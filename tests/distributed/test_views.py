"""Objects that depend on the members of a job can be made again, from another view, without a trace in training."""

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import run
from tasks import FAST, Net, dataset, parameters
from torch.utils.data import DataLoader

from lightning_hetero import DiLoCoStrategy, GossipStrategy, HeteroDDPStrategy, NodeAverageStrategy
from lightning_hetero.comm.job import Job

BASE: dict[str, Any] = {"balance": [2.0, 1.0], "global_batch_size": 12}


def _fits(kind: Any, options: dict[str, Any], again: bool) -> torch.Tensor:
    module, strategy = Net(), kind(**BASE, **options)
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 1})
    for epochs in (1, 2):
        if epochs == 2 and again:
            before = strategy.accounting, strategy.engine
            strategy.build(Job(replace(strategy.job.view, number=1), strategy.job.timeout))
            assert strategy.job.view.number == 1
            assert strategy.accounting is not before[0]
            assert strategy.engine is not before[1]
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, DataLoader(dataset(96), batch_size=6, shuffle=True))
    return parameters(module)


def _both(kind: Any, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return _fits(kind, options, False), _fits(kind, options, True)


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (HeteroDDPStrategy, {}),
        (NodeAverageStrategy, {"every_n_steps": 3}),
        (DiLoCoStrategy, {"tau": 3}),
        (GossipStrategy, {}),
    ],
)
def test_everything_can_be_made_again_from_another_view(kind: Any, options: dict[str, Any]) -> None:
    for kept, made_again in run(_both, 2, kind, options, nodes=[1, 1]):
        assert torch.equal(kept, made_again)
