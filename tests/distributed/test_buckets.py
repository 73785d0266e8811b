"""Gradients travel in buckets that suit the link, while the backward pass goes on, and are summed exactly."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from oracles import oracle
from ranks import run
from tasks import Net, dataset, error, parameters, train
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader

from lightning_hetero import EmulatedSpeed, HeteroDDPStrategy
from lightning_hetero.comm.all_reduce import AllReduceTime, measure_all_reduce

LAYERS, LAYER = 5, 8 * 363 * 363  # bytes: just over a mebibyte


class Deep(Net):
    """Five layers of a mebibyte each."""

    def __init__(self) -> None:
        super().__init__(lr=0.01)
        torch.manual_seed(8)
        blocks = [m for _ in range(LAYERS) for m in (nn.Linear(363, 363, bias=False), nn.Tanh())]
        self.net = nn.Sequential(nn.Linear(8, 363), nn.Tanh(), *blocks, nn.Linear(363, 1)).double()


@contextmanager
def slow_link(seconds_per_byte: float, latency: float = 0.0) -> Iterator[Any]:
    """Let the collective take this long, in the block."""
    real = dist.all_reduce

    def late(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        time.sleep(latency + seconds_per_byte * tensor.numel() * tensor.element_size())
        return real(tensor, *args, **kwargs)

    dist.all_reduce = late
    try:
        yield real
    finally:
        dist.all_reduce = real


def _fit(costs: Any = None, deterministic: bool = False, **strategy: Any) -> dict[str, Any]:
    """Train on two ranks; the sizes of the buckets that this rank sent, step by step, its laps, and its parameters."""
    sent: list[tuple[int, int]] = []
    laps: list[Any] = []
    steps = 0

    def record_size(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent.append((steps, bucket.buffer().numel() * bucket.buffer().element_size()))
        return allreduce_hook(state, bucket)

    class Steps(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
            dist.all_reduce = real  # the hook sends with it as well
            trainer.strategy.accounting.watchers.append(laps.append)  # type: ignore[attr-defined]

        def on_train_batch_end(self, *_: Any) -> None:
            nonlocal steps
            steps += 1

    module, data = Deep(), DataLoader(dataset(60), batch_size=6, shuffle=True)
    chosen = HeteroDDPStrategy(ddp_comm_hook=record_size, timeout=60, **strategy)
    callbacks = [Steps(), *([EmulatedSpeed(costs)] if costs else [])]
    with slow_link(1e-6) as real:  # of 8 Mbit
        train(module, chosen, data, devices=2, callbacks=callbacks, deterministic=deterministic)
    sizes = [[size for _, size in group] for _, group in groupby(sent, key=lambda entry: entry[0])]
    return {"buckets": sizes, "laps": laps, "parameters": parameters(module)}


def test_on_a_slow_link_gradients_travel_layer_by_layer() -> None:
    truth = oracle(Deep, 12, 60, max_epochs=1)
    first, second = run(partial(_fit, balance=[2.0, 1.0]), 2)
    assert first["buckets"] == second["buckets"]
    assert first["buckets"][0] == [sum(first["buckets"][1])]  # PyTorch lays buckets out after the first step
    for sizes in first["buckets"][1:]:
        assert max(sizes) < 1.1 * LAYER
        assert len(sizes) >= LAYERS
    for rank in (first, second):
        assert error(rank["parameters"], parameters(truth)) <= 1e-10


@pytest.mark.parametrize(
    "options", [{"bucket_cap_mb": 4}, {"deterministic": True}], ids=["the user's size", "deterministic algorithms"]
)
def test_no_size_is_chosen_where_the_user_has_a_say(options: dict[str, Any]) -> None:
    for rank in run(partial(_fit, balance="off", **options), 2):
        assert all(max(sizes) >= 3 * LAYER for sizes in rank["buckets"][1:])


@pytest.mark.clock
def test_waiting_for_buckets_is_not_work() -> None:
    fast, slow = run(partial(_fit, [(0.08, 0.0), (0.3, 0.0)], balance="off"), 2)
    work = [[lap.work for lap in rank["laps"][4:]] for rank in (fast, slow)]
    assert min(work[0]) < 0.2  # where a step takes 0.3 s
    assert min(work[1]) > 0.29


def _measure_over_a_slow_link(seconds_per_byte: float, latency: float) -> AllReduceTime:
    dist.init_process_group("gloo")
    with slow_link(seconds_per_byte, latency):
        return measure_all_reduce(None, torch.device("cpu"))


@pytest.mark.clock
@pytest.mark.parametrize(("seconds_per_byte", "latency"), [(1e-7, 0.001), (1e-8, 0.02)])
def test_what_is_measured_is_the_link(seconds_per_byte: float, latency: float) -> None:
    first, second = run(_measure_over_a_slow_link, 2, seconds_per_byte, latency)
    assert first == second
    assert first.seconds_per_byte == pytest.approx(seconds_per_byte, rel=0.5)
    assert latency <= first.latency < latency + 0.02
