"""Residuals of gradients on low-bit wires: conserved, in checkpoints, dropped with a warning; and bytes."""

import logging
import math
import signal
import warnings
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from ranks import attempt, run
from tasks import FAST, Killed, Net, Save, dataset, parameters
from test_low_bit import Logged
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.comm import compression, gradients
from lightning_hetero.comm.gradients import EncodedMean, LowRankMean
from lightning_hetero.comm.staging import BufferPool
from lightning_hetero.strategies.replica_ddp import WiredGradients

WIRES = ["int8", "int4", "topk:0.1", "powersgd:2"]
SHAPES = [(40, 30), (40,), (8, 3, 5, 5)]
WIDE = 600
FULL = 200_000  # values of a bundle: several in the wide model, as there are several buckets of a mebibyte


class Wide(Net):
    """Two layers of 360 000 weights among smaller ones."""

    def __init__(self) -> None:
        super().__init__(lr=0.01)
        torch.manual_seed(8)
        widths = [8, WIDE, WIDE, WIDE, 1]
        layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())]
        self.net = nn.Sequential(*layers[:-1]).float()
        self.unused = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)


class BrokenOnce(Wide):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        broken = batch_idx == 2 and self.global_rank == 1
        return loss + (0 * self.net[2].weight.sum()).sqrt() if broken else loss


def _fit(
    wire: str, *callbacks: Any, make: Any = Wide, resume: Any = None, epochs: int = 2, **options: Any
) -> tuple[torch.Tensor, list[str]]:
    gradients.FULL = FULL
    logged, module = Logged(), make()
    options = {"balance": "off", "bucket_cap_mb": 1, "find_unused_parameters": True, "timeout": 60, **options}
    trainer = pl.Trainer(
        strategy=HeteroDDPStrategy(wire=wire, **options), callbacks=[*callbacks], **{**FAST, "max_epochs": epochs}
    )
    samples = dataset(72, torch.float32)
    trainer.fit(module, DataLoader(samples, batch_size=4, shuffle=True), ckpt_path=resume)
    logging.getLogger("lightning_hetero").removeHandler(logged)
    return parameters(module), logged.messages


def _means(steps: int) -> dict[str, tuple[torch.Tensor, ...]]:
    """For each wire: the sum of the means, of all gradients, and of the residuals; with the means of each step."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    group, rank, found = dist.group.WORLD, dist.get_rank(), {}
    length = sum(math.prod(shape) for shape in SHAPES)
    for wire in WIRES:
        if wire.startswith("powersgd"):
            mean: Any = LowRankMean(2, SHAPES, torch.float64, group, seed=3)
        else:
            mean = EncodedMean(wire, length, group, BufferPool())
        dtype = torch.float64 if wire.startswith("powersgd") else torch.float32
        generator = torch.Generator().manual_seed(rank)
        arrived, sent, latest = torch.zeros(2, length, dtype=torch.float64), torch.zeros(length).double(), None
        for _ in range(steps):
            own = 1 + torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)
            sent += own
            mean.take(own)
            arrived, latest = arrived + own, own
        left = mean.state()
        found[wire] = arrived[0], sent, left[0], left[1] if dtype == torch.float32 else left[0][:0], latest
    return found


def test_means_and_residuals_are_the_sum_of_all_gradients() -> None:
    world = 3
    results = run(_means, world, 20)
    for wire in WIRES:
        rows = [result[wire] for result in results]
        assert all(torch.equal(row[0], rows[0][0]) and torch.equal(row[4], rows[0][4]) for row in rows)
        length = len(rows[0][0])
        left = sum(row[2].double() for row in rows) / (world if wire.startswith("powersgd") else 1)
        left = left + torch.cat([row[3].double() for row in rows])[:length] if len(rows[0][3]) else left
        truth = sum(row[1] for row in rows) / world
        off = (rows[0][0] + left - truth).abs().max()
        assert off < (1e-12 if wire.startswith("powersgd") else 1e-4) * truth.abs().max(), wire
        assert left.abs().max() > 1e-3, wire


def _resumed(folder: Path) -> list[tuple[Any, ...]]:
    found = []
    for wire in ("int4", "powersgd:2"):
        path = folder / f"{wire.partition(':')[0]}.ckpt"
        whole, _ = _fit(wire, Save(str(path), 8, False))
        again, nothing = _fit(wire, resume=path)
        dist.barrier()
        stripped = folder / f"stripped-{path.name}"
        if dist.get_rank() == 0:
            checkpoint = torch.load(path, weights_only=True)
            del checkpoint["lightning_hetero"]["gradients"]
            torch.save(checkpoint, stripped)
        dist.barrier()
        without, messages = _fit(wire, resume=stripped)
        found.append((whole, again, nothing, without, messages))
    return found


def test_resuming_in_an_epoch_is_as_if_never_stopped(tmp_path: Path) -> None:
    results = run(_resumed, 3, tmp_path)
    for number in range(2):
        for rank, result in enumerate(results):
            whole, again, nothing, without, messages = result[number]
            assert torch.equal(whole, results[0][number][0])
            assert torch.equal(again, whole)
            assert nothing == []
            assert not torch.equal(without, whole)
            assert len(messages) == (rank == 0)


@pytest.mark.parametrize("wire", ["int4", "powersgd:2"])
def test_residuals_are_dropped_when_a_rank_is_lost(wire: str) -> None:
    outcomes = attempt(_fit, 3, wire, Killed(2, 3), on_peer_loss="continue")
    assert outcomes[2].exitcode == -signal.SIGKILL
    assert all(outcome.value for outcome in outcomes[:2]), "\n".join(outcome.trace for outcome in outcomes)
    (first, messages), (second, nothing) = (outcome.value for outcome in outcomes[:2])
    assert torch.equal(first, second)
    assert ["the ranks or the trainable parameters have changed" in words for words in messages] == [True]
    assert nothing == []


def _broken() -> list[tuple[torch.Tensor, list[str]]]:
    warnings.filterwarnings("ignore", ".*no optimizer steps")
    return [_fit(wire, make=BrokenOnce, epochs=1, on_nan="skip") for wire in ("int4", "powersgd:2")]


def test_a_gradient_that_is_not_finite_leaves_no_trace() -> None:
    results = run(_broken, 2)
    for (first, messages), (second, _) in zip(*results, strict=True):
        assert first.isfinite().all()
        assert torch.equal(first, second)
        assert ["a gradient was not finite" in words for words in messages] == [True]


def _sent(wires: list[str]) -> list[float]:
    """Bytes that this rank sends for gradients in a step, by what it gives to torch.distributed."""
    sent, world, found = 0, 3, []
    isend, gathers, reduces = dist.isend, compression.all_gather, dist.all_reduce
    counts = False

    def counted(function: Any, times: float, place: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal sent
            sent += times * args[place].numel() * args[place].element_size() * (counts and args[place].numel() > 1)
            return function(*args, **kwargs)

        return call

    dist.isend = counted(isend, 1, 0)
    compression.all_gather = counted(gathers, world - 1, 1)
    dist.all_reduce = counted(reduces, 2 * (world - 1) / world, 0)

    class Count(pl.Callback):
        def on_before_zero_grad(self, *_: Any) -> None:
            nonlocal counts
            counts = True

        def on_train_batch_end(self, *_: Any) -> None:
            nonlocal counts
            counts = False

    for wire in wires:
        sent = 0
        _fit(wire, Count(), epochs=1, find_unused_parameters=False, make=OnlyUsed)
        found.append(sent / 6)
    return found


class OnlyUsed(Wide):
    def __init__(self) -> None:
        super().__init__()
        del self.unused


def test_bytes_are_those_of_theory() -> None:
    results = run(_sent, 3, WIRES)
    sizes = [(WIDE, 8), (WIDE,), (WIDE, WIDE), (WIDE,), (WIDE, WIDE), (WIDE,), (1, WIDE), (1,)]
    values = sum(math.prod(size) for size in sizes)
    matrices = [size for size in sizes if len(size) == 2 and 2 * sum(size) < math.prod(size)]
    others = values - sum(math.prod(size) for size in matrices)
    theory = [values * 1.0, values / 2, values * 0.1 * 1.0, 4 * (others + 2 * sum(map(sum, matrices)))]
    for result in results:
        for wire, found, whole in zip(WIRES, result, theory, strict=True):
            assert 1 <= found / (4 / 3 * whole) <= 1.02, wire


def test_what_precision_goes_with_a_wire() -> None:
    scaled: Any = SimpleNamespace(scaler=object())
    assert "another loss scale" in str(WiredGradients("powersgd:4").problem(scaled))
    assert WiredGradients("fp16").problem(scaled) is None
