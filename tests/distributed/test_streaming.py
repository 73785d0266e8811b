"""`hetero_diloco` in fragments, against a loop in NumPy of Streaming DiLoCo's algorithm 2."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import events
import lightning.pytorch as pl
import numpy as np
import torch
from center_tasks import fit
from oracles import SPEEDS, START, data, order, split
from ranks import run
from saved import replicas_of
from tasks import Save
from test_low_bit import rounded
from torch import nn

from lightning_hetero.errors import CheckpointError

TAU, LR, MOMENTUM, PIECES = 6, 0.01, 0.9, [slice(0, 3), slice(3, 6), slice(6, 8)]
SETTINGS = list(itertools.product([1, 3], [0, 2], [1.0, 0.5]))  # fragments, delay, blend


class Piece(nn.Module):
    def __init__(self, values: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values))


class Pieces(pl.LightningModule):
    """``x @ w`` on squares, with ``w`` in three modules."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(Piece(START[piece]) for piece in PIECES)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return ((x @ torch.cat([piece.weight for piece in self.pieces]) - y) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR, momentum=MOMENTUM)


def by_hand(
    fragments: int, delay: int, blend: float, mutant: str = "", speeds: Sequence[float] = SPEEDS, wire: str = "fp32"
) -> tuple[np.ndarray, np.ndarray]:
    """Paths of the replicas over 60 steps, and the final weights; two replicas if on a wire of 4 bits."""
    x, y = data()
    w = np.stack([START] * len(speeds))
    velocity, center, momentum = np.zeros_like(w), START.copy(), np.zeros_like(START)
    sent: dict[int, tuple[int, np.ndarray]] = {}
    parts, path, weights = ([slice(0, 8)] if fragments == 1 else PIECES), [], np.array(speeds) / sum(speeds)
    residuals = np.zeros_like(w, np.float32)

    def mean(part: slice) -> np.ndarray:
        away = w[:, part] - center[part]
        if wire == "fp32":
            return np.asarray(weights @ away)
        total = np.zeros(away.shape[1], np.float32)
        for i, weight in enumerate(weights):
            arrived, left = rounded(weight * away[i], residuals[i, part])
            total += arrived
            if mutant != "no feedback":
                residuals[i, part] = left
        return total

    def outer_step(p: int) -> None:
        _, gradient = sent.pop(p)
        part = parts[p]
        momentum[part] = 0.9 * momentum[part] + gradient
        center[part] -= 0.7 * (gradient + 0.9 * momentum[part])
        w[:, part] = (1 - blend) * w[:, part] + blend * center[part]

    for t in range(1, 61):
        epoch, batch = divmod(t - 1, 20)
        rows, first = order(epoch, 235)[12 * batch : 12 * batch + 12], 0
        for i, part in enumerate(split(len(rows), speeds)):
            mine, first = rows[first : first + part], first + part
            if part:
                velocity[i] = MOMENTUM * velocity[i] + 2 * x[mine].T @ (x[mine] @ w[i] - y[mine]) / part
                w[i] -= LR * velocity[i]
        for p in [p for p, (begun, _) in sent.items() if t == begun + delay]:
            outer_step(p)
        for p, part in enumerate(parts):
            if t % TAU == (0 if mutant == "all at once" else p * TAU // len(parts)):
                sent[p] = t, -mean(part)
                if delay == 0:
                    outer_step(p)
        path.append(w.copy())
    for p in list(sent):
        outer_step(p)
    return np.stack(path), weights @ w


def _fits() -> list[dict[str, Any]]:
    chosen = [{"fragments": f, "delay": d, "blend": b} for f, d, b in SETTINGS]
    return [fit("diloco", Pieces(), tau=TAU, **each) for each in [*chosen, {"fragments": "blocks"}, {}]]


def test_against_a_loop_by_hand() -> None:
    for rank, results in enumerate(run(_fits, 4, nodes=[1] * 4)):
        for setting, result in zip(SETTINGS, results, strict=False):
            path, final = by_hand(*setting)
            assert np.abs(result["path"].numpy() - path[:, rank]).max() <= 1e-10, setting
            assert np.abs(result["final"].numpy() - final).max() <= 1e-10, setting
        *_, blocks, whole = results
        by_setting = dict(zip(SETTINGS, results, strict=False))
        cut = by_setting[3, 0, 1.0]
        assert torch.equal(blocks["path"], cut["path"])
        assert torch.equal(whole["path"], by_setting[1, 0, 1.0]["path"])  # the defaults
    wrong = by_hand(3, 2, 0.5, "all at once")[0]
    assert np.abs(wrong - by_hand(3, 2, 0.5)[0]).max() > 1e-4


def _in_4_bits() -> Any:
    return fit("diloco", Pieces(), tau=TAU, fragments=3, delay=2, blend=0.5, wire="int4")["path"].numpy()


def test_in_4_bits_each_fragment_has_its_own_feedback() -> None:
    setting: Any = {"fragments": 3, "delay": 2, "blend": 0.5, "speeds": [2.0, 1.0], "wire": "int4"}
    truth = by_hand(**setting)[0]
    for rank, path in enumerate(run(_in_4_bits, 2, nodes=[1, 1])):
        assert np.abs(path - truth[:, rank]).max() <= 1e-5
    assert np.abs(by_hand(**setting, mutant="no feedback")[0] - truth).max() > 1e-4


class Bytes(pl.Callback):
    """The bytes of each exchange."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        traffic = trainer.strategy.traffic  # type: ignore[union-attr]
        if traffic.bytes > sum(self.sent):
            self.sent.append(traffic.bytes - sum(self.sent))


def _bytes(fragments: int) -> list[int]:
    torch.manual_seed(0)
    module, seen = Pieces(), Bytes()
    module.pieces = nn.ModuleList(Piece(np.linspace(-1, 1, 8)[:4]) for _ in range(2))
    fit("diloco", module, tau=4, fragments=fragments, epochs=1, trainer={"callbacks": [seen]})
    return seen.sent


def test_bytes_per_tau_are_the_same_and_the_peak_is_a_part() -> None:
    (whole, *_), (cut, *_) = run(_bytes, 2, 1, nodes=[1, 1]), run(_bytes, 2, 2, nodes=[1, 1])
    assert len(set(whole)) == len(set(cut)) == 1
    assert len(whole) == 5  # in 20 steps
    assert len(cut) == 2 * len(whole)
    assert 2 * cut[0] == whole[0]


class Taus(pl.Callback):
    """Tau after each step."""

    def __init__(self) -> None:
        self.taus: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.taus.append(trainer.strategy.averager.status(trainer.global_step)["tau"])  # type: ignore[union-attr]


def _auto() -> list[Any]:
    taus = Taus()
    fit("diloco", Pieces(), tau="auto", tau_max=12, fragments=3, delay=1, blend=0.5, trainer={"callbacks": [taus]})
    return taus.taus


def test_all_ranks_choose_the_same_tau() -> None:
    one, other = run(_auto, 2, nodes=[1, 1])
    assert one == other
    assert one[0] == 8
    assert all(2 <= tau <= 12 for tau in one)


def _save(path: str) -> None:
    events.fit("hetero_diloco/fragments", Save(path, 11, True))


def _resume(path: str, options: dict[str, Any]) -> events.Record:
    return events.fit("hetero_diloco/fragments", resume=path, options=options)


def test_with_other_fragments_all_ranks_say_so_and_another_delay_goes_on(tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    run(_save, 3, path, nodes=[1, 1, 1])
    [pending] = replicas_of(path)[0]["algorithm"]["pending"]
    assert pending["step"] == 10
    for record in run(_resume, 3, path, {"fragments": 1}, nodes=[1, 1, 1]):
        assert isinstance(record.error, CheckpointError)
        assert "Resume with the fragments and exclude" in str(record.error)
    for delay in (0, 3):
        first, *others = run(_resume, 3, path, {"delay": delay}, nodes=[1, 1, 1])
        assert first.error is None
        assert first.weights.isfinite().all()
        assert all(torch.equal(other.weights, first.weights) for other in others)
