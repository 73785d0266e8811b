"""`hetero_noloco` against the paper's loop in NumPy, and the bound within which replicas stay together."""

import os
import warnings
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from center_tasks import Line, fit
from oracles import LR, MOMENTUM, SAMPLES, START, data, order, split
from ranks import run
from tasks import dataset
from test_diloco import Normed
from torch.utils.data import DataLoader

from lightning_hetero import NoLoCoStrategy
from lightning_hetero.algorithms.topologies import random_matching
from lightning_hetero.errors import HeteroError

SPEEDS, BATCH = [3.0, 1.0, 2.0, 2.0], 16  # of 16 samples 6, 2, 4 and 4; 60 steps in four epochs


def by_hand(nodes: list[int], epochs: int, tau: int, alpha: float, beta: float, gamma: float, mutant: str = "") -> Any:
    """Fast weights of all replicas after each step, and their mean at the end; by the paper's two equations."""
    x, y = data()
    n, firsts = len(nodes), np.cumsum([0, *nodes])
    speeds = SPEEDS[: sum(nodes)]

    def shares(size: int) -> list[int]:
        parts = split(size, speeds)
        return [sum(parts[a:b]) for a, b in pairwise(firsts)]

    s = np.ones(n) if mutant == "unweighted" else np.array(shares(BATCH), dtype=float)
    fast, phi = np.tile(START, (n, 1)), np.tile(START, (n, 1))
    velocity, delta, path, step = np.zeros_like(fast), np.zeros_like(fast), [], 0
    for epoch in range(epochs):
        for first in range(0, SAMPLES, BATCH):
            rows, step = order(epoch, SAMPLES)[first : first + BATCH], step + 1
            for i, part in enumerate(np.split(rows, np.cumsum(shares(len(rows)))[:-1])):
                gradient = 2 / len(part) * x[part].T @ (x[part] @ fast[i] - y[part])
                velocity[i] = MOMENTUM * velocity[i] + gradient
                fast[i] = fast[i] - LR * velocity[i]
            if step % tau == 0:
                outer, new = phi - fast, np.zeros_like(delta)
                for i, to in enumerate(random_matching(n, step // tau, 0)):
                    pair = [i, *to]
                    w = s[pair] / s[pair].sum()
                    new[i] = alpha * delta[i] - beta * w @ outer[pair] - gamma * (phi[i] - w @ phi[pair])
                delta = new
                phi = phi + delta
                fast = phi.copy()
            path.append(fast.copy())
    return np.array(path), s @ fast / s.sum()


CASES: list[tuple[dict[str, Any], tuple[int, float, float, float]]] = [
    ({"tau": 3}, (3, 0.5, 0.7, 0.7)),  # the defaults
    ({"tau": 2, "outer_lr": 0.9, "outer_momentum": 0.0, "gamma": 1.2}, (2, 0.0, 0.9, 1.2)),
]


def _fits(more: dict[str, Any], count: int) -> list[Any]:
    given = {"balance": SPEEDS[: int(os.environ["WORLD_SIZE"])], "global_batch_size": BATCH, **more}
    found = [fit(NoLoCoStrategy, Line(momentum=MOMENTUM), epochs=4, **given, **options) for options, _ in CASES[:count]]
    return [(result["path"].numpy(), result["final"].numpy()) for result in found]


@pytest.mark.parametrize("nodes", [[1, 1, 1, 1], [2, 1, 1]])
def test_against_the_papers_loop(nodes: list[int]) -> None:
    more, count = ({}, 2) if len(nodes) == 4 else ({"replica": "node"}, 1)
    results = run(_fits, 4, more, count, nodes=nodes)
    of_rank = [i for i, members in enumerate(nodes) for _ in range(members)]
    for case, (_, settings) in enumerate(CASES[:count]):
        path, final = by_hand(nodes, 4, *settings)
        assert len(path) == 60
        for rank, found in enumerate(results):
            assert abs(found[case][0] - path[:, of_rank[rank]]).max() < 1e-10
            assert abs(found[case][1] - final).max() < 1e-10
            assert np.array_equal(found[case][1], results[0][case][1])


def test_the_loop_tells_mistakes_apart() -> None:
    nodes = [1, 1, 1, 1]
    truth, _ = by_hand(nodes, 4, 3, 0.5, 0.7, 0.7)
    others = [by_hand(nodes, 4, 3, *rates)[0] for rates in ((0.0, 0.7, 0.7), (0.5, 0.6, 0.7), (0.5, 0.7, 0.6))]
    for other in [*others, by_hand(nodes, 4, 3, 0.5, 0.7, 0.7, "unweighted")[0]]:
        assert abs(other - truth).max() > 1e-4


def _wired(wire: str) -> Any:
    found = fit(NoLoCoStrategy, Line(), epochs=2, tau=4, wire=wire)
    return found["path"], found["final"], found["traffic"]["exchanges"]


def test_sixteen_bits_stay_near() -> None:
    exact, rounded = run(_wired, 3, "fp32", nodes=[1, 1, 1]), run(_wired, 3, "bf16", nodes=[1, 1, 1])
    for (path, final, met), (other, last, also) in zip(exact, rounded, strict=True):
        assert met == also > 0
        assert 0 < (path - other).abs().max() < 2e-2
        assert (final - last).abs().max() < 2e-2


def _normed() -> list[torch.Tensor]:
    module = Normed()
    fit(NoLoCoStrategy, module, DataLoader(dataset(96), batch_size=4, shuffle=True), epochs=1, tau=4)
    return [torch.stack(module.before), module.statistics()]


def test_statistics_take_the_mean_of_the_pair() -> None:
    (a, end), (b, other) = run(_normed, 2, nodes=[1, 1])
    assert torch.equal(end, other)
    assert torch.allclose(end, (2 * a + b)[-1] / 3, rtol=0, atol=1e-13)  # the eighth step ends a round, and the fit


class Breaks(Line):
    """Replica 1 is NaN after the third step, before a round."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and self.trainer.global_step == 3:
            with torch.no_grad():
                self.w.fill_(float("nan"))


def _broken(on_nan: str) -> Any:
    warnings.simplefilter("ignore")
    try:
        found = fit(NoLoCoStrategy, Breaks(momentum=MOMENTUM), epochs=1, tau=4, on_nan=on_nan)
    except HeteroError as error:
        return str(error)
    return found["path"], found["final"]


def test_a_replica_that_is_not_finite_goes_on_from_its_slow_weights() -> None:
    (own, end), (path, _) = run(_broken, 2, "skip", nodes=[1, 1])
    assert path[3:].isfinite().all()
    # Only the other's local steps count: replica 1 goes on from its slow weights, from which all began.
    x, y = data()
    w, v = START.copy(), np.zeros(8)
    for step in range(4):
        rows = order(0, SAMPLES)[12 * step : 12 * step + 8]
        v = MOMENTUM * v + 2 / 8 * x[rows].T @ (x[rows] @ w - y[rows])
        w = w - LR * v
    moved = START + 0.7 * 2 / 3 * (w - START)
    assert abs(own[3].numpy() - moved).max() < 1e-12
    assert abs(path[3].numpy() - moved).max() < 1e-12
    assert end.isfinite().all()
    for message in run(_broken, 2, "error", nodes=[1, 1]):
        assert "replica 1 (ranks [1]) holds values that are not finite" in message


def test_replicas_stay_together_within_the_bound_and_drift_beyond_it() -> None:
    """Replicas that only pull at each other stay together within the bound, and drift apart beyond it."""
    draw = np.random.default_rng(0)
    for n in (4, 5, 8, 64):
        for alpha in (0.0, 0.5, 0.9):
            for part, together in ((0.8, True), (1.25, False)):
                x = draw.normal(size=(200, n))
                x -= x.mean(1, keepdims=True)
                v, gamma = np.zeros_like(x), part * 2 * (1 - alpha**2)
                begin = (x**2).mean()
                for turn in range(400):
                    pull = np.zeros_like(x)
                    for i, to in enumerate(random_matching(n, turn, 0)):
                        for j in to:
                            pull[:, i] = (x[:, i] - x[:, j]) / 2
                    v = alpha * v - gamma * pull
                    x = x + v
                if together:
                    assert (x**2).mean() < 1e-3 * begin, (n, alpha)
                elif n == 64:
                    assert (x**2).mean() > begin, (n, alpha)
