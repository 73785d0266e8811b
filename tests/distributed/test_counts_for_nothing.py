"""`self.log` with a batch_size of 0, on one rank or on all."""

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from ranks import run
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy


class Logging(Net):
    def __init__(self, zeros: list[int], **options: Any) -> None:
        super().__init__()
        self.zeros, self.options = zeros, options

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        size = 0 if self.trainer.global_rank in self.zeros else len(batch[0])
        self.log("share", torch.tensor(float(self.trainer.global_rank)), batch_size=size, **self.options)
        return loss


def _fit(zeros: list[int], options: dict[str, Any]) -> Any:
    trainer = pl.Trainer(strategy=HeteroDDPStrategy(balance="off"), max_epochs=2, **FAST)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Logging(zeros, **options), DataLoader(dataset(48), batch_size=4))
    messages = [str(w.message) for w in caught if "its batch_size was 0 throughout" in str(w.message)]
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, messages


@pytest.mark.parametrize("when", [{"on_step": True, "on_epoch": False}, {"on_step": False, "on_epoch": True}])
@pytest.mark.parametrize("zeros", [[0], [0, 1]])
def test_a_mean_over_nothing_is_explained_once(when: dict[str, bool], zeros: list[int]) -> None:
    for rank, (metrics, messages) in enumerate(run(_fit, 2, zeros, {**when, "sync_dist": True})):
        if zeros == [0, 1]:
            assert metrics["share"] != metrics["share"]
            assert len(messages) == (rank == 0)
            assert all("self.log('share', ...)" in text for text in messages)
        else:
            assert metrics["share"] == 1.0
            assert not messages


class AtEnd(Net):
    """Logs the mean of its samples' numbers at the end of the epoch; of none of them, NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [torch.empty(0)]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.kept.append(batch[3].float())
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        numbers = torch.cat(self.kept)
        self.log("mean", numbers.mean(), sync_dist=True)
        self.log("largest", max(numbers.tolist(), default=99.0), sync_dist=True, reduce_fx="max")
        self.log("own", numbers.mean())


def _at_end() -> dict[str, float]:
    warnings.filterwarnings("ignore", "It is recommended to use `self.log")
    stopping = EarlyStopping("own", patience=9, check_on_train_epoch_end=True)
    trainer = pl.Trainer(
        strategy=HeteroDDPStrategy(balance=[3.0, 0.0, 1.0]), max_epochs=1, **{**FAST, "callbacks": [stopping]}
    )
    trainer.fit(AtEnd(), DataLoader(dataset(48), batch_size=4))
    return {"score": float(stopping.best_score), **{n: float(v) for n, v in trainer.callback_metrics.items()}}


def test_what_a_rank_without_samples_logs_at_the_end_of_an_epoch_counts_for_nothing() -> None:
    for found in run(_at_end, 3):
        assert found["mean"] == found["score"] == sum(range(48)) / 48
        assert found["largest"] == 47.0
