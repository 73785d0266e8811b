"""Finds the processes that a test has started, however indirectly."""

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

_NAME = "LIGHTNING_HETERO_TEST"


@contextmanager
def watched() -> Iterator[Callable[[], list[psutil.Process]]]:
    """All processes started within carry a mark; the value lists those that still run. None outlives the block."""
    mark = uuid.uuid4().hex

    def running() -> list[psutil.Process]:
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
        for process in running():
            process.kill()
