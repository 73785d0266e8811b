"""At the end of the process: ends threads in the background, which would break it off.

A thread that wakes up in C++ code, such as gloo's or a tensor operation's, while Python shuts down aborts the process:
its exit status is then that of a crash. A thread that waits in gloo cannot be told to end; its sockets can be closed.
"""

import atexit
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

THREADS = "hetero-"  # what their names begin with
_PATIENCE = 3.0  # seconds until they have ended; what waits for something else than gloo sleeps on, and harms nobody

_sockets: set[str] = set()  # of process groups
_open: weakref.WeakSet["Closable"] = weakref.WeakSet()


class Closable(Protocol):
    """Something with threads that end when it is closed."""

    def close(self) -> None:
        """Idempotent."""


def close_at_exit(thing: Closable) -> None:
    """Have something closed when the process ends, if it still exists then."""
    _open.add(thing)


@contextmanager
def noting_sockets() -> Iterator[None]:
    """The sockets that are opened in this block are a process group's."""
    before = {name for _, name in _open_sockets()}
    yield
    _sockets.update(name for _, name in _open_sockets() if name not in before)


def _open_sockets() -> list[tuple[int, str]]:
    """Descriptors and the kernel's names of what they stand for; none where there is no ``/proc``."""
    found = []
    with suppress(OSError):
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # it has just been closed
                name = os.readlink(f"/proc/self/fd/{descriptor}")
                if name.startswith("socket:"):
                    found.append((int(descriptor), name))
    return found


def _cut() -> None:
    """Break the connections of process groups: whoever waits for something on them gets an error, at once."""
    for descriptor, name in _open_sockets():
        if name in _sockets:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.getpeername()  # raises on one that listens, which gloo could not do without
                connection.shutdown(socket.SHUT_RDWR)


def _running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREADS)]


@atexit.register
def leave() -> None:
    """End all threads of this package; when the process ends."""
    if not _running():
        return
    _cut()
    for thing in list(_open):
        with suppress(Exception):
            thing.close()
    until = time.monotonic() + _PATIENCE
    for thread in _running():
        thread.join(max(until - time.monotonic(), 0.0))
