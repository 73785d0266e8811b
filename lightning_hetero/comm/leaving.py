"""Ends background threads when the process ends; otherwise they could crash it.

A thread that wakes up in C++ code (of gloo, or of a tensor operation) while Python shuts down aborts the process, with
the exit status of a crash. A thread that waits in gloo cannot be asked to end, but its sockets can be closed.
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

THREADS = "hetero-"  # their names begin with this
_PATIENCE = 3.0  # seconds to wait for their end; a thread that waits for something else than gloo does no harm
_MOMENT = 0.05  # seconds in which gloo's threads let go of what they have done
_LINGER = 2.0  # seconds for which a connection that was cut here stays open for its other end

_sockets: set[str] = set()  # of process groups
_sockets_of_all: set[str] = set()  # of the group of all ranks, and of the store with which they have met
_others: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # between peers
_spared: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # by which ranks agree on what to do after a cut
_changing = threading.Lock()  # of these
_open: weakref.WeakSet["Closable"] = weakref.WeakSet()
_lingering: dict[str, socket.socket] = {}  # that were cut here, by the kernel's names
_cuts = 0  # calls of `cut`
_noting: list[set[str]] = []  # sockets that there were before each block that notes new ones, while it runs


class Closable(Protocol):
    """An object with threads that end when it is closed."""

    def close(self) -> None:
        """End the threads; idempotent."""


def close_at_exit(thing: Closable) -> None:
    """Close an object when the process ends, if it still exists then."""
    _open.add(thing)


@contextmanager
def noting_sockets(of_all: bool = False) -> Iterator[None]:
    """Remember the sockets that are opened in this block: they belong to a process group, or to a store.

    Args:
        of_all: whether it is the group of all ranks, or the store with which they meet: nobody waits for these when the
            process ends, only if :func:`cut` is called.
    """
    before = {name for _, name in _open_sockets()}
    _noting.append(before)
    try:
        yield
    finally:
        _noting.remove(before)
        (_sockets_of_all if of_all else _sockets).update(_opened_since(before))


def _opened_since(before: set[str]) -> set[str]:
    return {name for _, name in _open_sockets()}.difference(before)


def cut_too(connection: socket.socket) -> None:
    """Let :func:`cut` break a connection of another kind as well, as long as it exists."""
    with _changing:
        _others.add(connection)


def spare(connection: socket.socket) -> None:
    """Let :func:`cut` leave a connection alone, also if it was opened while a process group was made."""
    with _changing:
        _spared.add(connection)


def cut() -> None:
    """Break the connections of all process groups: who waits on them here gets an error at once, elsewhere a bit later.

    Those of the store, too: ranks wait for each other there when they make a group. And those of a group that is being
    made.
    """
    global _cuts
    _cuts += 1
    _cut((_sockets | _sockets_of_all).union(*map(_opened_since, list(_noting))))
    with _changing:
        others = list(_others)
    for connection in others:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def cuts() -> int:
    """How many times :func:`cut` has been called."""
    return _cuts


def _open_sockets() -> list[tuple[int, str]]:
    """File descriptors of sockets, with the kernel's names of these; none where there is no ``/proc``."""
    found = []
    with suppress(OSError):
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # it has just been closed
                name = os.readlink(f"/proc/self/fd/{descriptor}")
                if name.startswith("socket:"):
                    found.append((int(descriptor), name))
    return found


def _name(connection: socket.socket) -> str:
    """The kernel's name of a socket; none if it is closed."""
    with suppress(OSError):
        return f"socket:[{os.fstat(connection.fileno()).st_ino}]"
    return ""


def _cut(names: set[str]) -> None:
    """Break connections: threads that wait on them get an error at once.

    Nothing can be read from them any more, which gloo takes for their end. They can still be written to, and stay open
    for a while. For what fails in being sent is forgotten by gloo once its connection is known to have ended: who waits
    for it would wait until the timeout, where gloo's own thread notices the end later than somebody sends.
    """
    lingering: dict[str, socket.socket] = {}
    with _changing:
        names = names.difference(map(_name, (*_spared, *_others)), _lingering)
    for descriptor, name in _open_sockets():
        if name in names:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if _name(connection) != name:
                    continue  # it has just been closed, and another one has its number
                connection.getpeername()  # raises for a listening socket: gloo does not survive the end of that one
                connection.shutdown(socket.SHUT_RD)
                lingering[name] = connection.dup()
    _lingering.update(lingering)
    if lingering:
        end = threading.Timer(_LINGER, _end, [lingering])
        end.daemon = True
        end.start()


def _end(lingering: dict[str, socket.socket]) -> None:
    """Close connections that were cut."""
    for name, connection in lingering.items():
        _lingering.pop(name, None)
        connection.close()


def _running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREADS)]


@atexit.register
def leave() -> None:
    """End all threads of this package. Runs when the process ends."""
    if not _running():
        return _let_go()
    _cut(_sockets)
    for thing in list(_open):
        with suppress(Exception):
            thing.close()
    until = time.monotonic() + _PATIENCE
    for thread in _running():
        thread.join(max(until - time.monotonic(), 0.0))
    _let_go()


def _let_go() -> None:
    """Give way to gloo's threads, which let go of an operation's tensors a moment after it is known to be done.

    They need the interpreter for that. One that asks for it only when that has begun to end aborts the process.
    """
    if _sockets or _sockets_of_all:
        time.sleep(_MOMENT)
