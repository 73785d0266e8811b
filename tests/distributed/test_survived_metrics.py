"""A rank is killed before or while torchmetrics objects are synchronised: the others get the value of their samples."""

import os
import signal
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from ranks import attempt
from tasks import FAST, EvaluatedNet, dataset
from torch.utils.data import DataLoader

from lightning_hetero import GossipStrategy, HeteroDDPStrategy

VALIDATED = 24


class Measured(EvaluatedNet):
    """Validates with a metric of two states, and keeps its own inputs."""

    def __init__(self, dies: str) -> None:
        super().__init__()
        self.error = torchmetrics.MeanMetric()
        self.collection = torchmetrics.MetricCollection({"error2": torchmetrics.MeanMetric()})
        self.dies = dies
        self.own: list[list[float]] = []
        self.values: list[tuple[float, float]] = []

    def on_validation_epoch_start(self) -> None:
        self.own.append([])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        losses = (self.net(batch[0]) - batch[1]).square().flatten()
        self.own[-1] += losses.tolist()
        self.error.update(losses)
        self.collection.update(losses)
        self.log("error", self.error)
        self.log_dict(self.collection)
        if self.dies == "between batches" and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_validation_end(self) -> None:
        metrics = self.trainer.callback_metrics
        self.values.append((metrics["error"].item(), metrics["error2"].item()))


def _dies_between_states() -> None:
    gather, calls = torchmetrics.metric.gather_all_tensors, 0

    def second_time(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(*args, **kwargs)

    torchmetrics.metric.gather_all_tensors = second_time


def _fit(kind: Any, dies: str) -> Any:
    module = Measured(dies if os.environ["RANK"] == "1" else "")
    if module.dies == "between states":
        _dies_between_states()
    strategy = kind(on_peer_loss="continue", timeout=60)
    trainer = pl.Trainer(strategy=strategy, max_epochs=2, num_sanity_val_steps=0, **FAST)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Training goes on")
        trainer.fit(module, DataLoader(dataset(96), batch_size=4), DataLoader(dataset(VALIDATED), batch_size=4))
    left = [name for name in ("error", "collection") for m in getattr(module, name).modules() if "sync" in vars(m)]
    return module.own, module.values, list(strategy.recovery.losses[0].lost), left


@pytest.mark.parametrize("dies", ["between batches", "between states"])
@pytest.mark.parametrize("kind", [HeteroDDPStrategy, GossipStrategy])
def test_the_value_is_that_of_the_ranks_that_remain(kind: Any, dies: str) -> None:
    outcomes = attempt(_fit, 3, kind, dies, nodes=[1, 1, 1], timeout=60)
    assert outcomes[1].exitcode == -signal.SIGKILL
    first, last = outcomes[0].value, outcomes[2].value
    assert first, outcomes[0].trace
    assert last, outcomes[2].trace
    for number in range(2):
        losses = torch.tensor([*first[0][number], *last[0][number]])
        for values in (first[1][number], last[1][number]):
            assert values == pytest.approx([losses.mean().item()] * 2, rel=1e-5)
    assert len(losses) == VALIDATED
    assert first[2:] == last[2:] == ([1], [])
