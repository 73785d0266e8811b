"""`hetero_diloco` in fragments, with exchanges under way, when a replica is lost."""

import logging
import os
import signal
import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import attempt
from tasks import FAST
from test_survival import Module, Numbered
from torch.utils.data import DataLoader

from lightning_hetero import DiLoCoStrategy

LOST = 7  # steps that rank 2 takes


class Apart(pl.Callback):
    """Rank 0 gets as far as it can before rank 2 is killed, and rank 1 is still at the step at which rank 2 was."""

    def __init__(self) -> None:
        self.centers: dict[int, torch.Tensor] = {}
        self.under_way: dict[int, list[int]] = {}
        self.at: list[int] = []

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.rank = trainer.global_rank

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == LOST and trainer.world_size == 3:
            time.sleep([0.0, 1.2, 0.8][self.rank])
            if self.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        averager: Any = trainer.strategy.averager  # type: ignore[attr-defined]
        self.centers[trainer.global_step] = torch.cat([part.clone() for part in averager.center])
        self.under_way[trainer.global_step] = list(averager._sent)
        if trainer.world_size == 3:
            self.at.append(trainer.global_step)


def _fit(options: dict[str, Any]) -> Any:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_hetero").addHandler(handler)
    module, apart = Module(), Apart()
    strategy = DiLoCoStrategy(on_peer_loss="continue", balance="off", timeout=60, **options)
    trainer = pl.Trainer(strategy=strategy, callbacks=[apart], **{**FAST, "max_epochs": 2})
    trainer.fit(module, DataLoader(Numbered(), batch_size=2, shuffle=True))
    weights = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    return weights, apart.centers, apart.under_way, max(apart.at), said


LONG = pytest.mark.long
OPTIONS: list[Any] = [
    {"tau": 6, "fragments": 2, "delay": 4, "blend": 0.5, "wire": "int8"},
    pytest.param({"tau": 6, "delay": 4}, marks=LONG),
    pytest.param({"tau": "auto", "tau_max": 8, "fragments": 2, "delay": 4, "blend": 0.5}, marks=LONG),
    pytest.param({"tau": 3, "fragments": 2}, marks=LONG),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_replicas_that_remain_are_alike(options: dict[str, Any]) -> None:
    outcomes = attempt(_fit, 3, options, nodes=[1, 1, 1])
    assert outcomes[2].exitcode == -signal.SIGKILL
    assert all(outcome.value for outcome in outcomes[:2]), "\n".join(outcome.trace for outcome in outcomes)
    (first, centers, under_way, ahead, said), (second, others, theirs, behind, quiet) = (o.value for o in outcomes[:2])
    assert torch.equal(first, second)
    last = max(centers)
    after = range(ahead + 1, last + 1)
    assert all(torch.equal(centers[step], others[step]) for step in after)
    assert all(under_way[step] == theirs[step] for step in after)
    assert any(under_way[step] for step in after) == bool(options.get("delay"))
    assert not torch.equal(centers[ahead + 1], centers[last])  # they still exchange
    dropped = [text for text in said if "These are dropped" in text]
    assert len(dropped) == bool(options.get("delay"))
    assert not any("These are dropped" in text for text in quiet)
    assert any("Error feedback begins anew" in text for text in said) == ("wire" in options)
    if options.get("delay"):
        assert ahead > behind + 1
