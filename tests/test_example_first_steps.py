"""The notebook runs from top to bottom in a kernel of its own, and shows what its texts say."""

import re
from html import unescape
from pathlib import Path

import nbclient
import nbformat
import pytest
from leftovers import watched

NOTEBOOK = Path(__file__).parents[1] / "examples" / "first_steps.ipynb"


def test_it_is_stored_without_outputs() -> None:
    """They would be those of one machine, on one day."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) > 5
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


@pytest.mark.long
def test_it_runs_and_the_fast_device_takes_more(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with watched() as running:
        client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
        client.execute()
        assert running() == []
    shown = [_shown(cell) for cell in notebook.cells if cell.cell_type == "code"]
    printed = "\n".join(texts for texts, _ in shown)
    assert re.search(r"hetero_ddp +62 ms a step", printed), printed  # by hand: 10 + 52 * 1 and 10 + 12 * 4 ms
    assert re.search(r"^ddp +138 ms a step", printed, re.MULTILINE), printed  # 10 + 32 * 4
    assert "the best split of 64 samples: 52 12" in printed
    fast, slow, times = map(float, re.findall(r"(\d+) samples/s by speed, (\d+) .*: ([\d.]+) times", printed)[0])
    assert times == pytest.approx(fast / slow, abs=0.02)
    assert times > 1.4  # 2.2 by hand; less on a busy machine
    by_speed, even = (unescape(page) for _, page in shown if page)
    assert f"{fast:,.0f} samples/s" in by_speed
    assert f"{slow:,.0f} samples/s" in even
    shares = re.findall(r"<tr><td>(\d)</td><td>([\d.]+)</td>", by_speed)
    assert [rank for rank, _ in shares] == ["0", "1"]
    assert 46 <= float(shares[0][1]) <= 56
    assert re.findall(r"<tr><td>(\d)</td><td>([\d.]+)</td>", even) == [("0", "32"), ("1", "32")]
    for page, report in ((by_speed, "by_speed"), (even, "even")):
        assert "data:image/png;base64," in page
        assert (tmp_path / "reports" / report / "report.html").exists()


def _shown(cell: nbformat.NotebookNode) -> tuple[str, str]:
    """What a cell has printed, and its HTML."""
    assert not [output for output in cell.outputs if output.output_type == "error"]
    printed = "".join(output.text for output in cell.outputs if output.output_type == "stream")
    return printed, "".join(output.data.get("text/html", "") for output in cell.outputs if "data" in output)
