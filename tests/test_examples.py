"""The examples run as their readers would run them, and do what they say."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
from leftovers import watched
from ranks import free_port
from scripts import run_script

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.long
@pytest.mark.parametrize("devices", ["1", "2"])
def test_digits(tmp_path: Path, devices: str) -> None:
    arguments = ["--devices", devices, "--epochs", "6"]
    if devices == "1":
        [(status, output)] = run_script(EXAMPLES / "digits.py", *arguments, folder=tmp_path)
        assert status == 0, output
    else:  # Lightning starts the other rank
        output = run([sys.executable, EXAMPLES / "digits.py", *arguments], tmp_path)
    accuracy = float(re.search(r"test accuracy: ([\d.]+)%", output).group(1))
    assert accuracy > 85
    shares = re.search(r"samples per step of each rank: \(([\d, ]+)\)", output).group(1)
    assert sum(int(share) for share in re.findall(r"\d+", shares)) == 32 * int(devices)
    with (tmp_path / re.search(r"all measurements: (.*)", output).group(1)).open() as table:
        rows = list(csv.DictReader(table))
    assert sum(bool(row["hetero/waiting"]) for row in rows) > 5
    assert f"hetero/share/rank{int(devices) - 1}" in rows[0]
    assert "samples/s" in (tmp_path / re.search(r"who waited: (.*)", output).group(1)).read_text()


@pytest.mark.long
def test_torchrun_with_two_ranks_on_one_node_and_one_on_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", str(free_port()))  # which no connection gets in the meantime
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    output = run([EXAMPLES / "torchrun" / "launch.sh"], tmp_path)
    ranks = re.findall(r"rank (\d) of 3, on node (\d): (\d+) samples per step", output)
    assert sorted((int(rank), int(node)) for rank, node, _ in ranks) == [(0, 0), (1, 0), (2, 1)]
    assert sum(int(samples) for *_, samples in ranks) == 3 * 128


def run(command: list[str | Path], folder: Path) -> str:
    """What a command prints, in a folder of its own."""
    with watched() as running:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert running() == []
    return done.stdout + done.stderr
