"""Callbacks in a job that grows."""

import functools
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from growing import JOINS_AT, fit, grow, values
from lightning.pytorch.callbacks import ModelCheckpoint
from test_survival import Module

from lightning_hetero import HeteroMonitor
from lightning_hetero.batching.plan_agreement import ActionRequest
from lightning_hetero.callbacks.resumable import ResumableCheckpoint


class JoinsAtTheEnd(pl.Callback):
    """Lets others join at the last batch of an epoch, and keeps the step of each end of an epoch."""

    def __init__(self) -> None:
        self.ends: list[int] = []

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        agreed: Any = trainer.strategy.stop_request.agreed  # type: ignore[attr-defined]
        agree = agreed._agree

        def late(asked: ActionRequest, *where: Any) -> None:
            agreed._done = trainer.num_training_batches - 1  # the latest batch, as if this rank were that far
            agree(asked._replace(notice=0.0), *where)

        agreed._agree = late

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.ends.append(trainer.global_step)


def _at_the_end(file: str) -> Any:
    ends = JoinsAtTheEnd()
    return fit("NodeAverageStrategy", {"replica": "rank"}, file, 1, [lambda: ends]), ends.ends


def test_no_epoch_loses_its_end(tmp_path: Path) -> None:
    """Lightning does not run the end of an epoch if a fit goes on from its last batch."""
    found = values(grow(2, 1, _at_the_end, str(tmp_path / "job")))
    assert {record.starts[-1] for record, _ in found} == {(13, rank, 3) for rank in range(3)}  # 12 batches an epoch
    assert [ends for _, ends in found] == [[12, 24, 36], [12, 24, 36], [24, 36]]


def _watched(folder: str) -> Any:
    monitor = HeteroMonitor(f"{folder}/report")
    models = functools.partial(ModelCheckpoint, f"{folder}/models", save_top_k=-1)
    resumable = functools.partial(ResumableCheckpoint, f"{folder}/again", every_n_steps=4, background=False)
    record = fit("NodeAverageStrategy", {"replica": "rank"}, f"{folder}/job", 1, [lambda: monitor, models, resumable])
    return record, len(monitor.history), [(one.joined, one.ranks, one.step) for one in monitor.losses]


def test_callbacks_go_on(tmp_path: Path) -> None:
    outcomes = grow(2, 1, _watched, str(tmp_path))
    found = values(outcomes)
    [step] = {record.starts[-1][0] for record, *_ in found}
    assert step >= JOINS_AT  # the step of the job, not that of its last save
    for _, history, changes in found:
        assert changes == [((2,), 3, step)]
        assert history > 0
    assert found[0][1] > found[2][1] - 2  # from before the join, too
    report = json.loads((tmp_path / "report" / "figures.json").read_text())
    assert [view["rank"] for view in report["views"]] == [0, 1, 2]
    assert (
        "Rank 2 joined. Training went on with 3 ranks after step" in (tmp_path / "report" / "report.html").read_text()
    )
    # Checkpoints from before and after: each is one of the whole job.
    models = sorted(path.name for path in (tmp_path / "models").iterdir() if path.suffix == ".ckpt")
    assert models == ["epoch=0-step=12.ckpt", "epoch=1-step=24.ckpt", "epoch=2-step=36.ckpt"]
    checkpoint = torch.load(tmp_path / "models" / models[-1], weights_only=False)
    module = Module()
    module.load_state_dict(checkpoint["state_dict"])  # a plain one of Lightning
    assert [one.name for one in (tmp_path / "again").glob("*-complete.ckpt")] == ["step=36-complete.ckpt"]
    shards = list((tmp_path / "again" / "step=36-complete.ckpt.shards").iterdir())
    assert len(shards) == 3
