"""`hetero_diloco` in fragments, with exchanges under way, when a replica is lost."""

import os
import signal
import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from events import ROWS, Model, Record, fit
from ranks import attempt
from tasks import dataset
from torch.utils.data import DataLoader

LOST = 7  # steps that rank 2 takes


class UnequalProgress(pl.Callback):
    """Rank 0 gets as far as it can before rank 2 is killed; rank 1 stays at the step of rank 2."""

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
        self.under_way[trainer.global_step] = [pending.fragment for pending in averager.pending]
        if trainer.world_size == 3:
            self.at.append(trainer.global_step)


def _fit(options: dict[str, Any]) -> tuple[Record, UnequalProgress]:
    progress, model = UnequalProgress(), Model(ROWS["hetero_diloco"], scheduled=False)
    options = {"on_peer_loss": "continue", "balance": "off", **options}
    data = DataLoader(dataset(192), batch_size=4, shuffle=True)  # no epoch ends before the loss
    return fit("hetero_diloco", progress, model=model, data=data, options=options), progress


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
    (first, ahead), (second, behind) = (outcome.value for outcome in outcomes[:2])
    assert torch.equal(first.weights, second.weights)
    last = max(ahead.centers)
    after = range(max(ahead.at) + 1, last + 1)
    assert all(torch.equal(ahead.centers[step], behind.centers[step]) for step in after)
    assert all(ahead.under_way[step] == behind.under_way[step] for step in after)
    assert any(ahead.under_way[step] for step in after) == bool(options.get("delay"))
    assert not torch.equal(ahead.centers[after[0]], ahead.centers[last])  # they still exchange
    dropped = [text for text in first.messages if "exchanges under way, which are dropped" in text]
    assert len(dropped) == bool(options.get("delay"))
    assert not any("exchanges under way" in text for text in second.messages)
    assert any("starts over: " in text and "error feedback" in text for text in first.messages) == ("wire" in options)
    if options.get("delay"):
        assert max(ahead.at) > max(behind.at) + 1
