"""Low-bit wires through strategies: against a loop by hand, equal replicas, residuals that are dropped after a loss."""

import logging
import signal
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from center_tasks import APART, STRATEGIES, Line, line
from oracles import data
from ranks import attempt, run
from tasks import FAST, Killed, dataset, parameters
from test_diloco import NESTEROV, by_hand
from test_unfreezing import Backboned, Thaws
from torch.utils.data import DataLoader

from lightning_hetero import DASOStrategy

DASO = {"warmup": 0, "cooldown": 0, "patience": 99, "global_every": 3}
FITS: list[tuple[Any, dict[str, Any]]] = [
    ("node", {"every_n_steps": 5}),
    ("diloco", {"tau": 5}),
    ("easgd", {"tau": 5, "moving_rate": "auto"}),
    ("overlap", {"tau": 5, "moving_rate": "auto"}),
    (DASOStrategy, DASO),
]


def rounded(values: np.ndarray, residual: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """8 values as they arrive in 4 bits, and their residuals."""
    whole = values.astype(np.float32) + residual
    scale = np.float32(np.abs(whole).max()) / np.float32(7)
    arrived = np.rint(whole / scale) * scale
    return arrived, whole - arrived


def centers_by_hand(keeps: float = 1.0) -> torch.Tensor:
    """Centers of `hetero_diloco` on a wire of 4 bits; error feedback keeps a part of the residuals."""
    residuals = [np.zeros(8, np.float32)] * 2

    def wire(replica: int, part: torch.Tensor) -> torch.Tensor:
        arrived, residuals[replica] = rounded(part.numpy(), np.float32(keeps) * residuals[replica])
        return torch.tensor(arrived, dtype=torch.float64)

    return by_hand(NESTEROV, 5, wire=wire)[0]


@pytest.mark.parametrize(("wire", "keeps"), [("int4", 1.0), ("int4:decay=0.5", 0.5)])
def test_diloco_in_4_bits_against_a_loop_by_hand(wire: str, keeps: float) -> None:
    truth = centers_by_hand(keeps)
    for result in run(line, 2, "diloco", {"momentum": 0.9}, tau=5, wire=wire, nodes=[1, 1]):
        assert (result["centers"] - truth).abs().max() <= 1e-5
    assert (centers_by_hand(0.0) - truth).abs().max() > 1e-3


def _all(wires: tuple[str, ...]) -> list[Any]:
    return [[line(name, {"momentum": 0.5}, wire=wire, **options) for wire in wires] for name, options in FITS]


@pytest.mark.long(after=1)
@pytest.mark.parametrize("count", [2, 3])
def test_replicas_stay_alike_and_near_fp32(count: int) -> None:
    wires = ("fp32", "int8", "int4", "2bit", "topk:0.5", "topk:0.5:bits=2:decay=0.95")
    results = run(_all, count, wires, nodes=[1] * count)
    for number in range(len(FITS)):
        exact = results[0][number][0]
        for w in range(1, len(wires)):
            low = results[0][number][w]
            for others in results[1:]:
                assert torch.equal(others[number][w]["final"], low["final"])
                assert torch.equal(others[number][w]["centers"], low["centers"])
            off = (low["final"] - exact["final"]).norm() / exact["final"].norm()
            most = 0.02 if wires[w] == "int8" else 0.5 if "2" in wires[w] else 0.3
            assert 0 < off < most, (FITS[number][0], wires[w])
            assert low["traffic"]["exchanges"] == exact["traffic"]["exchanges"]


class Residuals(pl.Callback):
    """Keeps the lengths of residuals after each step."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        feedback = trainer.strategy.averager.feedback
        self.sent, self.summed = [len(part) for part in feedback.sent], [len(part) for part in feedback.summed]


class Logged(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        logging.getLogger("lightning_hetero").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "error feedback" in record.getMessage().lower():
            self.messages.append(record.getMessage())


def _lost(name: Any, options: dict[str, Any]) -> tuple[torch.Tensor, list[str], list[int]]:
    logged, module, residuals = Logged(), Line(), Residuals()
    kind = STRATEGIES.get(name, name)
    strategy = kind(on_peer_loss="continue", timeout=60, balance="off", wire="int4", **options)
    trainer = pl.Trainer(strategy=strategy, callbacks=[Killed(2, 7), residuals], **{**FAST, "max_epochs": 2})
    samples = torch.utils.data.TensorDataset(*(torch.tensor(part[:96]) for part in data()))
    trainer.fit(module, DataLoader(samples, batch_size=4, shuffle=True))
    return parameters(module), logged.messages, residuals.summed


@pytest.mark.parametrize(("name", "options"), [FITS[0], FITS[1], FITS[4]])
def test_residuals_are_dropped_when_a_replica_is_lost(name: Any, options: dict[str, Any]) -> None:
    outcomes = attempt(_lost, 3, name, options, nodes=APART)
    assert outcomes[2].exitcode == -signal.SIGKILL
    assert all(outcome.value for outcome in outcomes[:2]), "\n".join(outcome.trace for outcome in outcomes)
    (first, messages, parts), (second, nothing, _) = (outcome.value for outcome in outcomes[:2])
    assert torch.equal(first, second)
    assert parts == [0]  # two replicas encode no sums
    assert ["Replicas were lost" in words for words in messages] == [True]
    assert nothing == []


def _thawed() -> tuple[torch.Tensor, list[str], list[int], int]:
    logged, module, residuals = Logged(), Backboned(), Residuals()
    strategy = STRATEGIES["diloco"](tau=3, wire="int8", balance="off")
    trainer = pl.Trainer(strategy=strategy, callbacks=[Thaws(1), residuals], **{**FAST, "max_epochs": 2})
    trainer.fit(module, DataLoader(dataset(96), batch_size=4, shuffle=True))
    return parameters(module), logged.messages, residuals.sent, sum(p.numel() for p in module.parameters())


def test_residuals_begin_anew_with_other_parameters() -> None:
    (first, messages, lengths, all_of_them), (second, *_) = run(_thawed, 2, nodes=[1, 1])
    assert torch.equal(first, second)
    assert sum(lengths) == all_of_them
    assert ["Other parameters are trainable now" in words for words in messages] == [True]
