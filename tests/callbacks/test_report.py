"""The report: figures that agree with what is known by hand, a page that a browser shows, and nothing unasked for."""

import json
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger
from matplotlib.colors import rgb_to_hsv, to_rgb
from ranks import attempt, run
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader, Dataset
from virtual_time import virtual_time

from lightning_hetero import DASOStrategy, HeteroDDPStrategy
from lightning_hetero.callbacks.emulation import EmulatedSpeed
from lightning_hetero.callbacks.monitor import HeteroMonitor
from lightning_hetero.callbacks.monitor_data import ExchangeRecord, FitRecord, RankRecord, StepSpan, coarsen
from lightning_hetero.callbacks.plots import CAUSES, NEUTRAL, WAITING, _during, _held, _last_full_batch, colours, draw
from lightning_hetero.callbacks.report import PICTURES, write

COSTS = [(0.02, 0.0025), (0.02, 0.01)]
PER_RANK = 8


class Slow(Dataset):
    """Rank 1 needs a while for each sample."""

    def __init__(self, samples: int) -> None:
        self.data, self.rank = dataset(samples), None

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Any:
        time.sleep(0.003 if pl.utilities.rank_zero_only.rank == 1 else 0.0)
        return self.data[i]


class Fail(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 12 and trainer.global_rank == 1:
            raise RuntimeError("the <cat> sat on the cable")


def _fit(root: Path, strategy: Any, monitor: HeteroMonitor, data: Any = None, **options: Any) -> pl.Trainer:
    settings = {**FAST, "default_root_dir": root, "max_epochs": 2, **options}
    trainer = pl.Trainer(strategy=strategy, **{**settings, "callbacks": [*settings.get("callbacks", []), monitor]})
    trainer.fit(Net(), DataLoader(dataset(384) if data is None else data, batch_size=PER_RANK))
    return trainer


def _paced(root: Path) -> None:
    """Rank 1 is slow, by a clock that all ranks share."""
    even = HeteroDDPStrategy(balance="off")
    _fit(root, even, HeteroMonitor("report"), callbacks=[EmulatedSpeed(COSTS)], max_epochs=1)


def _affine(root: Path) -> None:
    costs = [(0.010, 0.0005), (0.010, 0.002)]
    with virtual_time():
        strategy = HeteroDDPStrategy(global_batch_size=32)
        _fit(root, strategy, HeteroMonitor("report"), dataset(2560), callbacks=[EmulatedSpeed(costs)], max_epochs=4)


def _slow_data(root: Path) -> None:
    with virtual_time(sys.modules[__name__]):
        emulated = EmulatedSpeed([(0.01, 0.0), (0.01, 0.0)])
        strategy = HeteroDDPStrategy(balance="off")
        _fit(root, strategy, HeteroMonitor("report"), Slow(160), callbacks=[emulated], max_epochs=1)


def _fits(root: Path) -> dict[str, Any]:
    daso = DASOStrategy(warmup=2, cooldown=2, ranks_per_node=1, balance="off")
    _fit(root / "daso", daso, HeteroMonitor(), logger=CSVLogger(root / "logs", version="first"), max_epochs=1)
    fixed = HeteroDDPStrategy(balance=[1, 0])
    _fit(root / "padding", fixed, HeteroMonitor(), dataset(64), max_epochs=1)
    none = HeteroMonitor(report=None)
    _fit(root / "none", HeteroDDPStrategy(), none, max_epochs=1)
    _fit(root / "fast", HeteroDDPStrategy(), HeteroMonitor(), fast_dev_run=True)
    (root / "a_file").touch()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _fit(root, HeteroDDPStrategy(), HeteroMonitor("a_file/report"), max_epochs=1)
    words = [str(warning.message) for warning in said if "HeteroMonitor" in str(warning.message)]
    return {"said": words, "values": sum(p.numel() for p in Net().parameters()), "history": len(none.history)}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("reports")
    return root, run(_fits, 2, root)


def figures(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "figures.json").read_text())


@pytest.mark.clock
def test_the_slow_device_is_named_and_its_times_are_those_it_was_given(tmp_path: Path) -> None:
    run(_paced, 2, tmp_path)
    found = figures(tmp_path / "report")
    assert (found["verdict"]["slowest"], found["verdict"]["cause"]) == (1, "compute")
    fast, slow = (view["settled"] for view in found["views"])
    assert fast["samples"] == slow["samples"] == 12 * PER_RANK  # the second half of 24 steps
    assert sum(s["samples"] for s in found["views"][0]["stretches"]) == 24 * PER_RANK
    assert slow["first"] == 12
    # Of each step the emulated part is 40 and 100 ms; the rest is Python and a busy machine.
    assert 0.040 < fast["compute"] / 12 < 0.090
    assert 0.100 < slow["compute"] / 12 < 0.150
    assert 0.020 < (fast["wait"] - slow["wait"]) / 12 < 0.100  # about the 60 ms between them
    assert found["verdict"]["spent"]["waiting"] > 0.15
    words = (tmp_path / "report" / "report.html").read_text()
    assert "Rank 1 is the slowest, because of its compute" in words
    assert "<li>Ranks wait for slower ones: set balance=&#x27;auto&#x27;" in words
    # The clocks of all ranks begin together: under data parallelism, steps end together, after the all-reduce.
    ends = [
        [s["began"] + s["data"] + s["compute"] + s["wait"] for s in view["beginning"][4:20]] for view in found["views"]
    ]
    apart = sorted(abs(a - b) for a, b in zip(*ends, strict=True))
    assert apart[len(apart) // 2] < 0.03
    assert 0 <= found["views"][0]["beginning"][0]["began"] < 1


@pytest.mark.long
def test_a_rank_with_few_samples_is_judged_by_its_fit(tmp_path: Path) -> None:
    run(_affine, 2, tmp_path)
    verdict = figures(tmp_path / "report")["verdict"]
    assert (verdict["slowest"], verdict["cause"]) == (1, "compute")
    assert verdict["times"] == pytest.approx(42 / 18, rel=0.02)  # ms for 16 samples; per sample, with 26 and 6, 4.1
    assert verdict["gain"] == pytest.approx(42 / 23, rel=0.06)  # ms, even and at best; shares stop near it
    words = (tmp_path / "report" / "report.html").read_text()
    assert "times as fast as an even one" in words


def test_slow_data_are_told_from_slow_compute(tmp_path: Path) -> None:
    run(_slow_data, 2, tmp_path)
    found = figures(tmp_path / "report")
    assert (found["verdict"]["slowest"], found["verdict"]["cause"]) == (1, "data")
    fast, slow = (view["settled"] for view in found["views"])
    assert slow["data"] == pytest.approx((slow["steps"] - 1) * 8 * 0.003)  # in the last step there is no next batch
    assert fast["data"] == 0.0


@pytest.mark.long
def test_what_an_exchange_costs(reports: Any) -> None:
    root, [result, *_] = reports
    folder = root / "logs" / "lightning_logs" / "first" / "hetero_report"
    found = figures(folder)
    last = found["views"][0]["exchanges"][-1]
    # 24 steps: two of the warm-up and two of the cool-down block; of those between, every fourth begins an exchange.
    # Between two replicas an all-reduce sends a vector once: these parameters, which are float64, as they are.
    assert last["exchanges"] == 9
    assert last["bytes"] == 9 * 8 * result["values"]
    assert last["status"]["phase"] == "cool-down"
    assert sum(s["exchange"] for s in found["views"][0]["stretches"]) >= 0.9 * last["exposed"] > 0
    assert {picture.stem for picture in folder.glob("*.png")} == {
        "timeline", "parts", "shares", "speed", "exchanges", "course",
    }  # fmt: skip
    assert not (root / "daso").exists()  # the logger has a folder


def test_a_rank_without_samples_takes_part_but_does_not_count(reports: Any) -> None:
    found = figures(reports[0] / "padding" / "hetero_report")
    assert [sum(s["samples"] for s in view["stretches"]) for view in found["views"]] == [64, 0]
    assert found["views"][1]["samples_per_s"] == 0


def test_no_report_unless_asked_for(reports: Any) -> None:
    root, results = reports
    assert not any((root / name).exists() and any((root / name).iterdir()) for name in ("none", "fast"))
    assert all(result["history"] for result in results)


def _fail(root: Path) -> None:
    _fit(root, HeteroDDPStrategy(), HeteroMonitor(), callbacks=[Fail()])


def test_an_error_ends_the_fit_before_the_timeout_and_rank_zero_reports_what_it_saw(
    tmp_path: Path,
) -> None:
    outcomes = attempt(_fail, 2, tmp_path)
    assert not any(outcome.late for outcome in outcomes)
    assert "the <cat> sat on the cable" in str(outcomes[1].error)
    assert outcomes[0].error is not None
    found = figures(tmp_path / "hetero_report")
    assert [view["rank"] for view in found["views"]] == [0]
    assert found["ended"].startswith(type(outcomes[0].error).__name__)
    words = (tmp_path / "hetero_report" / "report.html").read_text()
    assert "ended early by" in words
    assert "Only rank 0&#x27;s view is there" in words


def fit(**changes: Any) -> FitRecord:
    """Two ranks, a replica each, that have exchanged."""
    steps = [StepSpan(i, 1, 0.1 * i, 8, 0.01, 0.06, 0.0, 0.03) for i in range(20)]
    exchanges = [
        ExchangeRecord(i, i, 100 * i, 0.1 * i, 0.0, float("nan"), {"center_distance": 1.0}) for i in range(1, 20)
    ]
    views = [RankRecord(rank, steps, steps[:5], steps[-5:], [(0.1, 0.2)], exchanges) for rank in (0, 1)]
    facts = {"model": "<Net>", "strategy": "Gossip & Co", "options": "a=<script>"}
    places = [("one", "cpu"), ("two", "cpu")]
    return FitRecord(views, ((0,), (1,)), places, False, True, facts, [[0, 3], [3, 0]], None)._replace(**changes)


def test_what_users_have_written_is_escaped_and_json_is_json(tmp_path: Path) -> None:
    where = write(str(tmp_path / "new" / "folder"), fit(ended="Error: <b>")).path
    page = Path(where).read_text()
    for text in ("<Net>", "<script", "Gossip & Co", "<b>"):
        assert text not in page
    assert "Gossip &amp; Co" in page
    assert json.loads((tmp_path / "new" / "folder" / "figures.json").read_text())["views"][0]["exchanges"][0][
        "distance"
    ] is None  # fmt: skip


def test_without_matplotlib_there_are_tables_and_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_hetero.callbacks.report.find_spec", lambda name: None)
    page = Path(write(str(tmp_path), fit()).path).read_text()
    assert "pip install 'lightning-hetero[plots]'" in page
    assert "<img" not in page
    assert "Completed exchanges" in page
    assert not list(tmp_path.glob("*.png"))


def test_pictures_of_an_earlier_report_go_and_nothing_else(tmp_path: Path) -> None:
    drawn = {Path(f"{picture.name}.png") for picture in draw(fit())}
    assert drawn <= {Path(f"{name}.png") for name in PICTURES}
    for name in ("pairings", "exchanges", "holiday"):
        (tmp_path / f"{name}.png").write_text("earlier")
    views = [view._replace(exchanges=[]) for view in fit().views]
    write(str(tmp_path), fit(views=views, pairings=None))
    assert {picture.stem for picture in tmp_path.glob("*.png")} == {"timeline", "parts", "shares", "speed", "holiday"}


def test_no_colour_means_two_things() -> None:
    causes = {*CAUSES.values(), WAITING}
    for count in (1, 8, 9, 64):
        assert not causes & {*colours(count), *NEUTRAL}
    seen = [rgb_to_hsv(to_rgb(colour)) for colour in CAUSES.values()]
    hues = sorted(360 * hue for hue, _, _ in seen)
    apart = [(b - a) % 360 for a, b in zip(hues, [*hues[1:], hues[0]], strict=True)]
    assert min(apart) > 40, hues  # loading data and exposed exchanges once were two oranges: 41 and 27


def test_speeds_are_in_wall_time() -> None:
    # 4 steps of 8 samples in 0.4 s, a pause of 0.6 s, once again; the last step is short.
    began = [0.0, 0.1, 0.2, 0.3, 1.0, 1.1, 1.2, 1.3]
    steps = [StepSpan(i, 1, at, 8 if i < 7 else 1, 0.0, 0.05, 0.05, 0.0) for i, at in enumerate(began)]
    view = RankRecord(0, steps, steps, steps, [], [])
    samples, work = _during(view, np.array([0.0, 0.2, 0.4, 1.0, 1.4]))
    assert samples == pytest.approx([16, 16, 0, 25])
    assert work == pytest.approx([0.1, 0.1, 0.0, 0.2])
    assert _held(samples, work) == pytest.approx([160, 160, 160, 125])
    assert _last_full_batch([view, view]) == [8, 8]
    # Seen from afar, steps and the pause between them are one stretch.
    samples, _ = _during(view._replace(stretches=coarsen(steps, 1)), np.array([0.0, 0.7, 1.4]))
    assert samples == pytest.approx([28.5, 28.5])


def test_a_report_that_cannot_be_written_does_not_end_the_training(reports: Any) -> None:
    [words], nothing = (result["said"] for result in reports[1])
    assert re.search("could not write its report to .*a_file/report: ", words)
    assert nothing == []
