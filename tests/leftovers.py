"""Finds leftovers of a test: processes that it has started, directly or not, and files in shared memory."""

import os
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

_NAME = "LIGHTNING_HETERO_TEST"
_GONE = 20.0  # seconds in which other tests remove their files in shared memory
_PATIENCE = 5.0  # seconds in which processes that end by themselves have ended


@contextmanager
def watched() -> Iterator[Callable[..., list[psutil.Process]]]:
    """Mark all processes that start in this block; the value lists those that are left. None outlives the block.

    ``patience=0`` lists those of this moment, without a wait.
    """
    mark = uuid.uuid4().hex

    def running(patience: float = _PATIENCE) -> list[psutil.Process]:
        deadline = time.monotonic() + patience
        while (found := now()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def now() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get(_NAME) == mark:
                    found.append(process)
            except psutil.Error:  # it has just ended, or belongs to someone else
                continue
        return found

    os.environ[_NAME] = mark
    try:
        yield running
    finally:
        del os.environ[_NAME]
        for process in now():
            process.kill()


def completed(command: Any, env: dict[str, str] | None = None, patience: float = _PATIENCE, **options: Any) -> Any:
    """Run a command; fails if it fails, or leaves a process behind. Returns it with its output."""
    with watched() as running:
        env = {**(env or os.environ), _NAME: os.environ[_NAME]}
        options = {"capture_output": True, "text": True, "timeout": 400, "check": False, **options}
        done = subprocess.run(command, env=env, **options)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
        assert running(patience) == []
    return done


@contextmanager
def nothing_left_in_memory() -> Iterator[None]:
    """Fail if a file of this package that has appeared in shared memory in this block is left, whatever happens."""
    before = _files()
    yield
    left, deadline = _files() - before, time.monotonic() + _GONE
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left &= _files()
    assert not left


def _files() -> set[Path]:
    return set(Path("/dev/shm").glob("lightning-hetero-*"))
