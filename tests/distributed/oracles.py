"""References for training: loops in NumPy that share nothing with the package, and Lightning in one process."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from tasks import FAST, dataset
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset

NODES, SPEEDS, BATCH = [2, 2], [5.0, 2.0, 3.0, 2.0], 12  # ranks per node; shares of the ranks; samples of them all
SAMPLES, EPOCHS, LR, MOMENTUM = 235, 7, 0.01, 0.9  # 20 batches an epoch, of which the last has 7 samples; 140 steps
START = np.linspace(-1.0, 1.0, 8)


def data(samples: int = SAMPLES) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(5)
    x = draw.normal(size=(samples, 8)) * np.linspace(0.5, 1.5, 8)
    return x, x @ draw.normal(size=8) + 0.5 * draw.normal(size=samples)


def order(epoch: int, samples: int) -> np.ndarray:
    return np.random.default_rng(epoch).permutation(samples)


class Order(Sampler):
    def __init__(self, samples: int) -> None:
        self.samples, self.epoch = samples, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Any:
        return iter(order(self.epoch, self.samples).tolist())


def loader(samples: int = SAMPLES, dtype: torch.dtype = torch.float64) -> DataLoader:
    x, y = (torch.tensor(part, dtype=dtype) for part in data(samples))
    return DataLoader(TensorDataset(x, y), batch_size=3, sampler=Order(samples))


# -- one process ----------------------------------------------------------------------------------------------


def oracle(
    make: Callable[[], pl.LightningModule],
    batch_size: int,
    samples: int = 101,
    dtype: torch.dtype = torch.float64,
    drop_last: bool = False,
    **trainer: Any,
) -> pl.LightningModule:
    """Train in one Lightning process on the whole batch, in the order that the ranks share."""
    data, module = dataset(samples, dtype), make()
    order = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)
    loader = DataLoader(data, batch_size=batch_size, sampler=order, drop_last=drop_last)
    pl.Trainer(devices=1, **{**FAST, "max_epochs": 3, **trainer}).fit(module, loader)
    return module


# -- hetero_daso in NumPy -------------------------------------------------------------------------------------


class Course(NamedTuple):
    """Record of a run in NumPy: every node's weights, B and W after each step; the steps at which exchanges began."""

    weights: np.ndarray
    rates: list[tuple[int, int]]
    begun: list[int]


def split(size: int, speeds: list[float]) -> list[int]:
    """Samples of each rank: one at a time goes to the rank that would finish it first."""
    parts = [0] * len(speeds)
    for _ in range(size):
        first = min(range(len(speeds)), key=lambda i: ((parts[i] + 1) / speeds[i], i))
        parts[first] += 1
    return parts


def in_turn(size: int, speeds: list[float], turn: int) -> list[int]:
    """Samples of each rank by speeds without a fixed part; the remainder goes to the ranks in turn."""
    exact = size * np.array(speeds) / sum(speeds)
    whole, offset = np.floor(exact + 1e-9), (turn + 1) * (5**0.5 - 1) / 2 % 1
    points = np.floor(np.cumsum(exact - whole) + offset + 1e-9)
    return [int(n) for n in whole + np.diff(points, prepend=0.0)]


def in_numpy(
    mixing: str,
    global_every: int,
    wait: int,
    warmup: int,
    cooldown: int,
    max_global_every: int = 8,
    patience: int = 2,
    threshold: float = 0.05,
    schedule_every_n_steps: int | None = None,
    *,
    nodes: list[int] = NODES,
    speeds: list[float] = SPEEDS,
    epochs: int = EPOCHS,
    samples: int = SAMPLES,
    start: np.ndarray = START,
    trainable: Any = 1.0,
    lr: float = LR,
    momentum: float = MOMENTUM,
    mutant: str = "",
) -> Course:
    x, y = data(samples)
    count, batches = len(nodes), -(-samples // BATCH)
    total = epochs * batches
    firsts = np.cumsum([0, *nodes])

    def of_nodes(size: int) -> list[int]:
        parts = split(size, speeds)
        return [sum(parts[a:b]) for a, b in pairwise(firsts)]

    shares = np.array(of_nodes(BATCH)) / BATCH
    if mutant == "unweighted":
        shares = np.full(count, 1 / count)
    w, v = np.tile(start, (count, 1)), np.zeros((count, len(start)))
    every, hold, best, stalled = global_every, wait, np.inf, 0
    flight: Any = None  # the step, the wait, the nodes' values then
    since, loss, seen = 0, 0.0, 0
    path, rates, begun = [], [], []

    def mixed(step: int) -> np.ndarray:
        began, _, then = flight
        stale = step - began
        if mutant == "fresh":
            stale = 0
        total_sum = count * (shares @ then)
        if mixing == "daso":
            return (2 * stale * w + total_sum) / (2 * stale + count)
        return w + count / (2 * stale + count) * (total_sum / count - then)

    for step in range(1, total + 1):
        epoch, batch = divmod(step - 1, batches)
        first, indices = batch * BATCH, order(epoch, samples)
        size = min(BATCH, samples - first)
        for node, part in enumerate(of_nodes(size)):
            rows, first = indices[first : first + part], first + part
            off = x[rows] @ w[node] - y[rows]
            loss, seen = loss + (off**2).sum(), seen + part
            v[node] = momentum * v[node] + 2 / part * x[rows].T @ off * trainable
            w[node] = w[node] - lr * v[node]
        cycling = warmup < step <= total - cooldown
        if flight and (not cycling or step - flight[0] >= flight[1]):
            w, flight = mixed(step), None
        if not cycling:
            w = np.tile(shares @ w, (count, 1))
        else:
            since += 1
            if since >= every and not flight:  # one at a time
                flight, since = (step, hold + (mutant == "late"), w.copy()), 0
                begun.append(step)
                if flight[1] == 0:
                    w, flight = mixed(step), None
        if step % (schedule_every_n_steps or batches) == 0:
            mean = loss / seen
            if mutant != "never restarts":
                loss, seen = 0.0, 0
            cycling = cycling or mutant == "looks always"
            if cycling and (best == np.inf or mean < (1 - threshold) * best):
                best, stalled = mean, 0
            elif cycling:
                stalled += 1
                if stalled == patience:
                    stalled = 0
                    if every > 1:
                        every, hold = every // 2, hold and max(hold // 2, 1)
                    else:
                        every, hold = max_global_every, hold and max(max_global_every // 4, 1)
        path.append(w.copy())
        rates.append((every, hold))
    return Course(np.array(path), rates, begun)


def matrix(rule: Callable[[int, int, int], Any], n: int, round_number: int, seed: int) -> np.ndarray:
    """The mixing matrix of a round: each peer keeps as large a part as it sends to each other one.

    Column ``j`` says where the values of ``j`` go; its sum is 1.
    """
    result = np.zeros((n, n))
    for j, to in enumerate(rule(n, round_number, seed)):
        result[[j, *to], j] = 1 / (len(to) + 1)
    return result
