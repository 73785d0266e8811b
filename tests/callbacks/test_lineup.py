"""Report of a fit in which ranks are lost: the successor writes it, with the numbers of `MembershipChange`."""

import io
import json
import os
import signal
import warnings
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from growing import LATE, grow, values
from growing import fit as grown
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from ranks import attempt
from tasks import FAST, Killed, Memory, Net, dataset
from test_report import fit
from torch.utils.data import DataLoader

from lightning_hetero import DiLoCoStrategy, HeteroDDPStrategy
from lightning_hetero.callbacks.monitor import HeteroMonitor
from lightning_hetero.callbacks.monitor_data import MembershipHistory, RankRecord, ReportedChange
from lightning_hetero.callbacks.plots import LOST, draw
from lightning_hetero.strategies.recovery_policy import MembershipChange

DIED = (
    "has ended without an error message: killed, out of memory, its program is over, or gloo has aborted it at a "
    "collective of your own with unequal sizes or types on the ranks"
)


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
    assert monitor.losses == strategy.recovery.losses
    return {
        "now": trainer.global_rank,
        "losses": [asdict(loss) for loss in strategy.recovery.losses],
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

    remaining = list(rest)
    for value in rest.values():
        assert set(value["ranks"]) <= {(0, 1, 2), tuple(remaining)}
        assert tuple(remaining) in value["ranks"]
        assert all(widths == {len(ranks)} for widths, ranks in zip(value["widths"], value["ranks"], strict=True))
    assert {"hetero/lost_samples", "hetero/stall_s", "hetero/view"} <= rest[first]["logged"]
    assert f"hetero/share/rank{remaining[1]}" in rest[first]["logged"]


class Dies(pl.Callback):
    """Rank 2 is killed at step 3, and rank 0 some steps after others have joined."""

    def __init__(self) -> None:
        self.starts, self.steps = 0, 0

    def on_train_start(self, *_: Any) -> None:
        self.starts, self.steps = self.starts + 1, 0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.steps += 1
        rank = -1 if os.environ.get(LATE) else int(os.environ["RANK"])
        if (rank == 2 and self.steps == 4) or (rank == 0 and self.starts == 2 and self.steps == 5):
            os.kill(os.getpid(), signal.SIGKILL)


class KeepsLosses(pl.Callback):
    """Keeps the strategy's records of ranks that were lost or have joined, which the monitor does not record itself."""

    def __init__(self) -> None:
        self.losses: list[dict[str, Any]] = []

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        self.losses = [asdict(loss) for loss in strategy.recovery.losses]


def _others_join(folder: str) -> Any:
    os.chdir(folder)
    monitor, keeper = HeteroMonitor(f"{folder}/report"), KeepsLosses()
    grown("HeteroDDPStrategy", {"balance": "off"}, f"{folder}/job", 1, [lambda: monitor, lambda: keeper, Dies])
    return keeper.losses, [] if monitor.summary is None else monitor.summary.verdict.sentences


def test_the_report_tells_all_changes_also_those_before_others_have_joined(tmp_path: Path) -> None:
    outcomes = grow(3, 1, _others_join, str(tmp_path))
    assert [outcomes[rank].exitcode for rank in (0, 2)] == [-signal.SIGKILL] * 2
    (losses, sentences), (late, _) = values([outcomes[1], outcomes[3]])
    assert [(loss["lost"], loss["joined"]) for loss in losses] == [({2: DIED}, ()), ({}, (2,)), ({0: DIED}, ())]
    assert len(late) == 2  # it was not there before

    found = json.loads((tmp_path / "report" / "figures.json").read_text())
    changes = found["changes"]
    for change, loss in zip(changes, losses, strict=True):
        assert {int(rank): how for rank, how in change["lost"].items()} == loss["lost"]
        for key in ("view", "step", "ranks", "replicas", "samples"):
            assert change[key] == loss[key], key
        assert tuple(change["joined"]) == loss["joined"]
    assert [list(change["stalls"]) for change in changes] == [
        ["0", "1"],
        ["1", "2"],
        ["1", "2"],
    ]  # rank 0 reported the first change when others joined
    assert [change["stalls"]["1"] for change in changes] == [loss["seconds"] for loss in losses]
    assert [change["writer"] for change in changes] == [0, 0, 1]
    assert changes[0]["at"] < 0 < changes[1]["at"] < changes[2]["at"]
    times = [loss["at"] for loss in losses]  # by another clock, which was read once more while the ranks met
    assert np.allclose(np.diff([change["at"] for change in changes]), np.diff(times), atol=0.5)
    assert found["verdict"]["slowest"] is not None  # nobody is missing: those who were lost before are not expected

    page = (tmp_path / "report" / "report.html").read_text()
    texts = [
        f"Rank 2 {DIED}. Training went on with 2 ranks after step {losses[0]['step']}, ",
        f"Rank 2 joined. Training went on with 3 ranks after step {losses[1]['step']}, ",
        f"Rank 0 {DIED}. Training went on with 2 ranks after step {losses[2]['step']}, ",
    ]
    places = [page.index(text) for text in texts]
    assert places == sorted(places)
    assert [sentence.startswith(text) for sentence, text in zip(sentences, texts, strict=False)] == [True] * 3
    assert "before others joined, when the time lines begin" in sentences[0]


def _members(number: int, rank: int, world: int) -> Any:
    at = SimpleNamespace(host="here", device="cpu")
    ids = tuple(range(world))
    return SimpleNamespace(number=number, rank=rank, ids=ids, ranks=(ids,), places=[at] * world)


def test_changes_go_through_several_joins_also_to_those_who_join() -> None:
    """Stalls are those of the ranks at the time, by their numbers then; a rank that joins gets all earlier changes."""
    old = [MembershipHistory(_members(0, rank, 3), 100.0 * rank) for rank in range(3)]
    lost = [MembershipChange(1, {0: "died"}, 2, 1, 0.5 + rank, 7, 4, at=100.0 * rank + 3) for rank in range(3)]
    history = [None if rank == 0 else old[rank].until(100.0 * rank + 10, [lost[rank]]) for rank in range(3)]
    view, joins = (
        [history[1], history[2], None],
        [MembershipChange(2, {}, 3, 1, 0.1, 0, 9, (2,), at=200.0 + rank) for rank in range(3)],
    )
    new = [MembershipHistory(_members(2, rank, 3), 200.0, view) for rank in range(3)]
    again = [one.until(205.0, [lost[1], join]) for one, join in zip(new, joins, strict=True)]
    last = MembershipHistory(_members(3, 3, 4), 50.0, [*again, None])
    dead = MembershipChange(4, {1: "died"}, 3, 1, 0.2, 0, 12, at=51.0)
    seen = RankRecord(0, [], [], [], [], [], None, (MembershipChange(4, {1: "died"}, 3, 1, 0.4, 0, 12, at=1.0),))
    first, second, third = last.changes([dead], [seen])
    assert first == ReportedChange(1, {0: "died"}, 2, 1, 2.5, 7, 4, stalls={1: 1.5, 2: 2.5}, writer=1)
    assert second == ReportedChange(2, {}, 3, 1, 0.1, 0, 9, (2,), stalls={0: 0.1, 1: 0.1, 2: 0.1}, writer=0)
    assert third == ReportedChange(4, {1: "died"}, 3, 1, 0.4, 0, 12, stalls={0: 0.4, 3: 0.2}, writer=0)
    assert [change.at for change in (first, second, third)] == [-12.0, -5.0, 1.0]  # no part of the comparison


def test_who_was_lost_while_others_joined_is_not_missed_among_those_that_began_again() -> None:
    """A loss renumbers all ranks; the lost rank's number is then that of another one."""
    attendance = MembershipHistory(_members(5, 0, 2), 10.0)
    [change] = attendance.changes([MembershipChange(5, {0: "died"}, 2, 1, 0.5, 0, 4, at=11.0)], [])
    assert (change.writer, change.ranks) == (0, 2)
    assert fit(changes=[change]).living == 2


def _red(png: bytes) -> int:
    return int((np.abs(imread(io.BytesIO(png))[..., :3] - to_rgb(LOST)).max(-1) < 0.3).sum())


@pytest.mark.long
def test_pictures_mark_when_a_rank_was_lost() -> None:
    change = ReportedChange(1, {2: "has left"}, 2, 2, 0.2, 5, 3, at=0.35, stalls={0: 0.2, 1: 0.1})
    plain, marked = draw(fit()), draw(fit(changes=[change]))
    for before, after in zip(plain, marked, strict=True):
        assert (_red(after.png) > _red(before.png) + 20) == (after.name in ("timeline", "shares")), after.name
        assert ("A red line" in after.caption) == (after.name in ("timeline", "shares"))
        assert "A red line" not in before.caption
