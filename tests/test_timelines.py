"""The time lines of README and of the strategies' pages follow their own rules."""

import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "images"))
import timelines
from gains import ddp, slow_link

DOCS = Path(__file__).parents[1] / "docs"

LANES = [(name, i) for name, (_, make) in timelines.PICTURES.items() for i in range(len(make()))]


def lane_of(name: str, i: int) -> Any:
    return timelines.PICTURES[name][1]()[i]


def begun(lane: Any) -> list[list[int]]:
    """Partners of each exchange in the background, in the order of time."""
    return [rows for at, rows, kind in sorted(lane.links) if kind == "hidden"]


def steps_before(lane: Any, row: int, at: float) -> int:
    return sum(kind == "compute" and own == row and began < at - 1e-9 for own, began, _, kind in lane.spans)


@pytest.mark.parametrize(("name", "i"), LANES, ids=[f"{name}-{i}" for name, i in LANES])
def test_a_rank_does_one_thing_at_a_time_and_leaves_no_gap(name: str, i: int) -> None:
    lane = lane_of(name, i)
    for row in range(len(lane.rows) - (lane.center is not None)):
        own = sorted((began, length) for at, began, length, kind in lane.spans if at == row and kind != "hidden")
        assert own[0][0] == 0
        assert own[-1][0] + own[-1][1] >= lane.until
        assert all(a + length == pytest.approx(b) for (a, length), (b, _) in pairwise(own))


def test_the_gain_is_that_of_the_arithmetic() -> None:
    even, best = ddp()
    ends = [
        sorted({round(at) for at, _, kind in lane.links if kind == "averages gradients"})[:3] for lane in (even, best)
    ]
    assert ends == [[138, 276, 414], [58, 116, 174]]  # as benchmarks.md has it by hand: 10 + 16 * 8, and the best split
    assert re.findall(r"\d+ steps", even.title + best.title) == ["5 steps", "12 steps"]
    assert sum(int(text) for _, _, text, _ in best.texts[:4]) == 64
    plain, daso = slow_link()
    # A ring of four sends six quarters of 8.6 MB over a link of 25 MB/s; half of a step of 70 ms hides some of it.
    [first, *_] = [length for _, _, length, kind in plain.spans if kind == "exchange"]
    assert first == pytest.approx(1e3 * 6 * (8.6 / 4 / 25 + 0.0002) - 35)
    assert begun(daso)[:3] == [[0, 2], [1, 3], [0, 2]]


def test_daso_takes_turns_and_mixes_two_steps_later() -> None:
    lane = lane_of("hetero_daso", 0)
    assert [rows for _, rows, kind in lane.links if kind == "exchange"] == [[0, 1, 2, 3]] * 2  # the warm-up
    assert begun(lane)[:3] == [[0, 2], [1, 3], [0, 2]]
    mixed = [steps_before(lane, row, at) for row, at in lane.mixed if row == 0]
    assert mixed[:3] == [8, 12, 16]  # begun after steps 6, 10, 14: every fourth since the two of the warm-up


@pytest.mark.parametrize(("name", "i"), [("hetero_easgd", 2), ("hetero_diloco", 2)])
def test_a_center_serves_one_at_a_time(name: str, i: int) -> None:
    lane = lane_of(name, i)
    served = sorted((began, began + length) for row, began, length, _ in lane.spans if row == lane.center)
    assert len(served) > 8
    assert all(end <= began + 1e-9 for (_, end), (began, _) in pairwise(served))


def test_every_page_begins_with_its_use_code_picture_and_a_figure(tmp_path: Path) -> None:
    for name, (columns, make) in timelines.PICTURES.items():
        timelines.draw(make(), columns, tmp_path / f"timeline_{name}.png")
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (DOCS / "images").glob("timeline_*.png")}
    pages = sorted(DOCS.glob("hetero_*.md"))
    assert {f"timeline_{page.stem}.png" for page in pages} == drawn - {"timeline_gain.png"}
    for page in pages:
        _, use, code, *parts = re.split(r"\n\n(?!trainer|strategy)", page.read_text())
        assert use.startswith("**Use it when** "), page
        assert code.startswith("```python"), page
        picture, figure, *_ = parts
        assert picture.startswith("![Time lines"), page
        assert f"images/timeline_{page.stem}.png" in picture
        assert re.match(r"\*\*[^*]*\d", figure), page
        assert "benchmarks.md#" in figure or "peers.md" in figure, page


def test_fragments_take_turns() -> None:
    lane = lane_of("hetero_diloco", 1)
    assert [text for _, _, text, _ in lane.texts][:6] == ["part 1", "part 2", "part 0", "part 1", "part 2", "part 0"]
    assert [steps_before(lane, 0, at) for row, at in lane.mixed if row == 0][:3] == [4, 6, 8]
