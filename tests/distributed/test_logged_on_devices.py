"""Logging with ``sync_dist=True`` where NCCL connects all ranks, by a fake one: the same means as over gloo."""

import math
import os
import warnings
from typing import Any

import fake_nccl
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from ranks import attempt, run
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.comm.collectives import Collectives
from lightning_hetero.errors import DisagreementError


class Logs(Net):
    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind, self.found = kind, list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        rank = int(os.environ["RANK"])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("given", loss * 2, sync_dist=True, batch_size=0 if self.kind == "none" else 1 + rank)
        self.log("most", loss, sync_dist=True, reduce_fx="max")
        self.log("whole", float(rank), sync_dist=True)
        if self.kind == "other" and batch_idx == 2:
            self.log(f"of rank {rank}", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.found.append({name: value.item() for name, value in self.trainer.callback_metrics.items()})


def fit(kind: str = "", cards: bool = True) -> tuple[list[dict[str, float]], int, list[str]]:
    """The logged values, the number of means over the devices, and the warnings."""
    warnings.filterwarnings("ignore", "Ranks .* share ")
    if cards:
        fake_nccl.install()
    means, usual = 0, Collectives._mean_on_devices

    def counted(*args: Any) -> torch.Tensor:
        nonlocal means
        means += 1
        return usual(*args)

    Collectives._mean_on_devices = counted  # type: ignore[method-assign]
    strategy = HeteroDDPStrategy(balance=[3.0, 1.0], timeout=60, within="gloo")
    module = Logs(kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pl.Trainer(strategy=strategy, max_epochs=1, **FAST).fit(module, DataLoader(dataset(48), batch_size=4))
    dist.barrier()
    return module.found, means, [str(one.message) for one in caught]


def test_means_are_those_of_gloo() -> None:
    hosts, cards = run(fit, 2, cards=False), run(fit, 2)
    for (own, none, _), (theirs, means, warned) in zip(hosts, cards, strict=True):
        assert none == 0
        assert means == 6 * 3  # but not what is no mean
        assert not any("training_step calls" in text for text in warned)
        assert len(own) == len(theirs) == 6
        for one, other in zip(own, theirs, strict=True):
            assert one == pytest.approx(other, rel=1e-12)
            assert all(map(math.isfinite, other.values()))


def test_a_mean_of_nothing_is_explained() -> None:
    (found, _, warned), (others, *_) = run(fit, 2, "none")
    assert math.isnan(found[-1]["given"])
    assert math.isnan(others[-1]["given"])
    assert sum("its batch_size was 0 throughout" in text for text in warned) == 1


def test_ranks_that_log_different_values_learn_of_it_a_step_later() -> None:
    for outcome in attempt(fit, 2, "other"):
        assert isinstance(outcome.error, DisagreementError), outcome.trace
        assert "different collectives" in str(outcome.error)
