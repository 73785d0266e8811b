"""The page of a report, as a browser shows it."""

import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from matplotlib.image import imread
from ranks import run
from test_report import _fit, figures

from lightning_hetero import GossipStrategy
from lightning_hetero.callbacks.monitor import HeteroMonitor

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
    assert len(sizes) == pictures >= 6
    assert min(sizes) > 500
    headline = figures(folder)["verdict"]["headline"]
    assert f'<p class="headline">{headline}</p>' in shown
    assert "Who has met whom" in shown
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
