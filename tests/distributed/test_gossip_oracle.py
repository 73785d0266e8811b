"""Gossip against NumPy, which shares only the list of partners with it."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from center_tasks import Line, fit
from oracles import BATCH, LR, MOMENTUM, SAMPLES, START, data, in_turn, matrix, order, split
from ranks import run

from lightning_hetero import GossipPushSumStrategy, GossipStrategy
from lightning_hetero.algorithms.topologies import DIRECTED, MATCHINGS, Rule, Sends

WORLD, SPEEDS, EPOCHS = 3, [3.0, 1.0, 2.0], 2  # of 12 samples 6, 2 and 4; 40 steps
Steps = list[list[np.ndarray]]


def batches(nodes: list[int]) -> tuple[Steps, np.ndarray]:
    """The rows of each replica at each step, and its planned number of samples."""
    firsts = np.cumsum([0, *nodes])

    def of_nodes(size: int, turn: int) -> list[int]:
        # Ranks that do not meet at every step get the remainder in turn.
        parts = in_turn(size, SPEEDS, turn) if len(nodes) == WORLD else split(size, SPEEDS)
        return [sum(parts[a:b]) for a, b in pairwise(firsts)]

    steps = []
    for epoch in range(EPOCHS):
        indices = order(epoch, SAMPLES)
        for turn, first in enumerate(range(0, SAMPLES, BATCH)):
            rows = indices[first : first + BATCH]
            steps.append(np.split(rows, np.cumsum(of_nodes(len(rows), turn))[:-1]))
    return steps, np.array(of_nodes(BATCH, 0), dtype=float)


class Trainers:
    """Replicas that take steps by SGD with momentum."""

    def __init__(self, count: int) -> None:
        self.x, self.y = data()
        self.v = np.zeros((count, len(START)))

    def gradients(self, w: np.ndarray, rows: list[np.ndarray]) -> np.ndarray:
        return np.array(
            [2 / len(part) * self.x[part].T @ (self.x[part] @ w[i] - self.y[part]) for i, part in enumerate(rows)]
        )

    def step(self, w: np.ndarray, rows: list[np.ndarray], mixing: np.ndarray | None = None) -> np.ndarray:
        gradients = self.gradients(w, rows)
        self.v = MOMENTUM * self.v + (gradients if mixing is None else mixing @ gradients)
        return w - LR * self.v


def pairs(rule: Rule, every: int, overlap: bool, nodes: list[int], mutant: str = "") -> np.ndarray:
    """The weights of all replicas after each step."""
    steps, s = batches(nodes)
    n = len(nodes)
    trainers, w, path = Trainers(n), np.tile(START, (n, 1)), []
    if mutant == "unweighted":
        s = np.ones(n)
    for step, rows in enumerate(steps, 1):
        before = w
        w = trainers.step(w, rows)
        if step % every == 0:
            offered = before if overlap else w
            moved = w.copy()
            for i, to in enumerate(rule(n, step // every, 0)):
                for j in to:
                    own = w if mutant == "moved" else offered
                    moved[i] += s[j] / (s[i] + s[j]) * (offered[j] - own[i])
            w = moved
        path.append(w)
    return np.array(path)


def push_sum(
    rule: Rule, every: int, nodes: list[int], mutant: str = "", starts: np.ndarray | None = None, still: bool = False
) -> np.ndarray:
    """Push-sum in NumPy: ``x`` and ``w`` from the first round on."""
    steps, s = batches(nodes)
    n, s = len(nodes), s / s.mean()
    trainers, z, path = Trainers(n), np.tile(START, (n, 1)), []
    z = z if starts is None else z + starts[:, None]
    x, w, old = s[:, None] * z, s.copy(), z
    for step, rows in enumerate(steps, 1):
        mixing = matrix(rule, n, step // every, 0)
        if mutant == "gradients only":
            z = z if still else trainers.step(z, rows, mixing)
            path.append(z)
            continue
        z = z if still else trainers.step(z, rows)
        if step % every == 0:
            x = w[:, None] * z if mutant == "repacked" else x + s[:, None] * (z - old)
            x, w = mixing @ x, mixing @ w
            z = x if mutant == "biased" else x / w[:, None]
            old = z
        path.append(z)
    return np.array(path)


def irregular(n: int, turn: int, seed: int) -> Sends:
    """Sends of a round in which peers send to, and receive from, different numbers of others."""
    return [(1,), (0, 2), (0,)][:n] if turn % 2 else [(1, 2), (2,), (1,)][:n]


class Irregular(GossipPushSumStrategy):
    def make_averager(self) -> Any:
        averager: Any = super().make_averager()
        averager.rule = irregular
        return averager


class Starts(Line):
    """Starts from other weights on each rank."""

    def on_train_start(self) -> None:
        with torch.no_grad():
            self.w += 3.0 * self.global_rank


def _fits(cases: list[tuple[Any, dict[str, Any]]], make: Any = Line, **model: Any) -> list[Any]:
    results = [fit(kind, make(momentum=MOMENTUM, **model), epochs=EPOCHS, **options) for kind, options in cases]
    return [(result["path"].numpy(), result["final"].numpy()) for result in results]


def check(results: list[Any], truths: list[np.ndarray], nodes: list[int]) -> None:
    """Compare the weights at every step; at the end all replicas are equal."""
    of_rank = [i for i, count in enumerate(nodes) for _ in range(count)]
    for rank, found in enumerate(results):
        for i, ((path, final), truth) in enumerate(zip(found, truths, strict=True)):
            assert path.shape == truth[:, 0].shape
            assert abs(path - truth[:, of_rank[rank]]).max() < 1e-10, i
            assert np.array_equal(final, results[0][i][1])


PAIRS = [
    ("random", 1, True), ("random", 1, False), ("ring", 3, True)
]  # fmt: skip
SUMS = [("one_peer_exponential", 1), ("exponential", 3)]


@pytest.mark.long(after=1)
@pytest.mark.parametrize("nodes", [[1, 1, 1], [2, 1]])
def test_pairs_and_push_sum(nodes: list[int]) -> None:
    more = {"replica": "node"} if len(nodes) == 2 else {}
    of_pairs, of_sums = (PAIRS[:2], SUMS[:1]) if more else (PAIRS, SUMS)
    cases: list[Any] = [
        (GossipStrategy, {"topology": name, "every_n_steps": every, "overlap": overlap, **more})
        for name, every, overlap in of_pairs
    ]
    cases += [(GossipPushSumStrategy, {"topology": name, "every_n_steps": every, **more}) for name, every in of_sums]
    truths = [pairs(MATCHINGS[name], every, overlap, nodes) for name, every, overlap in of_pairs]
    truths += [push_sum(DIRECTED[name], every, nodes) for name, every in of_sums]
    if not more:
        cases, truths = [*cases, (Irregular, {})], [*truths, push_sum(irregular, 1, nodes)]
    assert len(truths[0]) == 40
    check(run(_fits, WORLD, cases, nodes=nodes), truths, nodes)


def test_push_sum_is_exact_on_an_irregular_graph() -> None:
    nodes, starts = [1, 1, 1], 3.0 * np.arange(3)
    goal = START + starts @ [6, 2, 4] / 12
    mixing = matrix(irregular, 3, 1, 0)
    assert abs(mixing.sum(1) - 1).max() > 0.3  # rows do not sum to one
    truth = push_sum(irregular, 1, nodes, starts=starts, still=True)
    assert abs(truth[-1] - goal).max() < 1e-9
    for found in run(_fits, WORLD, [(Irregular, {})], Starts, lr=0.0, nodes=nodes):
        assert abs(found[0][0][-1] - goal).max() < 1e-9
        assert abs(found[0][1] - goal).max() < 1e-9
    biased = push_sum(irregular, 1, nodes, "biased", starts, still=True)
    assert abs(biased[-1] - goal).max() > 0.1
    # Gradients alone never bring them together.
    separate = push_sum(irregular, 1, nodes, "gradients only", starts, still=True)
    assert abs(separate[-1] - goal).max() > 1


def test_the_oracle_tells_mistakes_apart() -> None:
    nodes = [1, 1, 1]
    truth = pairs(MATCHINGS["random"], 1, True, nodes)
    for other in (
        pairs(MATCHINGS["random"], 1, False, nodes),
        pairs(MATCHINGS["ring"], 1, True, nodes),
        pairs(MATCHINGS["random"], 2, True, nodes),
        pairs(MATCHINGS["random"], 1, True, nodes, "unweighted"),
        pairs(MATCHINGS["random"], 1, True, nodes, "moved"),
        pairs(lambda n, turn, seed: MATCHINGS["random"](n, turn - 1, seed), 1, True, nodes),
    ):
        assert abs(other - truth).max() > 1e-4
    for rule in (irregular, DIRECTED["one_peer_exponential"]):
        truth = push_sum(rule, 1, nodes)
        for mutant in ("biased", "repacked", "gradients only"):
            assert abs(push_sum(rule, 1, nodes, mutant) - truth).max() > 1e-4, mutant
