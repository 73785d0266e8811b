"""`hetero_diloco_async`: the arrivals of a fit replayed in NumPy, local steps by speed, and what a checkpoint keeps."""

import time
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from center_tasks import APART, Line, fit
from oracles import LR, MOMENTUM, SAMPLES, START, data, order, split
from ranks import run

from lightning_hetero import DiLoCoAsyncStrategy

SHARES, BATCH, PAUSES = [3.0, 1.0, 2.0, 2.0], 16, [0.001, 0.004, 0.002, 0.004]  # of 16 samples 6, 2, 4 and 4


class Visits(pl.Callback):
    """Notes after which steps this replica has visited the center, as which of all visits, and keeps its pace."""

    def __init__(self, pauses: list[float]) -> None:
        self.pauses, self.seen = pauses, []  # type: ignore[var-annotated]

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        time.sleep(self.pauses[trainer.global_rank])

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        averager: Any = trainer.strategy.averager  # type: ignore[attr-defined]
        rates = averager._rates._seen
        if rates and (not self.seen or sum(rates[-1][1]) != self.seen[-1][1]):
            self.seen.append((trainer.global_step, sum(rates[-1][1])))


def _visited(**options: Any) -> Any:
    module, visits = Line(momentum=MOMENTUM), Visits(PAUSES)
    given = {"trainer": {"callbacks": [visits]}, "balance": SHARES, "global_batch_size": BATCH, **options}
    found = fit(DiLoCoAsyncStrategy, module, epochs=4, **given)
    return found["path"].numpy(), found["final"].numpy(), visits.seen


def turned(d: np.ndarray, m: np.ndarray) -> np.ndarray:
    """HeLoCo's correction of an arrival."""
    long, other = np.linalg.norm(d), np.linalg.norm(m)
    if min(long, other) < 1e-8:
        return d
    cos, trust = d @ m / (long * other), long / (long + 3 * other + 1e-8)
    if cos >= 0.2:
        return d
    if cos < 0:
        return d - min(0.5 * -cos * trust, 0.5) * cos * long * m / other
    part = min((1 - cos) * trust, 1)
    u = (1 - part) * d / long + part * m / other
    return long * u / np.linalg.norm(u)


def replay(visits: list[list[tuple[int, int]]], lr: float, mu: float, mutant: str = "", rule: str = "") -> Any:
    """Delayed Nesterov by the paper's algorithm 3, or another rule, with the order of the arrivals given; all paths."""
    x, y = data()
    n, parts = len(visits), np.array(split(BATCH, SHARES)) / BATCH
    weights = np.full(n, 1 / n) if mutant == "unweighted" else parts
    center, m, total, t = START.copy(), np.zeros(8), np.zeros(8), 0
    w, v, begun = np.tile(START, (n, 1)), np.zeros((n, 8)), np.tile(START, (n, 1))
    steps, path = np.zeros(n, dtype=int), np.zeros((60, n, 8))

    def train(i: int, until: int) -> None:
        while steps[i] < until:
            epoch, batch = divmod(steps[i], 15)
            rows = order(epoch, SAMPLES)[BATCH * batch : BATCH * (batch + 1)]
            part = np.split(rows, np.cumsum(split(len(rows), SHARES))[:-1])[i]
            v[i] = MOMENTUM * v[i] + 2 / len(part) * x[part].T @ (x[part] @ w[i] - y[part])
            w[i] = w[i] - LR * v[i]
            path[steps[i], i] = w[i]
            steps[i] += 1

    for _, i, step in sorted((turn, i, step) for i, seen in enumerate(visits) for step, turn in seen):
        train(i, step)
        gradient = weights[i] * ((center if mutant == "fresh" else begun[i]) - w[i])
        total, t = total + gradient, t + 1
        if rule:
            d = (turned(begun[i] - w[i], m) if rule == "heloco" else begun[i] - w[i]) * weights[i] * np.sqrt(n)
            m = mu * m + (1 - mu) * d
            center = center - lr * (d + mu * m)
            w[i], begun[i] = (center - lr * mu * m,) * 2
            path[step - 1, i] = w[i]
            continue
        center = center - lr * gradient
        if t % n == 0 or mutant == "undelayed":
            m, total = mu * m + total, np.zeros(8)
            center = center - lr * mu * m
        w[i], begun[i] = center, center
        path[step - 1, i] = center
    for i in range(n):
        train(i, 60)
    return path, parts @ w if mutant == "stale" else center + parts @ (w - begun)


@pytest.mark.parametrize(
    "options", [{"tau": 3, "center": "thread"}, {"tau": 4, "outer_lr": 0.5, "outer_momentum": 0.6}]
)
def test_against_a_replay_of_the_arrivals(options: dict[str, Any]) -> None:
    results = run(_visited, 4, nodes=[1, 1, 1, 1], **options)
    visits = [seen for *_, seen in results]
    turns = sorted(turn for seen in visits for _, turn in seen)
    assert turns == list(range(1, len(turns) + 1))
    settings = options.get("outer_lr", 0.7), options.get("outer_momentum", 0.9)
    truth, final = replay(visits, *settings)
    for i, (path, end, _) in enumerate(results):
        assert abs(path - truth[:, i]).max() < 1e-10
        assert abs(end - final).max() < 1e-10
        assert np.array_equal(end, results[0][1])
    for mutant in ("unweighted", "undelayed", "fresh"):
        assert abs(replay(visits, *settings, mutant)[0] - truth).max() > 1e-4, mutant
    assert abs(replay(visits, *settings, "stale")[1] - final).max() > 1e-4  # replicas began from different centers


@pytest.mark.parametrize("rule", ["look_ahead", "heloco"])
def test_other_rules_against_a_replay_of_the_arrivals(rule: str) -> None:
    results = run(_visited, 4, nodes=[1, 1, 1, 1], tau=3, momentum_rule=rule, center="thread")
    visits = [seen for *_, seen in results]
    truth, final = replay(visits, 0.7, 0.9, rule=rule)
    for i, (path, end, _) in enumerate(results):
        assert abs(path - truth[:, i]).max() < 1e-10
        assert abs(end - final).max() < 1e-10
    other = {"look_ahead": "heloco", "heloco": "look_ahead"}[rule]
    assert abs(replay(visits, 0.7, 0.9, rule=other)[0] - truth).max() > 1e-6


def _paced(**options: Any) -> Any:
    visits = Visits([0.01, 0.02, 0.04])
    fit(DiLoCoAsyncStrategy, Line(), epochs=4, trainer={"callbacks": [visits]}, tau=8, **options)
    return [step for step, _ in visits.seen]


@pytest.mark.clock
def test_local_steps_follow_the_speed() -> None:
    for rank, seen in enumerate(run(_paced, 3, nodes=APART)):
        lengths = np.diff(seen)
        assert seen[0] == 8  # speeds are not known yet
        assert abs(np.median(lengths) - (8, 4, 2)[rank]) <= 1, (rank, lengths)
    for seen in run(_paced, 3, nodes=APART, follow_speed=False):
        assert set(np.diff(seen)) == {8}
