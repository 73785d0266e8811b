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
from tasks import FAST, EvaluatedNet, Net, dataset
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


class LogsSeveral(Net):
    """Logs two values in each step; rank 2 is killed in one, before what it has logged has left it."""

    def __init__(self) -> None:
        super().__init__()
        self.own: dict[int, tuple[int, float, float]] = {}
        self.read: dict[int, tuple[float, float]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        self.log("most", loss, sync_dist=True, reduce_fx="max")
        self.own[batch_idx] = len(batch[0]), loss.item(), self.trainer.world_size
        if self.global_rank == 2 and batch_idx == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        metrics = self.trainer.callback_metrics
        self.read[batch_idx] = metrics["loss"].item(), metrics["most"].item()


def _fit_logging() -> Any:
    module = LogsSeveral()
    strategy = HeteroDDPStrategy(on_peer_loss="continue", balance=[1.0, 2.0, 1.0], timeout=60)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Training goes on")
        pl.Trainer(strategy=strategy, max_epochs=1, **FAST).fit(module, DataLoader(dataset(96), batch_size=4))
    return module.own, module.read


def test_values_of_a_step_in_which_a_rank_is_lost_are_those_of_the_ranks_that_remain() -> None:
    outcomes = attempt(_fit_logging, 3, nodes=[1, 1, 1], timeout=60)
    assert outcomes[2].exitcode == -signal.SIGKILL
    assert None not in (outcomes[0].value, outcomes[1].value), outcomes[0].trace + outcomes[1].trace
    (own, read), (others, also_read) = outcomes[0].value, outcomes[1].value
    assert read == also_read
    assert len(read) == 8
    for step in range(3, 8):
        (n, loss, world), (m, other, _) = own[step], others[step]
        assert world == 2
        assert read[step] == pytest.approx(((n * loss + m * other) / (n + m), max(loss, other)), rel=1e-12)
