"""Ranks that wait in gloo are woken up when ranks are lost."""

import gc
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.comm import threads

LIMIT = 8.0  # seconds, the timeout of the groups; a call that is woken up ends in a hundredth of it
Pair = tuple[dist.ProcessGroupGloo, dist.ProcessGroupGloo]


def kernel_threads() -> dict[int, str]:
    """Names of this process's threads, as the kernel has them."""
    names = {}
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
            names[thread] = file.read().strip()
    return names


def pair(store: dist.Store) -> Pair:
    """Two ranks with a process group, in this process."""
    made: dict[int, dist.ProcessGroupGloo] = {}

    def make(rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=LIMIT)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        made[rank] = dist.ProcessGroupGloo(store, rank, 2, options)

    makers = [threading.Thread(target=make, args=(rank,)) for rank in (0, 1)]
    with threads.record_sockets():
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join()
    return made[0], made[1]


@contextmanager
def late(loops: set[int]) -> Iterator[None]:
    """Let these threads run only when no other thread runs on their core, which is this thread's."""
    allowed = os.sched_getaffinity(0)
    for thread in loops:
        os.sched_setaffinity(thread, {min(allowed)})
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(0, {min(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have their own priorities on Linux")
def test_what_is_sent_right_after_a_cut_does_not_wait() -> None:
    """Gloo's own thread notices late that a connection has ended, as on a busy machine."""
    store = dist.HashStore()
    for attempt in range(5):
        before = set(kernel_threads())
        sender, receiver = pair(dist.PrefixStore(str(attempt), store))
        loops = {thread for thread, name in kernel_threads().items() if thread not in before and "loop" in name}
        assert loops
        wanted = receiver.recv([torch.zeros(4)], 0, 0)
        time.sleep(0.1)  # the sender knows of the receive
        began, sending = time.monotonic(), None
        with late(loops):
            threads.abort_sockets()
            with suppress(RuntimeError):  # it was known already
                sending = sender.send([torch.ones(4)], 1, 0)
        with suppress(RuntimeError):
            if sending is not None:
                sending.wait()
        with suppress(RuntimeError):
            wanted.wait()
        assert time.monotonic() - began < LIMIT / 2


def test_who_waits_is_woken_up() -> None:
    group, _ = pair(dist.HashStore())
    waiting = group.recv([torch.zeros(4)], 1, 0)
    began = time.monotonic()
    threads.abort_sockets()
    with pytest.raises(RuntimeError, match="Connection closed"):
        waiting.wait()
    assert time.monotonic() - began < LIMIT / 2


def test_the_other_end_of_a_connection_hears_of_the_cut() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with threads.record_sockets():
        own = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    with listener, own, other:
        other.settimeout(LIMIT)
        threads.abort_sockets()
        assert own.recv(1) == b""
        own.sendall(b"?")  # data on its way arrives
        own.close()
        assert other.recv(1) == b"?"
        assert other.recv(1) == b""  # and then the end, though the connection was held open for a while


def test_a_connection_by_which_ranks_agree_is_left_alone() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with threads.record_sockets():  # another thread makes it by chance while a group is made
        own = socket.create_connection(listener.getsockname())
    threads.exclude_from_abort(own)
    other, _ = listener.accept()
    with listener, own, other:
        threads.abort_sockets()
        other.sendall(b"?")
        own.settimeout(LIMIT)
        assert own.recv(1) == b"?"


def test_a_connection_with_two_descriptors_is_kept_once() -> None:
    """The second descriptor, which another thread may use, is closed later, and not by the garbage collector."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
        one.dup(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", ResourceWarning)
        leaks: list[object] = []
        sys.unraisablehook, usual = leaks.append, sys.unraisablehook
        try:
            threads._abort({threads._name(one)})
            gc.collect()
        finally:
            sys.unraisablehook = usual
        assert one.recv(1) == b""
        assert not leaks
