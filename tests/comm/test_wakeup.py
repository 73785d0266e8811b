"""Connections to a center's host: strangers are refused, and the host is woken even if its process is busy."""

import gc
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from lightning_hetero.comm.centers.base import CenterLayout
from lightning_hetero.comm.centers.thread import ThreadCenter, Wakeup, WakeupClient
from lightning_hetero.comm.groups import Groups
from lightning_hetero.comm.transport import greeting

HERE = "127.0.0.1"


@pytest.fixture
def wakeup() -> Iterator[Wakeup]:
    wakeup = Wakeup(HERE)
    yield wakeup
    wakeup.end()
    wakeup.close()


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """Let the next file of this process have a number that `select` does not take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("this process may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    files = [os.open(os.devnull, os.O_RDONLY)]
    while files[-1] < 1100:
        files.append(os.dup(files[0]))
    yield
    for file in files:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_strangers_are_sent_away_and_keep_nobody_waiting(wakeup: Wakeup) -> None:
    at, token = wakeup.address
    strangers = [socket.create_connection(at) for _ in range(6)]
    _mute, gone, short, loud, guess, replaced = strangers
    gone.close()
    short.sendall(token[:3].encode())  # begins like a rank
    short.shutdown(socket.SHUT_WR)
    loud.sendall(b"GET / HTTP/1.1\r\n\r\n and more")
    guess.sendall(b" 1\n")  # says that it is rank 1
    replaced.sendall(greeting("0" * len(token), 7))  # with another token
    clients = [WakeupClient(wakeup.address, rank, 60.0) for rank in (7, 1)]
    began = time.monotonic()
    wakeup.accept_clients([1, 7], 60.0)
    assert time.monotonic() - began < 20
    for stranger in (short, guess, replaced):
        stranger.settimeout(60.0)
        assert stranger.recv(1) == b""
    for client, rank in zip(clients, (7, 1), strict=True):
        client.announce()
        assert wakeup.wait() == rank
    for connection in (*strangers, *clients):
        connection.close()


def test_a_client_may_speak_slowly_and_silent_strangers_keep_nobody_out(wakeup: Wakeup) -> None:
    at, token = wakeup.address
    held = []

    def come() -> None:
        strangers = [socket.create_connection(at) for _ in range(120)]
        slow = socket.create_connection(at)
        words = greeting(token, 1)
        for word in (words[:7], words[7:18], words[18:]):
            slow.sendall(word)
            time.sleep(0.1)
        held.append(len(psutil.Process().net_connections()) - 2 * len(clients))
        clients.append(WakeupClient(wakeup.address, 7, 5.0))
        for connection in strangers:
            connection.close()
        slow.sendall(b"!")
        clients.append(slow)

    clients: list[Any] = []
    caller = threading.Thread(target=come)
    caller.start()
    wakeup.accept_clients([1, 7], 20.0)
    caller.join()
    assert wakeup.wait([1]) == 1
    assert held[0] < 121 + 50  # this end of all, and the other of a few
    for connection in clients:
        connection.close()


def test_a_rank_that_does_not_come_is_named(wakeup: Wakeup) -> None:
    client = WakeupClient(wakeup.address, 2, 5.0)
    with pytest.raises(TimeoutError, match=r"rank\(s\) \[1, 3\] did not come within 0\.2 s"):
        wakeup.accept_clients([1, 2, 3], 0.2)
    client.close()


def test_fast_clients_keep_nobody_waiting(wakeup: Wakeup) -> None:
    clients = {rank: WakeupClient(wakeup.address, rank, 5.0) for rank in (1, 2, 3)}
    wakeup.accept_clients(clients, 5.0)
    for client in clients.values():
        client.announce()
    served = []
    for _ in range(6):
        rank = wakeup.wait(seconds=5.0)
        served.append(rank)
        clients[rank].announce()  # before the next one is served
    assert served == [*served[:3]] * 2
    assert sorted(served[:3]) == [1, 2, 3]
    for client in clients.values():
        client.close()


def test_a_host_can_be_interrupted_until_it_is_known_why_it_has_ended(wakeup: Wakeup) -> None:
    client = WakeupClient(wakeup.address, 1, 5.0)
    wakeup.accept_clients([1], 5.0)
    limit = timedelta(seconds=5)
    center = ThreadCenter(CenterLayout(0, 2, (0, 1), 0, limit), Groups(limit, "test"), HERE)
    center._wakeup, center._wires = wakeup, {1: []}
    server = threading.Thread(target=center._serve)
    server.start()
    time.sleep(0.2)  # it waits now
    with center._changed:  # as in a push-pull of the host's own
        client.close()
        time.sleep(0.2)
        wakeup.interrupt()
    server.join(5.0)
    assert "rank 1 has ended" in str(center._error)


@pytest.mark.usefixtures("many_open_files")
def test_it_is_heard_in_a_process_with_many_open_files() -> None:
    wakeup = Wakeup(HERE)
    client = WakeupClient(wakeup.address, 1, 5.0)
    wakeup.accept_clients([1], 5.0)
    client.announce()
    assert wakeup.wait() == 1
    assert not client.host_ended
    wakeup.end()
    assert wakeup.wait() is None
    wakeup.close()
    assert client.host_ended
    client.close()


def test_a_host_without_clients_leaves_no_socket_open() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        limit = timedelta(seconds=5)
        center = ThreadCenter(CenterLayout(0, 1, (0,), 0, limit), Groups.open(limit), HERE)
        center.open([torch.ones(3)])
        center.close()
        del center
        gc.collect()  # a socket that is left open warns now, which is an error here
    finally:
        dist.destroy_process_group()
