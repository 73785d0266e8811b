"""What a monitor shows of itself in a notebook: the numbers of its history, and nothing that a name could break."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from test_report import fit

from lightning_hetero import HeteroMonitor
from lightning_hetero.callbacks.monitor_data import Record
from lightning_hetero.callbacks.report import notebook_html, write

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
    )  # too short a fit for ranks to tell anything
    assert not re.search("<Net>|<script", notebook_html(HISTORY, summary))


def test_without_matplotlib_there_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_hetero.callbacks.report.find_spec", lambda name: None)
    page = Reader(notebook_html(HISTORY, write(str(tmp_path), fit())))
    assert page.images == []
    assert len(page.cells) == 3
