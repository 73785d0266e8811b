"""The doctor as a whole, by itself and under mpiexec. Under torchrun: tests/launch/test_slurm.py."""

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from leftovers import completed

from lightning_hetero.cli import main

FOLDER = Path(__file__).parents[2] / "examples" / "cli"
DOCTOR = [sys.executable, "-m", "lightning_hetero", "doctor", "--accelerator", "cpu", "--timeout", "300"]
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
no_mpi = importlib.util.find_spec("mpi4py") is None or MPIEXEC is None


@pytest.mark.long
def test_on_one_machine_with_a_model_of_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "doctor.json"
    text = output([*DOCTOR, "--devices", "2", "--interface", "lo", "-c", "daso.yaml", "--save", str(file)])
    assert "2 ranks on 1 node; DigitReader, 0.01 MB of parameters" in " ".join(text.split())
    assert re.search(r"within a node\s+│ 0 - 1\s+│ [\d.]+ ms\s+│ [\d.]+ MB/s", text)
    assert re.search(r"hetero_easgd\s+│ available", text)
    assert re.search(r"hetero_daso\s+│ more than one node needed", text)
    assert "MPI knows 1 of the job's 2 ranks" in " ".join(text.replace("│", " ").split())
    assert re.search(r"Step: [\d.]+ ms with 32 samples on each rank", text)
    assert re.search(r"Trainer\(strategy=.*, \.\.\.\)", text)
    assert json.loads(file.read_text())["between"] is None  # one node
    main(["plan", "--from", str(file)])
    planned = capsys.readouterr().out
    assert "1 nodes, 2 ranks" in planned
    assert "Weak scaling is left out" in planned


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--interface", "nowhere0"], "nowhere0"),
        (["--ports", "29500"], "ports='29500': give the first and the last port"),
    ],
)
def test_a_network_that_is_not_there_is_refused_before_ranks_start(options: list[str], words: str) -> None:
    with pytest.raises(SystemExit, match=words):
        main(["doctor", "--accelerator", "cpu", "--devices", "2", *options])


@pytest.mark.long
@pytest.mark.skipif(no_mpi, reason="needs mpi4py and mpiexec: pip install mpi4py mpich")
def test_under_mpiexec() -> None:
    text = output([str(MPIEXEC), "-n", "2", *DOCTOR, "--ranks-per-node", "1", "--batch-size", "8"])
    assert text.count("2 ranks on 2 nodes; a built-in perceptron") == 1  # the first rank alone speaks
    assert re.search(r"between nodes\s+│ 0 - 1", text)
    assert re.search(r"center='mpi'\s+│ available", text)
    assert re.search(r"hetero_daso\s+│ available", text)


def output(command: list[str]) -> str:
    """Output of the doctor, which leaves nothing behind."""
    return completed(command, cwd=FOLDER).stdout
