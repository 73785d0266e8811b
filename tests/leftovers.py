"""Finds the processes that a test has started, however indirectly."""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

_NAME = "LIGHTNING_HETERO_TEST"
_PATIENCE = 5.0  # seconds in which what ends by itself has ended


@contextmanager
def watched() -> Iterator[Callable[..., list[psutil.Process]]]:
    """All processes started within carry a mark; the value lists those that stay. None outlives the block.

    ``patience=0`` lists those of this moment.
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
