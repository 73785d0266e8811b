"""The report: figures by hand, its page in a browser and in a notebook, and no files that nobody asked for."""

import base64
import json
import re
import shutil
import subprocess
import sys
import time
import warnings
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger
from matplotlib.colors import rgb_to_hsv, to_rgb
from matplotlib.image import imread
from ranks import attempt, run
from tasks import Net, dataset, train
from torch.utils.data import DataLoader, Dataset
from virtual_time import virtual_time

from lightning_hetero import DASOStrategy, GossipStrategy, HeteroDDPStrategy, HeteroMonitor
from lightning_hetero.callbacks.emulation import EmulatedSpeed
from lightning_hetero.callbacks.monitor_data import ExchangeRecord, FitRecord, RankRecord, Record, StepSpan
from lightning_hetero.callbacks.plots import CAUSES, WAITING, _last_full_batch, colours, draw
from lightning_hetero.callbacks.report import PICTURES, notebook_html, write

PER_RANK = 8


class Slow(Dataset):
    """A dataset that is slow on rank 1, for each sample."""

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
    settings = {"default_root_dir": root, "max_epochs": 2, **options}
    settings["callbacks"] = [*settings.get("callbacks", []), monitor]
    return train(Net(), strategy, DataLoader(dataset(384) if data is None else data, batch_size=PER_RANK), **settings)


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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _fit(root, HeteroDDPStrategy(), HeteroMonitor("a_file/report"), max_epochs=1)
    words = [str(warning.message) for warning in caught if "HeteroMonitor" in str(warning.message)]
    return {"messages": words, "values": sum(p.numel() for p in Net().parameters()), "history": len(none.history)}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("reports")
    return root, run(_fits, 2, root)


def figures(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "figures.json").read_text())


@pytest.mark.long
def test_a_rank_with_few_samples_is_judged_by_its_fit(tmp_path: Path) -> None:
    run(_affine, 2, tmp_path)
    verdict = figures(tmp_path / "report")["verdict"]
    assert (verdict["slowest"], verdict["cause"]) == (1, "compute")
    assert verdict["times"] == pytest.approx(42 / 18, rel=0.02)  # ms for 16 samples; per sample, with 26 and 6, 4.1
    assert verdict["gain"] == pytest.approx(42 / 23, rel=0.06)  # ms, even and at best; shares stop near it
    words = (tmp_path / "report" / "report.html").read_text()
    assert "times as fast as an even one" in words
    assert "Rank 1 is the slowest, because of its compute" in words
    views = figures(tmp_path / "report")["views"]
    assert sum(s["samples"] for view in views for s in view["stretches"]) == 4 * 2560


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
    assert {picture.stem for picture in folder.glob("*.png")} == {"timeline", "parts", "shares"}
    assert not (root / "daso").exists()  # the logger has a folder


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
    """Record of a fit of two replicas of one rank that have exchanged."""
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
    shown = Reader(notebook_html(HISTORY, write(str(tmp_path), fit())))
    assert shown.images == []
    assert len(shown.cells) == 3


def test_pictures_of_an_earlier_report_go_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuple(picture.name for picture in draw(fit())) == PICTURES
    for name in (*PICTURES, "holiday"):
        (tmp_path / f"{name}.png").write_text("earlier")
    monkeypatch.setattr("lightning_hetero.callbacks.report.find_spec", lambda name: None)
    write(str(tmp_path), fit())
    assert {picture.stem for picture in tmp_path.glob("*.png")} == {"holiday"}


def test_no_colour_means_two_things() -> None:
    causes = {*CAUSES.values(), WAITING}
    for count in (1, 8, 9, 64):
        assert not causes & {*colours(count)}
    seen = [rgb_to_hsv(to_rgb(colour)) for colour in CAUSES.values()]
    hues = sorted(360 * hue for hue, _, _ in seen)
    gaps = [(b - a) % 360 for a, b in zip(hues, [*hues[1:], hues[0]], strict=True)]
    assert min(gaps) > 40, hues  # 41 and 27 would be too near: two oranges


def test_the_numbers_beside_the_shares_are_of_a_whole_batch() -> None:
    steps = [StepSpan(i, 1, 0.1 * i, 8 if i < 7 else 1, 0.0, 0.05, 0.05, 0.0) for i in range(8)]  # the last is short
    view = RankRecord(0, steps, steps, steps, [], [])
    assert _last_full_batch([view, view]) == [8, 8]


def test_padding_is_no_sample_none_is_written_unasked_and_no_report_ends_the_training(reports: Any) -> None:
    root, results = reports
    views = figures(root / "padding" / "hetero_report")["views"]
    assert [sum(s["samples"] for s in view["stretches"]) for view in views] == [64, 0]
    assert views[1]["samples_per_s"] == 0
    assert not any((root / name).exists() and any((root / name).iterdir()) for name in ("none", "fast"))
    assert all(result["history"] for result in results)
    [words], nothing = (result["messages"] for result in results)
    assert re.search("could not write its report to .*a_file/report: ", words)
    assert nothing == []


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def _gossip(root: Path) -> None:
    strategy = GossipStrategy(every_n_steps=2, replica="rank")
    _fit(root, strategy, HeteroMonitor(), max_epochs=1)


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium to open the report with")
def test_a_browser_shows_the_report(tmp_path: Path) -> None:
    run(_gossip, 3, tmp_path, nodes=[1, 1, 1])
    folder = tmp_path / "hetero_report"
    # The same page, which tells the sizes of its pictures once they have loaded.
    tell = "<script>onload = () => document.body.dataset.sizes = [...document.images].map(i => i.naturalWidth)</script>"
    page = folder / "telling.html"
    page.write_text((folder / "report.html").read_text().replace("</body>", tell + "</body>"))
    shown = unescape(browse("--dump-dom", page.as_uri()))
    pictures = len(list(folder.glob("*.png")))
    sizes = [int(size) for size in re.search(r'data-sizes="([\d,]+)"', shown).group(1).split(",")]
    assert len(sizes) == pictures == 3
    assert min(sizes) > 500
    headline = figures(folder)["verdict"]["headline"]
    assert f'<p class="headline">{headline}</p>' in shown
    assert "Completed exchanges of each replica with each" in shown
    assert "GossipStrategy: Net on 3 ranks" in shown

    browse(f"--screenshot={tmp_path / 'page.png'}", "--window-size=1100,2400", (folder / "report.html").as_uri())
    screen = imread(tmp_path / "page.png")
    assert screen.shape[:2] == (2400, 1100)
    colours = {tuple(round(255 * c) for c in pixel[:3]) for pixel in screen[::3, ::3].reshape(-1, screen.shape[2])}
    assert {(255, 255, 255), (0, 114, 178), (238, 245, 251)} <= colours  # the page, who computes, the verdict's box


def browse(*arguments: str) -> str:
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000"]
    done = subprocess.run([CHROMIUM, *quiet, *arguments], capture_output=True, text=True, timeout=400, check=True)
    return done.stdout


HISTORY = [
    Record(5, (32, 32), (32.0, 32.0), compute=(0.042, 0.138), wait=(0.098, 0.002)),
    Record(85, (51, 13), (51.0, 13.0), compute=(0.061, 0.062), wait=(0.003, 0.002), ranks=(0, 2)),
]


class Reader(HTMLParser):
    """The words of a page, the cells of its table, and whether each tag is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.cells: list[list[str]] = []
        self.images: list[dict[str, str]] = []
        self.words, self.open = "", []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str]]) -> None:
        if tag == "img":
            self.images.append(dict(attributes))
        else:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data
        if self.open[-1] in ("td", "th"):
            self.cells[-1].append(data)


def test_before_a_fit_it_says_what_to_do() -> None:
    page = Reader(HeteroMonitor()._repr_html_())
    assert "has seen no fit yet. Give it to Trainer(callbacks=[...])" in page.words
    assert page.cells == page.images == []


def test_the_table_and_the_words_are_of_the_latest_record() -> None:
    page = Reader(notebook_html(HISTORY, None))
    head, *rows = page.cells
    assert head == ["rank", "samples per step", "samples/s while it works", "work, ms per step", "waiting, ms per step"]
    assert rows == [["0", "51", f"{51 / 0.061:,.0f}", "61.0", "3.0"], ["2", "13", f"{13 / 0.062:,.0f}", "62.0", "2.0"]]
    # Both ranks take the same time for a step: 64 samples in 64 ms.
    assert "After 85 steps: 1,000 samples/s; 4% of all ranks' time is waiting." in page.words


def test_with_a_report_it_has_the_verdict_the_picture_and_the_way_to_the_rest(tmp_path: Path) -> None:
    summary = write(str(tmp_path / "a&b"), fit())
    page = Reader(notebook_html(HISTORY, summary))
    assert "Gossip & Co: <Net> on 2 ranks" in page.words
    assert summary.verdict.headline in page.words
    assert all(sentence in page.words for sentence in summary.verdict.sentences)
    assert str(tmp_path / "a&b" / "report.html") in page.words
    [image] = page.images
    inside = base64.b64decode(image["src"].removeprefix("data:image/png;base64,"))
    assert inside == (tmp_path / "a&b" / "timeline.png").read_bytes()
    assert (
        summary.verdict.headline in Reader(notebook_html([], summary)).words
    )  # the fit is too short for ranks to report
    assert not re.search("<Net>|<script", notebook_html(HISTORY, summary))
