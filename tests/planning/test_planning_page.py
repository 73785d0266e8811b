"""A figure from a paper in docs/archive/benchmarks.md: checked by the command that the page shows, and by hand."""

import re
import shlex
from pathlib import Path

import pytest

from lightning_hetero.cli import main
from lightning_hetero.planning.cluster import bytes_per_second

PAGE = (Path(__file__).parents[2] / "docs" / "archive" / "benchmarks.md").read_text()
SECTION = re.search(r"## Against a figure.*?(?=\n## |\Z)", PAGE, re.DOTALL).group()
COMMAND = shlex.split(re.search(r"```bash\nlightning-hetero (plan .*)\n```", SECTION).group(1))
HEAD, _, *ROWS = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in re.findall(r"^\|.*$", SECTION, re.M)]
RING = 2 * 62 * (28e6 / 63 / 10e9 + 2e-6)  # 63 ranks, 7 million parameters
FIGURES = [(step, rate, figure) for step, *cells in ROWS for rate, figure in zip(HEAD[1:], cells, strict=True)]


@pytest.mark.parametrize(("step", "rate", "figure"), FIGURES)
def test_efficiencies_are_those_of_the_row_of_the_papers_strategy(step, rate, figure, capsys):
    option, rate = rate.split()
    assert (HEAD[0], option) == ("--step", "--handling")
    main([*COMMAND, "--step", step, option, rate, "--most", "1"])  # the last ones count
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("hetero_easgd ")]
    assert row.split()[-1] == figure
    by_hand = float(step) / (float(step) + RING + 28e6 / bytes_per_second(rate))
    assert f"{by_hand:.0%}" == figure


def test_the_command_is_one_of_the_cells_and_its_figures_are_told():
    given = dict(zip(COMMAND[1::2], COMMAND[2::2], strict=True))
    assert given["--step"] in [row[0] for row in ROWS]
    assert f"--handling {given['--handling']}" in HEAD
    assert f"an exchange takes {1e3 * RING:.0f} ms" in SECTION
    assert RING / (float(given["--step"]) + RING) < 0.02
