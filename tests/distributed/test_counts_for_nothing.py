"""`self.log` with a batch_size of 0, on one rank or on all."""

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
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
