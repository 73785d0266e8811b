"""Connections to stores of hosts that are gone."""

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_hetero.comm import threads
from lightning_hetero.comm.stores import clone_store, store_at

LIMIT = timedelta(seconds=60)
SOON = 15.0  # seconds of an attempt and of the next call of `cut`, on a busy machine


def _host(pipe: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


@pytest.fixture
def frozen() -> Iterator[int]:
    """The port of a store that does not answer."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_host, args=(theirs,))
    process.start()
    port = ours.recv()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    yield port
    process.kill()
    process.join()


@pytest.fixture
def dead() -> int:
    """A port at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("host", ["frozen", "dead"])
def test_a_cut_ends_the_wait(host: str, request: pytest.FixtureRequest) -> None:
    port, over = request.getfixturevalue(host), threading.Event()

    def notice() -> None:
        while not over.wait(0.5):
            threads.abort_sockets()

    thread = threading.Thread(target=notice)
    thread.start()
    began = time.monotonic()
    try:
        with pytest.raises(dist.DistError):
            store_at(("127.0.0.1", port), LIMIT)
    finally:
        over.set()
        thread.join()
    assert time.monotonic() - began < SOON


def test_without_a_cut_the_limit_holds(dead: int) -> None:
    began = time.monotonic()
    with pytest.raises(dist.DistError):
        store_at(("127.0.0.1", dead), timedelta(seconds=3))
    assert 2.5 < time.monotonic() - began < SOON


def test_a_copy_is_another_connection_to_the_same_store() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    prefixed = dist.PrefixStore("here", store)
    copy = clone_store(prefixed)
    copy.set("key", "value")
    assert prefixed.get("key") == b"value"
    assert [one.timeout for one in (store, prefixed, copy)] == [LIMIT] * 3  # type: ignore[attr-defined]
