"""The gossip example under torchrun: the fast rank does not wait for the slow one, and they learn."""

import re
from pathlib import Path

import pytest
from scripts import run_script

EXAMPLE = Path(__file__).parents[1] / "examples" / "gossip.py"


@pytest.mark.long
@pytest.mark.clock
def test_gossip(tmp_path: Path) -> None:
    results = run_script(EXAMPLE, "--epochs", "3", "--late", "0.05", folder=tmp_path, ranks=3)
    assert [status for status, _ in results] == [0] * 3, results
    output = results[0][1]
    assert float(re.search(r"on the test digits: ([\d.]+)%", output).group(1)) > 80
    fast, slow = map(float, re.search(r"needed ([\d.]+) s for .* needs ([\d.]+) s", output).groups())
    assert fast < 0.7 * slow
    rows = re.findall(r"^ +(\d)((?: +(?:\d+|-))+)$", output, re.MULTILINE)  # the table of pairings
    table = [[0 if word == "-" else int(word) for word in row.split()] for _, row in rows]
    assert len(table) == 3
    assert sum(map(sum, table)) > 0
    assert table == [list(column) for column in zip(*table, strict=True)]  # both of a pair have counted
