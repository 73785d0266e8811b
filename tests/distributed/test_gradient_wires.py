"""Gradients of `hetero_ddp` on low-bit wires and as matrices of low rank, against loops by hand in NumPy."""

import os
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from oracles import Order, order, split
from ranks import run
from tasks import FAST, parameters
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.comm import gradients as gradient_module
from lightning_hetero.comm.compression import encoding_of

SAMPLES, BATCH, LR, MOMENTUM = 96, 12, 0.02, 0.5
SHARES = {2: [2.0, 1.0], 3: [3.0, 2.0, 1.0]}
SHAPES = [(7, 9), (7,), (6, 7), (6,)]  # of two layers without anything between them
FULL = 40  # values of a bundle: the second layer, and the first


def data() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(5)
    x = draw.normal(size=(SAMPLES, 9)) * np.linspace(0.5, 1.5, 9)
    return x, x @ draw.normal(size=(9, 6)) + 0.5 * draw.normal(size=(SAMPLES, 6))


def start() -> list[np.ndarray]:
    draw = np.random.default_rng(6)
    return [0.3 * draw.normal(size=shape) for shape in SHAPES]


class Layers(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ParameterList(torch.tensor(value) for value in start())

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = batch
        a, b, c, d = self.values
        return nn.functional.mse_loss((x @ a.T + b) @ c.T + d, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR, momentum=MOMENTUM)


def gradients(values: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """Of the mean squared error, by the chain rule."""
    a, b, c, d = values
    hidden = x @ a.T + b
    error = 2 * (hidden @ c.T + d - y) / y.size
    back = error @ c
    return [back.T @ x, back.sum(0), error.T @ hidden, error.sum(0)]


class Encoded:
    """Error feedback with an encoder: two replicas exchange messages; more sum parts, and encode the sums again."""

    def __init__(self, wire: str, world: int, sizes: list[int], feedback: bool) -> None:
        self.wire, self.world, self.feedback = wire, world, feedback
        self.sent = [[np.zeros(size, np.float32) for _ in range(world)] for size in sizes]
        self.summed = [[np.zeros(-(-size // world), np.float32) for _ in range(world)] for size in sizes]

    def through(self, residual: np.ndarray, *values: np.ndarray) -> np.ndarray:
        """Sum of a residual and some values as it arrives, added in this order: sums in fp32 depend on it."""
        whole = torch.tensor(sum(values, residual * np.float32(self.feedback)))
        encoding, out = encoding_of(self.wire), torch.zeros_like(whole)
        message = torch.empty(encoding.bytes(len(whole)), dtype=torch.uint8)
        encoding.encode(whole, message)
        encoding.add(message, out)
        residual[:] = whole.numpy()
        return out.numpy()

    def mean(self, bundle: int, own: list[np.ndarray]) -> np.ndarray:
        own = [values.astype(np.float32) / np.float32(self.world) for values in own]
        sent, summed = self.sent[bundle], self.summed[bundle]
        if self.world == 2:
            return sum(self.through(residual, values) for values, residual in zip(own, sent, strict=True))
        length, size = len(summed[0]), len(own[0])
        edges = [slice(i * length, min((i + 1) * length, size)) for i in range(self.world)]
        parts = []
        for edge, residual in zip(edges, summed, strict=True):
            width = edge.stop - edge.start
            arrived = [self.part(values[edge], left[edge], length) for values, left in zip(own, sent, strict=True)]
            parts.append(self.through(residual, *arrived)[:width])
        return np.concatenate(parts)

    def part(self, values: np.ndarray, residual: np.ndarray, length: int) -> np.ndarray:
        """A part as it arrives; it is filled up with zeros before the wire."""
        more = (0, length - len(values))
        left = np.pad(residual, more)
        arrived = self.through(left, np.pad(values, more))
        residual[:] = left[: len(values)]
        return arrived


class LowRank:
    """PowerSGD as its paper writes it, with matrices of the layers' weights; biases are averaged."""

    def __init__(self, wire: str, world: int, _: list[int], feedback: bool) -> None:
        self.rank, self.world, self.feedback = int(wire.partition(":")[2]), world, feedback
        self.left = [[np.zeros(shape) for _ in range(world)] for shape in (SHAPES[2], SHAPES[0])]
        self.q = []
        for bundle, shape in enumerate((SHAPES[2], SHAPES[0])):
            generator = torch.Generator().manual_seed(bundle)
            draw = torch.randn(shape[1], self.rank, generator=generator, dtype=torch.float64)
            self.q.append(draw.numpy())

    def mean(self, bundle: int, own: list[np.ndarray]) -> np.ndarray:
        rows, columns = self.left[bundle][0].shape
        matrices = [values[rows:].reshape(rows, columns) for values in own]  # the bias comes first
        matrices = [m + left * self.feedback for m, left in zip(matrices, self.left[bundle], strict=True)]
        p, _ = np.linalg.qr(sum(m @ self.q[bundle] for m in matrices) / self.world)
        self.left[bundle] = [m - p @ (m.T @ p).T for m in matrices]
        self.q[bundle] = sum(m.T @ p for m in matrices) / self.world
        bias = sum(values[:rows] for values in own) / self.world
        return np.concatenate([bias, (p @ self.q[bundle].T).ravel()])


def by_hand(wire: str, world: int, windows: int, epochs: int, feedback: bool = True) -> np.ndarray:
    """SGD with momentum on the means, with `windows` batches to a step."""
    values, (x, y) = start(), data()
    sizes = [6 + 6 * 7, 7 + 7 * 9]
    kind = (LowRank if wire.startswith("powersgd") else Encoded)(wire, world, sizes, feedback)
    speed = [np.zeros(shape) for shape in SHAPES]
    for step in range(epochs * SAMPLES // BATCH // windows):
        own = [[np.zeros(shape) for shape in SHAPES] for _ in range(world)]
        for batch in range(step * windows, (step + 1) * windows):
            epoch, number = divmod(batch, SAMPLES // BATCH)
            rows, first = order(epoch, SAMPLES)[BATCH * number : BATCH * (number + 1)], 0
            for rank, part in enumerate(split(BATCH, SHARES[world])):
                mine, first = rows[first : first + part], first + part
                weight = world * part / BATCH / windows
                for sum_, gradient in zip(own[rank], gradients(values, x[mine], y[mine]), strict=True):
                    sum_ += weight * gradient
        means: list[Any] = [None] * 4
        for bundle, (bias, matrix) in enumerate(((3, 2), (1, 0))):
            mean = kind.mean(bundle, [np.concatenate([g[bias], g[matrix].ravel()]) for g in own])
            means[bias], means[matrix] = mean[: len(values[bias])], mean[len(values[bias]) :].reshape(SHAPES[matrix])
        for value, mean, moved in zip(values, means, speed, strict=True):
            moved *= MOMENTUM
            moved += mean
            value -= LR * moved
    return np.concatenate([value.ravel() for value in values])


def _fits(cases: list[tuple[str, int, int]]) -> list[torch.Tensor]:
    gradient_module.FULL = FULL
    found = []
    for wire, windows, epochs in cases:
        module = Layers()
        shares = SHARES[int(os.environ["WORLD_SIZE"])]
        strategy = HeteroDDPStrategy(wire=wire, balance=shares, global_batch_size=BATCH, timeout=60)
        options = {**FAST, "max_epochs": epochs, "accumulate_grad_batches": windows}
        samples = TensorDataset(*map(torch.tensor, data()))
        pl.Trainer(strategy=strategy, **options).fit(module, DataLoader(samples, batch_size=3, sampler=Order(SAMPLES)))
        found.append(parameters(module))
    return found


CASES = [("int8", 1, 4), ("int4", 1, 4), ("topk:0.25", 1, 4), ("powersgd:1", 1, 4), ("powersgd:2", 1, 4)]
CASES += [("int4", 2, 4), ("powersgd:2", 2, 4)]


@pytest.mark.long(after=1)
@pytest.mark.parametrize("world", [2, 3])
def test_against_a_loop_by_hand(world: int) -> None:
    results = run(_fits, world, CASES)
    for number, case in enumerate(CASES):
        wire, windows, epochs = case
        for others in results[1:]:
            assert torch.equal(others[number], results[0][number]), case
        found, truth = results[0][number].double().numpy(), by_hand(wire, world, windows, epochs)
        assert np.abs(found - truth).max() <= 1e-10, case
        assert np.abs(by_hand(wire, world, windows, epochs, feedback=False) - truth).max() > 1e-3, case
