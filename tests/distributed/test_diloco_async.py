"""`hetero_diloco_async`: the arrivals of a fit, replayed in NumPy, also in fragments and few bits; steps by speed."""

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from center_tasks import APART, Line, fit
from oracles import LR, MOMENTUM, SAMPLES, START, data, order, split
from ranks import run
from tasks import Save
from test_low_bit import rounded
from test_streaming import PIECES, Pieces
from torch import nn

from lightning_hetero import DiLoCoAsyncStrategy

SHARES, BATCH, PAUSES = [3.0, 1.0, 2.0, 2.0], 16, [0.001, 0.004, 0.002, 0.004]  # of 16 samples 6, 2, 4 and 4


class Visits(pl.Callback):
    """Keeps the steps at which this replica has visited the center, and the visits' numbers; slows the replica."""

    def __init__(self, pauses: list[float]) -> None:
        self.pauses, self.bytes = pauses, 0
        self.seen: list[tuple[int, int, int]] = []

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        averager: Any = trainer.strategy.averager  # type: ignore[attr-defined]
        visit = averager._visit

        def recorded(context: Any) -> None:
            visit(context)
            self.seen.append((context.step, sum(averager._rates._seen[-1][1]), averager.visits))
            self.bytes = averager.links.traffic.bytes

        averager._visit = recorded

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        time.sleep(self.pauses[trainer.global_rank])


def _visited(epochs: int = 4, save: Path | None = None, **options: Any) -> Any:
    module = Pieces() if options.get("fragments") else Line(momentum=MOMENTUM)
    visits, saves = Visits(PAUSES), [] if save is None else [Save(str(save), 22, False)]
    given = {"trainer": {"callbacks": [visits, *saves]}, "balance": SHARES, "global_batch_size": BATCH, **options}
    found = fit(DiLoCoAsyncStrategy, module, epochs=epochs, **given)
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


def replay(
    visits: list[list[tuple[int, int, int]]],
    lr: float,
    mu: float,
    mutant: str = "",
    rule: str = "",
    pieces: list[slice] = [slice(0, 8)],  # noqa: B006 - never changed
    coded: bool = False,
) -> Any:
    """Paths of all replicas, by the paper's algorithm 3 (delayed Nesterov) or another rule; the order is that of a fit.

    With `coded` messages have 4 bits, except those of the replica that has the center.
    """
    x, y = data()
    n, parts = len(visits), np.array(split(BATCH, SHARES)) / BATCH
    weights = np.full(n, 1 / n) if mutant == "unweighted" else parts
    center, m, total, t = START.copy(), np.zeros(8), np.zeros(8), [0] * len(pieces)
    w, v, begun = np.tile(START, (n, 1)), np.zeros((n, 8)), np.tile(START, (n, 1))
    steps, path, left = np.zeros(n, dtype=int), np.zeros((60, n, 8)), np.zeros((n, 8), np.float32)

    def train(i: int, until: int) -> None:
        while steps[i] < until:
            epoch, batch = divmod(steps[i], 15)
            rows = order(epoch, SAMPLES)[BATCH * batch : BATCH * (batch + 1)]
            part = np.split(rows, np.cumsum(split(len(rows), SHARES))[:-1])[i]
            v[i] = MOMENTUM * v[i] + 2 / len(part) * x[part].T @ (x[part] @ w[i] - y[part])
            w[i] = w[i] - LR * v[i]
            path[steps[i], i] = w[i]
            steps[i] += 1

    every = ((turn, i, step, visit) for i, seen in enumerate(visits) for step, turn, visit in seen)
    for _, i, step, visit in sorted(every):
        train(i, step)
        p = visit % len(pieces)
        of = i, (piece := pieces[p])
        d = (center[piece] if mutant == "fresh" else begun[of]) - w[of]
        if coded and i:
            d, left[of] = rounded(d, np.float32(0) if mutant == "no feedback" else left[of])
        if rule:
            d = (turned(d, m[piece]) if rule == "heloco" else d) * weights[i] * np.sqrt(n)
            m[piece] = mu * m[piece] + (1 - mu) * d
            center[piece] -= lr * (d + mu * m[piece])
        else:
            t[p] += 1
            center[piece] -= lr * weights[i] * d
            total[piece] += weights[i] * d
            if t[p] % n == 0 or mutant == "undelayed":
                m[piece], total[piece] = mu * m[piece] + total[piece], 0.0
                center[piece] -= lr * mu * m[piece]
        start = center[piece] - (lr * mu * m[piece] if rule else 0.0)
        begun[of] += rounded(start - begun[of], np.float32(0))[0] if coded and i else start - begun[of]
        w[of] = path[step - 1, i][piece] = begun[of]
    for i in range(n):
        train(i, 60)
    return path, parts @ w if mutant == "stale" else center + parts @ (w - begun)


@pytest.mark.parametrize(
    "options", [{"tau": 3, "center": "thread"}, {"tau": 4, "outer_lr": 0.5, "outer_momentum": 0.6}]
)
def test_against_a_replay_of_the_arrivals(options: dict[str, Any]) -> None:
    results = run(_visited, 4, nodes=[1, 1, 1, 1], **options)
    visits = [seen for *_, seen in results]
    turns = sorted(turn for seen in visits for _, turn, _ in seen)
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


@pytest.mark.parametrize("rule", ["delayed_nesterov", "heloco"])
def test_fragments_against_a_replay_of_the_arrivals(rule: str) -> None:
    options: Any = {"tau": 5, "fragments": 3, "momentum_rule": rule, "outer_lr": 0.5, "outer_momentum": 0.6}
    results = run(_visited, 4, nodes=[1, 1, 1, 1], **options)
    visits, settings = [seen for *_, seen in results], {"rule": rule if rule == "heloco" else "", "pieces": PIECES}
    truth, final = replay(visits, 0.5, 0.6, **settings)
    for i, (path, end, seen) in enumerate(results):
        assert abs(path - truth[:, i]).max() < 1e-10
        assert abs(end - final).max() < 1e-10
        assert [visit for *_, visit in seen] == list(range(1, len(seen) + 1))
        assert [step for step, *_ in seen][:1] == [1]  # as those of `hetero_diloco`: after floor(p tau / 3) steps
    others = [[(step, turn, visit + 1) for step, turn, visit in seen] for seen in visits]
    assert abs(replay(others, 0.5, 0.6, **settings)[0] - truth).max() > 1e-4  # the control: other fragments


def test_in_4_bits_and_resumed_against_a_replay_of_the_arrivals(tmp_path: Path) -> None:
    options: Any = {"tau": 5, "fragments": 3, "wire": "int4", "outer_lr": 0.5, "outer_momentum": 0.6}
    first = run(_visited, 4, epochs=2, save=tmp_path / "a", nodes=[1, 1, 1, 1], **options)
    second = run(_visited, 4, resume=tmp_path / "a", nodes=[1, 1, 1, 1], **options)
    before = [[one for one in seen if one[0] <= 22] for *_, seen in first]
    visits = [old + new for old, (*_, new) in zip(before, second, strict=True)]
    turns = sorted(turn for seen in visits for _, turn, _ in seen)
    assert turns == list(range(1, len(turns) + 1))
    settings: Any = {"pieces": PIECES, "coded": True}
    truth, final = replay(visits, 0.5, 0.6, **settings)
    for i, (path, end, _) in enumerate(second):
        assert abs(first[i][0][:22] - truth[:22, i]).max() < 1e-5
        assert abs(path - truth[22:, i]).max() < 1e-5
        assert abs(end - final).max() < 1e-5
    assert abs(replay(visits, 0.5, 0.6, "no feedback", **settings)[0] - truth).max() > 1e-3


class Wide(Pieces):
    """Two modules of 32768 values."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(nn.Linear(8, 4096, bias=False) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return sum(piece(batch[0].float()).square().mean() for piece in self.pieces)


def _sent(wires: list[str]) -> list[tuple[int, int]]:
    found = []
    for wire in wires:
        visits = Visits([0.0, 0.0])
        given = {"fragments": 2, "tau": 4, "wire": wire, "center": "thread"}
        fit(DiLoCoAsyncStrategy, Wide(), epochs=1, trainer={"callbacks": [visits]}, **given)
        found.append((visits.bytes, len(visits.seen)))
    return found


def test_bytes_are_those_of_the_wire() -> None:
    bits = {"fp32": 32, "bf16": 16, "int8": 8 + 16 / 256, "int4": 4 + 16 / 256, "2bit": 2 + 64 / 4096}
    for each, (sent, visits) in zip(bits.values(), run(_sent, 2, list(bits), nodes=[1, 1])[1], strict=True):
        assert sent == pytest.approx(visits * 8 * 4096 * each / 8, rel=0.02)


def _paced(**options: Any) -> Any:
    visits = Visits([0.01, 0.02, 0.04])
    fit(DiLoCoAsyncStrategy, Line(), epochs=4, trainer={"callbacks": [visits]}, tau=8, **options)
    return [step for step, *_ in visits.seen]


@pytest.mark.clock
def test_local_steps_follow_the_speed() -> None:
    for rank, seen in enumerate(run(_paced, 3, nodes=APART)):
        lengths = np.diff(seen)
        assert seen[0] == 8  # speeds are not known yet
        assert abs(np.median(lengths) - (8, 4, 2)[rank]) <= 1, (rank, lengths)
    for seen in run(_paced, 3, nodes=APART, follow_speed=False):
        assert set(np.diff(seen)) == {8}


def _shorter(path: str) -> list[int]:
    options = {"epochs": 2, "balance": "off", "follow_speed": False}
    fit(DiLoCoAsyncStrategy, Line(), trainer={"callbacks": [Save(path, 7, True)]}, tau=7, **options)
    visits = Visits([0.0, 0.0])
    fit(DiLoCoAsyncStrategy, Line(), trainer={"callbacks": [visits]}, tau=4, resume=path, **options)
    return [step for step, *_ in visits.seen]


def test_a_shorter_tau_holds_at_once_in_a_resumed_fit(tmp_path: Path) -> None:
    for first, *others in run(_shorter, 2, str(tmp_path / "saved.ckpt"), nodes=[1, 1]):
        assert first == 7 + 4
        assert set(np.diff([first, *others])) == {4}
