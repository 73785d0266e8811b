"""Threads and sockets of this package: calls in order, futures for their outcomes, and sockets that can be aborted.

A thread that wakes up in C++ code (of gloo, or of a tensor operation) while Python shuts down aborts the process, with
the exit status of a crash. A thread that waits in gloo cannot be asked to end, but its sockets can be closed.

Python's garbage collector visits some 400,000 objects once PyTorch and Lightning are imported: a quarter of a second,
or more where processes share cores; :func:`freeze_gc` leaves them out. All ranks collect garbage when others join, so
that the connections of the former ranks end.
"""

import atexit
import gc
import os
import queue
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.futures import Future


def value_or_error(done: Future[Any]) -> Any:
    """The value of a future, or the error that it holds: one with an error of Python's own is a mere value to DDP."""
    value = done.value()
    if isinstance(value, BaseException):
        raise value
    return value


T = TypeVar("T")

_LATER = 15  # how nice a thread is that comes last: the kernel gives it a thirtieth of a contested core


def keeping_device(function: Callable[[], T]) -> Callable[[], T]:
    """A function for another thread, with the accelerator's device that is current here.

    A thread begins on the first device, and would take memory of it as soon as it asks for anything. A process that has
    not used its accelerator keeps away from it.
    """
    for name in ("cuda", "xpu", torch._C._get_privateuse1_backend_name()):
        module = getattr(torch, name, None)
        if module is not None and module.is_available() and module.is_initialized():
            device = module.current_device()

            def on_device(module: Any = module, device: Any = device) -> T:
                module.set_device(device)
                return function()

            return on_device
    return function


class Worker:
    """Calls functions on a thread, one after the other. The thread ends with this object, once it has called all.

    Args:
        name: of the thread, after the one that all threads of this package share.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        target = keeping_device(partial(_serve, self._work))
        threading.Thread(target=target, name=f"{THREADS}{name}", daemon=True).start()
        self._end = weakref.finalize(self, self._work.put, None)
        self._end.atexit = False
        close_at_exit(self)

    def call(self, function: Callable[[], object]) -> None:
        """Let the thread call a function, which raises no error, after all others."""
        self._work.put(function)

    def close(self) -> None:
        """End the thread, once it has called all; idempotent."""
        self._end()


def _serve(work: "queue.SimpleQueue[Callable[[], object] | None]") -> None:
    while (function := work.get()) is not None:
        function()
        del function


class Background(Generic[T]):
    """Runs a function in a thread of its own.

    The thread dies with the process, so a network that no longer answers does not keep a failed rank from ending.

    Args:
        function: takes no arguments, and must not write what others read meanwhile.

    Attributes:
        seconds: how long the function took, once it has ended.
        error: that has ended the function, if one has.
        waited: seconds for which :meth:`result` has waited for it.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = keeping_device(function)
        self._value: T
        self.error: BaseException | None = None
        self.seconds = self.waited = 0.0
        self._thread = threading.Thread(target=self._run, name="hetero-exchange", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            self._value = self._function()
        except BaseException as error:
            self.error = error
        del self._function  # and what it holds
        self.seconds = time.perf_counter() - began

    @property
    def running(self) -> bool:
        """Whether the function has not ended yet."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the function to end, with a value or an error."""
        self._thread.join()

    def result(self, seconds: float | None = None) -> T:
        """Wait for the function to end, and return its value or raise its error.

        Args:
            seconds: longest wait. Default: no limit.

        Raises:
            TimeoutError: the function has not ended by then.
        """
        began = time.perf_counter()
        self._thread.join(seconds)
        self.waited += time.perf_counter() - began
        if self._thread.is_alive():
            raise TimeoutError(f"no result within {seconds:g} s")
        if self.error is not None:
            raise self.error
        return self._value


def lower_priority() -> None:
    """From now on let other threads come before this one where there are not cores enough for all; on Linux."""
    if sys.platform == "linux":  # elsewhere it would count for the whole process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LATER)


THREADS = "hetero-"  # their names begin with this
_PATIENCE = 3.0  # seconds to wait for their end; a thread that waits for something else than gloo does no harm
_MOMENT = 0.05  # seconds in which gloo's threads let go of what they have done
_LINGER = 2.0  # seconds for which a connection that was cut here stays open for its other end

_sockets: set[str] = set()  # of process groups
_sockets_of_all: set[str] = set()  # of the group of all ranks, and of the store with which they have met
_others: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # of our own, to break too
_excluded: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # by which ranks agree on what to do after that
_changing = threading.Lock()  # of these
_open: weakref.WeakSet["Closable"] = weakref.WeakSet()
_lingering: dict[str, socket.socket] = {}  # that were cut here, by the kernel's names
_abort_count = 0  # calls of `abort_sockets`
_recording: list[set[str]] = []  # sockets that there were before each block that notes new ones, while it runs


class Closable(Protocol):
    """An object with threads that end when it is closed."""

    def close(self) -> None:
        """End the threads; idempotent."""


def close_at_exit(thing: Closable) -> None:
    """Close an object when the process ends, if it still exists then."""
    with _changing:
        _open.add(thing)


@contextmanager
def record_sockets(of_all: bool = False) -> Iterator[None]:
    """Remember the sockets that are opened in this block: they belong to a process group, or to a store.

    Args:
        of_all: whether it is the group of all ranks, or the store with which they meet: nobody waits for these when the
            process ends, only if :func:`abort_sockets` is called.
    """
    before = {name for _, name in _open_sockets()}
    _recording.append(before)
    try:
        yield
    finally:
        _recording.remove(before)
        (_sockets_of_all if of_all else _sockets).update(_opened_since(before))


def _opened_since(before: set[str]) -> set[str]:
    return {name for _, name in _open_sockets()}.difference(before)


def abort_too(connection: socket.socket) -> None:
    """Let :func:`abort_sockets` break a socket of another kind as well, as long as it exists.

    Child processes close it.
    """
    with _changing:
        _others.add(connection)


def exclude_from_abort(connection: socket.socket) -> None:
    """Let :func:`abort_sockets` leave a socket alone, also if it was opened while a process group was made.

    Child processes close it.
    """
    with _changing:
        _excluded.add(connection)


def _close_in_child() -> None:
    """Close the parent's sockets in a child process: else nobody notices the parent's end while the child lives."""
    for connection in (*_others, *_excluded):
        if connection.fileno() >= 0:
            os.close(connection.detach())


os.register_at_fork(after_in_child=_close_in_child)


def abort_sockets() -> None:
    """Break the connections of all process groups: who waits on them here gets an error at once, elsewhere a bit later.

    Those of the store, too: ranks wait for each other there when they make a group. And those of a group that is being
    made.
    """
    global _abort_count
    with _changing:
        _abort_count += 1
    _abort((_sockets | _sockets_of_all).union(*map(_opened_since, list(_recording))))
    with _changing:
        others = list(_others)
    for connection in others:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def abort_count() -> int:
    """Number of calls of :func:`abort_sockets`."""
    return _abort_count


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


def _abort(names: set[str]) -> None:
    """Break connections: threads that wait on them get an error at once.

    Nothing can be read from them any more, which gloo takes for their end. They can still be written to, and stay open
    for a while. For what fails in being sent is forgotten by gloo once its connection is known to have ended: who waits
    for it would wait until the timeout, where gloo's own thread notices the end later than somebody sends.
    """
    lingering: dict[str, socket.socket] = {}
    with _changing:
        names = names.difference(map(_name, (*_excluded, *_others)), _lingering)
    for descriptor, name in _open_sockets():
        if name in names and name not in lingering:  # a socket may have several descriptors
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
def end_all_threads() -> None:
    """End all threads of this package. Runs when the process ends."""
    if not _running():
        return _yield_to_gloo()
    _abort(_sockets)
    with _changing:
        things = list(_open)
    for thing in things:
        with suppress(Exception):
            thing.close()
    until = time.monotonic() + _PATIENCE
    for thread in _running():
        thread.join(max(until - time.monotonic(), 0.0))
    _yield_to_gloo()


def _yield_to_gloo() -> None:
    """Give way to gloo's threads, which let go of an operation's tensors a moment after it is known to be done.

    They need the interpreter for that. One that asks for it only when that has begun to end aborts the process.
    """
    if _sockets or _sockets_of_all:
        time.sleep(_MOMENT)


_frozen = False


def freeze_gc() -> None:
    """From now on let the collector look only at what is made later."""
    global _frozen
    if not _frozen and gc.get_freeze_count() == 0:  # else the user decides; counting takes as long as a look
        _frozen = True
        gc.collect()
        gc.freeze()


def unfreeze_gc() -> None:
    """Let the collector look at everything again, if :func:`freeze_gc` was called; idempotent."""
    global _frozen
    if _frozen:
        _frozen = False
        gc.unfreeze()


@contextmanager
def without_process_group() -> Iterator[None]:
    """In this block, on this thread, PyTorch says that there is no process group.

    SyncBatchNorm, metrics, and whoever else asks, then go by this rank's own samples. What does not ask gets PyTorch's
    error that there is no group, instead of a wait for ranks that do something else. Other threads see no difference.
    """
    thread, initialized = threading.get_ident(), dist.is_initialized

    def is_initialized() -> bool:
        return threading.get_ident() != thread and initialized()

    modules = (vars(dist), vars(distributed_c10d))
    for module in modules:
        module["is_initialized"] = is_initialized
    try:
        yield
    finally:
        for module in modules:
            module["is_initialized"] = initialized
