"""The gossip example runs as its readers would run it: the fast rank does not wait for the slow one, and they learn."""

import re
import subprocess
import sys
from pathlib import Path

from leftovers import watched

EXAMPLE = Path(__file__).parents[1] / "examples" / "gossip.py"


def test_gossip(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--devices", "3", "--epochs", "3", "--late", "0.05"]
    with watched() as running:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert running() == []
    output = done.stdout + done.stderr
    assert float(re.search(r"on the test digits: ([\d.]+)%", output).group(1)) > 80
    fast, slow = map(float, re.search(r"needed ([\d.]+) s for .* needs ([\d.]+) s", output).groups())
    assert fast < 0.7 * slow
    rows = re.findall(r"^ +(\d)((?: +(?:\d+|-))+)$", output, re.MULTILINE)  # the table of pairings
    table = [[0 if word == "-" else int(word) for word in row.split()] for _, row in rows]
    assert len(table) == 3
    assert sum(map(sum, table)) > 0
    assert table == [list(column) for column in zip(*table, strict=True)]  # both of a pair have counted
