"""The observer of processes that the popen launcher starts."""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from ranks import Outcome, attempt

from lightning_hetero.errors import CommunicationError
from lightning_hetero.launch import observer as module
from lightning_hetero.launch.observer import ObservedLauncher, ProcessObserver


def _job(folder: Path, child: str, grace: float, ends: bool) -> None:
    """Run rank 0 of a job in which rank 1 runs ``child``. It ends by itself some time after rank 1, or never."""
    with open(folder / "stderr", "w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    one = subprocess.Popen([sys.executable, "-S", "-c", f"import os; {child}"])
    other = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(200)"])
    (folder / "other").write_text(str(other.pid))
    observer = ProcessObserver([one, other], grace=grace, poll=0.05)
    observer.start()
    one.wait()
    time.sleep(0.5 if ends else 100)
    observer.children = []
    other.kill()
    other.wait()


def observed(folder: Path, child: str, grace: float, ends: bool = True) -> tuple[Outcome, str]:
    """Outcome of rank 0, and its output."""
    [outcome] = attempt(_job, 1, folder, child, grace, ends, timeout=80)
    return outcome, (folder / "stderr").read_text()


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_job_that_does_not_end_by_itself_is_killed_after_the_grace(tmp_path: Path) -> None:
    outcome, output = observed(tmp_path, "os._exit(3)", grace=0.4, ends=False)
    assert "local rank 1 ended with exit code 3; its own error, if it had one, is above." in output
    assert "local rank 1 ended with exit code 3, and 0 s later the other ranks of this machine still run" in output
    assert outcome.exitcode == -signal.SIGKILL
    assert "still running" not in outcome.trace  # not killed by this test
    assert not alive(int((tmp_path / "other").read_text()))


@pytest.mark.parametrize(
    ("child", "words"), [("os.kill(os.getpid(), 9)", "local rank 1 was killed by signal 9"), ("pass", "")]
)
def test_a_job_that_ends_within_the_grace_ends_as_it_likes(tmp_path: Path, child: str, words: str) -> None:
    outcome, output = observed(tmp_path, child, grace=60)
    assert outcome.exitcode == 0
    assert words in output
    assert words or not output  # nothing is said when nothing fails


class _Environment:
    creates_processes_externally = False

    def global_rank(self) -> int:
        return 0


def _launched(folder: Path, children: list[str], survive: bool) -> None:
    """Run a rank 0 that ends with an error of communication; another process kills its children 0.3 s later."""
    with open(folder / "stderr", "w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    launcher = ObservedLauncher(cluster_environment=_Environment(), num_processes=3, num_nodes=1, survive=survive)
    processes = [subprocess.Popen([sys.executable, "-S", "-c", child]) for child in children]
    module.start_ranks = lambda launcher: setattr(launcher, "procs", processes)

    def train() -> None:
        raise CommunicationError("rank 0 of 3 has lost another one")

    began = time.monotonic()
    try:
        launcher.launch(train)
    except CommunicationError:
        (folder / "took").write_text(str(time.monotonic() - began))
    for process in processes:
        threading.Timer(0.3, process.kill).start()
    atexit._run_exitfuncs()  # forked processes do not run these at their end
    (folder / "ended").write_text(str(time.monotonic() - began))


@pytest.mark.parametrize("survive", [False, True])
@pytest.mark.parametrize("children", [0, 2])
def test_the_error_of_rank_zero_does_not_wait_for_its_children(tmp_path: Path, children: int, survive: bool) -> None:
    sleeps = ["import time; time.sleep(100)"] * children
    [outcome] = attempt(_launched, 1, tmp_path, sleeps, survive, timeout=80)
    assert outcome.exitcode == 0
    took, ended = (float((tmp_path / name).read_text()) for name in ("took", "ended"))
    assert took < 5  # a rank that learns of it only then would wait for 10 s
    output = (tmp_path / "stderr").read_text()
    assert ("was killed by signal 9" in output) == bool(children)  # and yet the one that ended first is reported
    assert ended < 9 or children  # without children there is no wait
