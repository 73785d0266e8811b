"""The example with a slow rank and a center in MPI's memory runs as its readers would run it, and learns."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from leftovers import watched

EXAMPLE = Path(__file__).parents[1] / "examples" / "easgd_mpi.py"
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
no_mpi = importlib.util.find_spec("mpi4py") is None or MPIEXEC is None


@pytest.mark.long
@pytest.mark.skipif(no_mpi, reason="needs mpi4py and mpiexec: pip install mpi4py mpich")
def test_easgd_over_mpi(tmp_path: Path) -> None:
    command = [str(MPIEXEC), "-n", "3", sys.executable, str(EXAMPLE), "--epochs", "4", "--late", "0.03"]
    with watched() as running:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert running() == []
    assert float(re.search(r"accuracy of the center on the test digits: ([\d.]+)%", done.stdout).group(1)) > 80
    rates = dict(re.findall(r"replica(\d): ([\d.]+)", done.stdout))
    assert sorted(rates) == ["0", "1", "2"]
    assert float(rates["2"]) < float(rates["0"])  # the slow one
    assert (tmp_path / re.search(r"all measurements: (.*)", done.stdout).group(1)).exists()
