"""Changes of what is trainable that cannot work: an error on every rank."""

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
from ranks import attempt
from test_unfreezing import APART, Backboned, Freezes, Thaws, _fit

from lightning_hetero import (
    Averager,
    DASOStrategy,
    EASGDAsyncStrategy,
    GossipAsyncStrategy,
    NodeAverageStrategy,
    StepContext,
    strategy_for,
)
from lightning_hetero.errors import DisagreementError, UnsupportedError

# -- what cannot work ----------------------------------------------------------------------------------------


class OnOneRank(pl.Callback):
    """Freezes the first layer on the last rank only."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.backbone.requires_grad_(trainer.current_epoch == 0 or trainer.global_rank < 2)


class InMidEpoch(pl.Callback):
    """Freezes the first layer after some steps."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        pl_module.backbone.requires_grad_(trainer.global_step < 5)


def _wrong(kind: Any, callback: Any) -> None:
    options = {"moving_rate": 0.2} if kind is EASGDAsyncStrategy else {}
    _fit(kind(**APART, **options), Backboned(), callback)


@pytest.mark.parametrize("kind", [NodeAverageStrategy, EASGDAsyncStrategy, GossipAsyncStrategy])
def test_ranks_that_differ_are_an_error_on_every_rank(kind: Any) -> None:
    for outcome in attempt(_wrong, 3, kind, OnOneRank(), nodes=[1, 1, 1]):
        assert isinstance(outcome.error, DisagreementError), outcome.trace
        assert "the ranks differ in the parameters that have become trainable or frozen" in str(outcome.error)
        assert "net.0.weight: rank 0: (missing), rank 1: (missing), rank 2: frozen" in str(outcome.error)


def test_a_change_in_mid_epoch_is_refused() -> None:
    for outcome in attempt(_wrong, 3, DASOStrategy, InMidEpoch(), nodes=[1, 1, 1]):
        assert isinstance(outcome.error, UnsupportedError), outcome.trace
        assert "net.0.weight and 1 more became trainable, or frozen, in mid-epoch" in str(outcome.error)


@dataclass
class Own(Averager):
    """Says nothing of other parameters."""

    def due(self, context: StepContext) -> bool:
        return context.step % 2 == 0


def _own(callback: Any) -> None:
    _fit(strategy_for(Own, "of_the_test")(**APART), Backboned(), callback)


@pytest.mark.parametrize(
    ("callback", "words"),
    [(Thaws(), "Thaws has frozen net.0.weight and others"), (Freezes(), "Own does not say that it can go on")],
)
def test_an_averager_that_does_not_know_how(callback: Any, words: str) -> None:
    for outcome in attempt(_own, 3, callback, nodes=[1, 1, 1]):
        assert isinstance(outcome.error, UnsupportedError), outcome.trace
        assert words in str(outcome.error)
        assert "supports_unfreezing=True" in str(outcome.error)
