"""What callbacks see of a job that grows."""

import functools
import json
from pathlib import Path
from typing import Any

import torch
from growing import fit, grow, values
from lightning.pytorch.callbacks import ModelCheckpoint
from test_survival import Module

from lightning_hetero import HeteroMonitor
from lightning_hetero.callbacks import ResumableCheckpoint


def _watched(folder: str) -> Any:
    monitor = HeteroMonitor(f"{folder}/report")
    models = functools.partial(ModelCheckpoint, f"{folder}/models", save_top_k=-1)
    resumable = functools.partial(ResumableCheckpoint, f"{folder}/again", every_n_steps=4, background=False)
    seen = fit("NodeAverageStrategy", {"replica": "rank"}, f"{folder}/job", 1, [lambda: monitor, models, resumable])
    return seen, len(monitor.history), [(one.joined, one.ranks, one.step) for one in monitor.losses]


def test_callbacks_go_on(tmp_path: Path) -> None:
    outcomes = grow(2, 1, _watched, str(tmp_path))
    found = values(outcomes)
    step = found[0][0].starts[-1][0]
    for _, history, changes in found:
        assert changes == [((2,), 3, step)]
        assert history > 0
    assert found[0][1] > found[2][1] - 2  # from before the join, too
    told = json.loads((tmp_path / "report" / "figures.json").read_text())
    assert [view["rank"] for view in told["views"]] == [0, 1, 2]
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
