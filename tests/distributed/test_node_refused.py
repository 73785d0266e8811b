"""One node alone, and a rank that fails while the others wait for it."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import attempt, run
from tasks import FAST, Net, dataset, parameters
from test_own_shards import Shard
from torch.utils.data import DataLoader

from lightning_hetero import DASOStrategy, NodeAverageStrategy


def _stream_alone() -> torch.Tensor:
    module = Net()
    strategy = DASOStrategy(balance="off")
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 1, "limit_train_batches": 4})
    trainer.fit(module, DataLoader(Shard(60), batch_size=4))
    return parameters(module)


def test_one_node_takes_streams_too() -> None:
    first, second = run(_stream_alone, 2)
    assert torch.equal(first, second)
    assert not torch.equal(first, parameters(Net()))


class FailsOnOne(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == 2:
            raise RuntimeError("a fault of rank 1")
        return super().training_step(batch, batch_idx)


def _failing(folder: str) -> None:
    strategy = NodeAverageStrategy(every_n_steps=5, ranks_per_node=1)
    keep = ModelCheckpoint(folder, save_on_exception=True)
    options = {**FAST, "max_epochs": 1, "enable_checkpointing": True, "callbacks": [keep]}
    pl.Trainer(strategy=strategy, **options).fit(FailsOnOne(), DataLoader(dataset(96), batch_size=4))


def test_nothing_hangs_when_a_rank_fails(tmp_path: Path) -> None:
    outcomes = attempt(_failing, 2, str(tmp_path))
    assert not any(outcome.late for outcome in outcomes)
    assert "a fault of rank 1" in str(outcomes[1].error)
    assert "rank 1 failed with RuntimeError: a fault of rank 1" in str(outcomes[0].error), outcomes[0].trace
