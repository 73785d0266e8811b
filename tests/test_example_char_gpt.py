"""The small GPT trains over nodes, alone and under torchrun, learns, and writes."""

import csv
import re
from pathlib import Path

import pytest
from scripts import run_script

EXAMPLE = Path(__file__).parents[1] / "examples" / "daso_char_gpt.py"
SIZES = {"text": 32 * 3200 + 1, "context": 32, "batch-size": 16, "width": 32, "layers": 1, "lr": 0.01, "write": 200}
WINDOWS = 3200 * 19 // 20  # to train on
HARMLESS = "does not have many workers|LeafSpec|tensorboardX"  # nothing that a user could act on, as in pyproject.toml


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_char_gpt(tmp_path: Path, devices: int) -> None:
    sizes = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]
    arguments = ["--devices", str(devices), "--ranks-per-node", "1", *sizes]
    results = run_script(EXAMPLE, *arguments, folder=tmp_path, ranks=devices if devices > 1 else None)
    assert [status for status, _ in results] == [0] * devices, results
    output = results[0][1]

    warnings = re.findall(r"^.*(?:\.py:\d+: |Warning).*$", output, re.MULTILINE)
    assert [warning for warning in warnings if not re.search(HARMLESS, warning)] == []
    bits, guessing = re.search(r"bits per character: ([\d.]+) \(guessing: ([\d.]+)\)", output).groups()
    assert float(guessing) == 6.61
    assert 1 < float(bits) < 4.2  # the characters' frequencies alone would give 5.2
    sample = output.split("what the model writes:\n")[1]
    assert sample.startswith("class ")
    assert len(sample) > 200
    assert len(set(sample)) > 10

    with (tmp_path / re.search(r"all measurements: (.*)", output).group(1)).open() as table:
        rows = list(csv.DictReader(table))
    assert int(rows[-1]["step"]) == WINDOWS // (16 * devices)  # no step is left out
    for rank in range(devices):
        assert any(float(row[f"hetero/samples_per_s/rank{rank}"] or 0) > 0 for row in rows)
    exchanges = int(re.search(r"(\d+) exchanges between nodes", output).group(1))
    assert exchanges > 30 if devices == 2 else exchanges == 0
