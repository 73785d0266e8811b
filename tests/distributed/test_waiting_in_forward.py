"""Collectives in a forward pass are waiting, not work: shares follow the ranks' own speeds all the same."""

import functools
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from tasks import Net, dataset, train
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from virtual_time import VirtualTime, virtual_time

from lightning_hetero import HeteroDDPStrategy

FIXED, PER_SAMPLE = 0.010, (0.002, 0.008)  # seconds; seconds per sample of each rank
BATCH, BEST, STEPS = 32, (25, 7), 24  # the split with which both ranks take the same time


class Meeting:
    """Lets collectives that the model calls end at the time of the slowest rank, by virtual clocks."""

    clock: VirtualTime
    open = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.open = True
        try:
            yield
        finally:
            self.open = False

    def ending_together(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        all_reduce = dist.all_reduce

        @functools.wraps(collective)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = collective(*args, **kwargs)
            if self.open:
                latest = torch.tensor(self.clock.now, dtype=torch.float64)
                all_reduce(latest, op=dist.ReduceOp.MAX)
                self.clock.now = latest.item()
            return result

        return call


meeting = Meeting()


class OverAll(torch.autograd.Function):
    """Makes the calls of PyTorch's SyncBatchNorm, which does not run on CPUs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        rows = [torch.empty(2, dtype=x.dtype) for _ in range(dist.get_world_size())]
        with meeting():
            dist.all_gather(
                rows, torch.stack([x.sum().detach(), x.new_tensor(len(x))]), dist.group.WORLD, async_op=False
            )
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with meeting():
            dist.all_reduce(gradient.sum(), dist.ReduceOp.SUM, dist.group.WORLD, async_op=False)
        return gradient


class Slow(Net):
    """Works in its forward pass, and meets other ranks at its end."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.shares = way, list[int]()
        self.metric = MeanMetric(dist_sync_on_step=True)
        self.over_all = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(FIXED / 2 + PER_SAMPLE[self.global_rank] * len(batch[0]) / 2)
        if self.way == "batch norm":
            batch = [OverAll.apply(batch[0] * self.over_all), *batch[1:]]
        loss = super().training_step(batch, batch_idx)
        with meeting():
            if self.way == "all_gather":
                self.all_gather(loss.detach())
            elif self.way == "metric":
                self.metric(loss.detach())
            elif self.way == "raw":
                dist.all_reduce(loss.detach().clone())
            elif self.way == "reduce":
                self.trainer.strategy.reduce(loss.detach())
        time.sleep(FIXED / 2 + PER_SAMPLE[self.global_rank] * len(batch[0]) / 2)
        self.shares.append(len(batch[0]))
        return loss + 0 * self.over_all.sum()


def _shares(way: str) -> list[int]:
    with virtual_time(sys.modules[__name__]) as clock, pytest.MonkeyPatch.context() as patch:
        meeting.clock = clock
        for name in ("all_gather", "all_reduce", "barrier"):
            patch.setattr(dist, name, meeting.ending_together(getattr(dist, name)))
        module = Slow(way)
        strategy = HeteroDDPStrategy(global_batch_size=BATCH, rebalance_every_n_steps=4, timeout=60)
        data = DataLoader(dataset(64 * 20), batch_size=16, shuffle=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*normalised over")  # it is only a step's collective
            train(module, strategy, data, max_steps=STEPS, max_epochs=-1)
    return module.shares


@pytest.mark.parametrize(
    "way",
    [
        "batch norm",
        "metric",
        pytest.param("all_gather", marks=pytest.mark.long),
        pytest.param("reduce", marks=pytest.mark.long),
        pytest.param("raw", marks=pytest.mark.long),
        pytest.param("nothing", marks=pytest.mark.long),
    ],
)
def test_shares_follow_the_ranks_own_speeds(way: str) -> None:
    steps = list(zip(*run(_shares, 2, way), strict=True))
    assert steps[0] == (16, 16)
    assert abs(steps[-1][0] - BEST[0]) <= 1, steps
