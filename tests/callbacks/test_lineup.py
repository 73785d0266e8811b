"""The report when ranks are lost in the midst of a fit: the successor writes it, with the numbers of `Loss`."""

import io
import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from ranks import attempt
from tasks import FAST, Killed, Net, dataset
from test_monitor import Memory
from test_report import fit
from torch.utils.data import DataLoader

from lightning_hetero import DiLoCoStrategy, HeteroDDPStrategy
from lightning_hetero.callbacks import HeteroMonitor
from lightning_hetero.callbacks.canvas import LOST
from lightning_hetero.callbacks.lineup import Change
from lightning_hetero.callbacks.plots import draw

DIED = "has ended without a word: killed, out of memory, or its program is over"


def _fit(root: Path, rank: int, name: str) -> dict[str, Any]:
    options: dict[str, Any] = {"on_peer_loss": "continue", "timeout": 60}
    strategy = (
        HeteroDDPStrategy(balance=[3.0, 2.0, 1.0], rebalance_every_n_steps=4, **options)
        if name == "ddp"
        else DiLoCoStrategy(tau=4, replica="rank", **options)
    )
    monitor, logger = HeteroMonitor(), Memory()
    settings = {**FAST, "logger": logger, "callbacks": [Killed(rank, 10), monitor], "default_root_dir": root}
    trainer = pl.Trainer(strategy=strategy, max_epochs=3, log_every_n_steps=1, **settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Training goes on")
        warnings.filterwarnings("ignore", ".*does not have many workers")
        trainer.fit(Net(), DataLoader(dataset(144), batch_size=4))
    assert monitor.losses == strategy.survival.losses
    return {
        "now": trainer.global_rank,
        "losses": [asdict(loss) for loss in strategy.survival.losses],
        "logged": {name for _, row in logger.rows for name in row},
        "ranks": [record.ranks for record in monitor.history],
        "widths": [{len(row) for row in record[1:5]} for record in monitor.history],
    }


@pytest.mark.long(after=1)
@pytest.mark.parametrize(("rank", "name"), [(0, "ddp"), (1, "ddp"), (0, "diloco")])
def test_the_successor_writes_who_was_lost_and_what_it_cost(tmp_path: Path, rank: int, name: str) -> None:
    outcomes = attempt(_fit, 3, tmp_path, rank, name)
    rest = {number: outcome.value for number, outcome in enumerate(outcomes) if number != rank}
    assert all(rest.values()), "\n".join(outcome.trace for outcome in outcomes)
    assert [value["now"] for value in rest.values()] == [0, 1]
    first = min(rest)
    [loss] = rest[first]["losses"]

    folder = tmp_path / "hetero_report"
    found = json.loads((folder / "figures.json").read_text())
    [change] = found["changes"]
    assert change["lost"] == {str(rank): DIED}
    assert {int(number): seconds for number, seconds in change["stalls"].items()} == {
        number: value["losses"][0]["seconds"] for number, value in rest.items()
    }
    for key in ("view", "step", "ranks", "replicas", "samples"):
        assert change[key] == loss[key]
    assert (change["ranks"], change["step"], change["writer"]) == (2, 10, first)
    assert (name == "ddp") == (change["samples"] > 0) or name == "diloco"
    # Ranks keep their numbers, and the loss lies between the steps before it and those after it.
    assert [view["rank"] for view in found["views"]] == list(rest)
    assert found["replicas"] == ([[0, 1, 2]] if name == "ddp" else [[0], [1], [2]])
    assert len(found["places"]) == 3
    for view in found["views"]:
        steps = view["stretches"]
        assert steps[9]["began"] < change["at"]
        assert change["at"] < steps[11]["began"]
        assert view["losses"][0]["seconds"] == change["stalls"][str(view["rank"])]
    assert {len(view["stretches"]) for view in found["views"]} == {
        sum(s["steps"] for s in found["views"][0]["stretches"])
    }

    page = (folder / "report.html").read_text()
    assert "Who was lost" in page
    assert f"Rank {rank} {DIED}. Training went on with 2 ranks after step 10" in page
    assert f"at most {max(change['stalls'].values()):.2f} s" in page
    assert f"{loss['samples']} samples that were drawn for rank {rank}" in page or not loss["samples"]
    assert f"Since then rank {first} writes checkpoints and logs." in page
    assert "on 3 ranks" in page

    told = list(rest)
    for value in rest.values():
        assert set(value["ranks"]) <= {(0, 1, 2), tuple(told)}
        assert tuple(told) in value["ranks"]
        assert all(widths == {len(ranks)} for widths, ranks in zip(value["widths"], value["ranks"], strict=True))
    assert {"hetero/lost_samples", "hetero/stall_s", "hetero/view"} <= rest[first]["logged"]
    assert f"hetero/share/rank{told[1]}" in rest[first]["logged"]


def _red(png: bytes) -> int:
    return int((np.abs(imread(io.BytesIO(png))[..., :3] - to_rgb(LOST)).max(-1) < 0.3).sum())


@pytest.mark.long
def test_pictures_mark_when_a_rank_was_lost() -> None:
    change = Change(1, 0.35, 3, {2: "has left"}, (), 2, 2, {0: 0.2, 1: 0.1}, 5, 0)
    plain, marked = draw(fit()), draw(fit(changes=[change]))
    for before, after in zip(plain, marked, strict=True):
        assert (_red(after.png) > _red(before.png) + 20) == (after.name in ("timeline", "shares", "speed")), after.name
        assert ("A red line" in after.caption) == (after.name in ("timeline", "shares", "speed"))
        assert "A red line" not in before.caption
