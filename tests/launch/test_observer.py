"""The observer of processes that the popen launcher starts."""

import subprocess
import sys
import time

WATCHED = """
import subprocess, sys, time
from lightning_hetero.launch.observer import Observer

child = subprocess.Popen([sys.executable, "-c", "import os, time; CHILD"])
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(other.pid, flush=True)
observer = Observer([child, other], grace=GRACE, poll=0.05)
observer.start()
time.sleep(SECONDS)
observer.children = []
other.kill()
"""


def watch(child: str, grace: float, seconds: float) -> tuple[subprocess.CompletedProcess, float]:
    script = WATCHED.replace("CHILD", child).replace("GRACE", str(grace)).replace("SECONDS", str(seconds))
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    return done, time.monotonic() - began


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_job_that_does_not_end_by_itself_is_killed_after_the_grace() -> None:
    done, seconds = watch("time.sleep(0.2); os._exit(3)", grace=0.5, seconds=50)
    assert "local rank 1 ended with exit code 3" in done.stderr
    assert done.returncode == -9
    assert seconds < 45
    assert not alive(int(done.stdout))


def test_a_job_that_ends_within_the_grace_ends_as_it_likes() -> None:
    done, _ = watch("os.kill(os.getpid(), 9)", grace=60, seconds=1)
    assert "local rank 1 was killed by signal 9" in done.stderr
    assert done.returncode == 0


def test_nothing_is_said_when_nothing_fails() -> None:
    done, _ = watch("pass", grace=60, seconds=1)
    assert done.stderr == ""
    assert done.returncode == 0
