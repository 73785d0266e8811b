"""A fit in which what is trainable changes, resumed from a checkpoint."""

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import run
from tasks import Save, parameters
from test_unfreezing import APART, KINDS, Backboned, Freezes, Thaws, _fit

from lightning_hetero import EASGDAsyncStrategy, GossipAsyncStrategy, GossipStrategy


def _resumed(folder: str, kind: Any, options: dict[str, Any]) -> list[tuple[torch.Tensor, ...]]:
    warnings.filterwarnings("ignore", ".*stays frozen")
    results = []
    for make in (Thaws, Freezes):
        for stop in (12, 20):
            path = f"{folder}/{make.__name__}-{stop}.ckpt"
            ends = []
            for save, resume in ((Save(path, -1, False), None), (Save(path, stop, True), None), (None, path)):
                module = Backboned(momentum=0.9)
                _fit(kind(**options, **APART), module, make(), *([save] if save else []), resume=resume)
                ends.append(parameters(module))
            results.append((ends[0], ends[2]))
    return results


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "options"),
    [KINDS[0], KINDS[1], KINDS[2], KINDS[5], (GossipStrategy, {"every_n_steps": 2, "overlap": False}), KINDS[12]],
)
def test_a_resumed_fit_goes_on_with_what_was_trainable(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:
    for results in run(_resumed, 3, str(tmp_path), kind, options, nodes=[1, 1, 1]):
        for whole, resumed in results:
            assert torch.equal(whole, resumed)


class Notes(pl.Callback):
    """A replica's own values and momentum when a run stops, and when the next one starts."""

    def __init__(self) -> None:
        self.stopped: list[torch.Tensor] = []
        self.started: list[torch.Tensor] = []

    def _own(self, trainer: pl.Trainer) -> list[torch.Tensor]:
        state = trainer.optimizers[0].state
        momentum = [state[p]["momentum_buffer"].clone() for p in trainer.lightning_module.parameters() if state[p]]
        return [parameters(trainer.lightning_module), *momentum]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.started = self._own(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.should_stop:
            self.stopped = self._own(trainer)


def _goes_on(path: str, kind: Any, options: dict[str, Any]) -> Any:
    warnings.filterwarnings("ignore", ".*stays frozen")
    results = []
    for make in (Thaws, Freezes):
        before, after = Notes(), Notes()
        _fit(kind(**options, **APART), Backboned(momentum=0.9), make(), Save(path, 20, True), before)
        module = _fit(kind(**options, **APART), Backboned(momentum=0.9), make(), after, resume=path)
        results.append((before.stopped, after.started, parameters(module)))
    return results


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (EASGDAsyncStrategy, {"moving_rate": "auto", "tau": 2, "center": "thread"}),
        (GossipAsyncStrategy, {}),
    ],
)
def test_asynchronous_replicas_begin_with_what_each_had(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """Their course depends on timing, but not where they start: four steps after the first layer began to train."""
    ranks = run(_goes_on, 3, str(tmp_path / "stopped.ckpt"), kind, options, nodes=[1, 1, 1])
    for results in zip(*ranks, strict=True):
        for stopped, started, final in results:
            assert len(stopped) == len(started) == 5  # the first layer too has momentum
            assert all(torch.equal(one, two) for one, two in zip(stopped, started, strict=True))
            assert torch.equal(final, results[0][2])
            assert (final != started[0]).all()
        assert not torch.equal(results[0][1][0], results[1][1][0])  # each its own
