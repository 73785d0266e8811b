"""Manual optimization: a rank that returns early from a training step, or all of them."""

import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import attempt, run
from tasks import FAST, Net, dataset, parameters
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy, NodeAverageStrategy
from lightning_hetero.errors import CommunicationError, DisagreementError


class Returning(Net):
    """Some ranks return early from some batches."""

    def __init__(self, ranks: tuple[int, ...], batches: tuple[int, ...], late: float = 0.0) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.ranks, self.batches, self.late = ranks, batches, late

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank in self.ranks and batch_idx in self.batches:
            time.sleep(self.late * self.global_rank)
            return
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def _fit(
    ranks: tuple[int, ...], batches: tuple[int, ...], strategy: Any = HeteroDDPStrategy, late: float = 0.0
) -> torch.Tensor:
    module = Returning(ranks, batches, late)
    trainer = pl.Trainer(strategy=strategy(timeout=120), devices=2, max_epochs=1, **FAST)
    trainer.fit(module, DataLoader(dataset(48), batch_size=4))
    return parameters(module)


def test_on_one_rank_is_an_error_that_names_it() -> None:
    began = time.monotonic()
    kept, early = attempt(_fit, 2, (1,), (2,))
    assert time.monotonic() - began < 60  # not the timeout
    assert isinstance(early.error, DisagreementError), early.trace
    for words in ("rank 1 ran no backward pass", "(epoch 0, batch 2)", "rank 0 of its replica", "0.0 * loss"):
        assert words in str(early.error)
    assert isinstance(kept.error, CommunicationError), kept.trace
    assert "rank 1 failed with DisagreementError: rank 1 ran no backward pass" in str(kept.error)


def test_on_all_ranks_or_in_replicas_of_one_rank_is_none() -> None:
    first, second = run(_fit, 2, (0, 1), (0, 2, 3))
    assert torch.equal(first, second)
    assert not torch.equal(first, parameters(Net()))
    replicas = run(_fit, 2, (1,), (2,), NodeAverageStrategy, nodes=[1, 1])
    assert torch.equal(*replicas)


@pytest.mark.long
def test_on_all_ranks_is_none_however_late_one_is() -> None:
    assert torch.equal(*run(_fit, 2, (0, 1), (2,), late=8.0))


@pytest.mark.long
def test_in_the_last_batch() -> None:
    _, early = attempt(_fit, 2, (1,), (5,))
    assert isinstance(early.error, DisagreementError), early.trace
