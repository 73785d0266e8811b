"""The listening socket of a rank: its peers, and the limits of strangers."""

import multiprocessing
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice

import pytest

from lightning_hetero.comm import transport
from lightning_hetero.comm.threads import exclude_from_abort
from lightning_hetero.comm.transport import (
    GREETING,
    STRANGERS,
    Listener,
    MessageTransport,
    connect,
    free_port,
    greeting,
    listen_within,
)
from lightning_hetero.errors import CommunicationError

TOKEN = "0123456789abcdef"


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener("127.0.0.1", TOKEN, made=exclude_from_abort)
    listener.peers = 2
    yield listener
    listener.end()


def until_closed(connection: socket.socket) -> bytes:
    connection.settimeout(20.0)
    try:
        return connection.recv(1)
    except ConnectionResetError:
        return b""


WRONG = {
    "another token": greeting("f" * len(TOKEN), 1),
    "no token": b" 1\n",
    "the beginning of the token": greeting(TOKEN[:-1], 1),
    "no number": f"{TOKEN} one\n".encode(),
    "nothing but an end": b"\n",
    "bytes": os.urandom(GREETING).replace(b"\n", b"x") + b"xx",
    "too long": TOKEN.encode() + b" " * GREETING + b"1\n",
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG)
def test_a_stranger_is_sent_away(listener: Listener, content: bytes) -> None:
    with socket.create_connection(listener.address) as stranger:
        stranger.sendall(content)
        assert listener.accept(0.3) == []
        assert until_closed(stranger) == b""


def test_a_peer_is_let_in_and_what_follows_its_first_line_is_not_lost(listener: Listener) -> None:
    with connect(listener.address, TOKEN, 7, 5.0) as peer:
        peer.sendall(b"more\nand more")
        [caller] = listener.accept(5.0)
        assert caller.peer == 7
        caller.connection.settimeout(5.0)
        assert caller.connection.recv(99).startswith(b"more\n")
        caller.connection.close()


def test_a_first_line_may_come_in_pieces(listener: Listener) -> None:
    with socket.create_connection(listener.address) as peer:
        for byte in greeting(TOKEN, 3):
            peer.sendall(bytes([byte]))
            if byte != ord("\n"):
                assert listener.accept(0.01) == []
        [caller] = listener.accept(5.0)
        assert caller.peer == 3
        caller.connection.close()


def test_silent_strangers_keep_nobody_out(listener: Listener) -> None:
    strangers = [socket.create_connection(listener.address) for _ in range(100)]
    with connect(listener.address, TOKEN, 1, 5.0):
        [caller] = listener.accept(5.0)
        caller.connection.close()
    assert len(listener._strangers) <= STRANGERS + 2
    for stranger in strangers:
        stranger.close()


def test_a_silent_stranger_is_sent_away_after_some_seconds(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HURRY", 0.2)
    with socket.create_connection(listener.address) as stranger:
        assert listener.accept(0.6) == []
        assert until_closed(stranger) == b""


@pytest.mark.parametrize("guard", ["HURRY", "STRANGERS"])
def test_the_mutants_without_a_guard_keep_strangers(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, guard: str
) -> None:
    monkeypatch.setattr(transport, guard, 10**6)
    strangers = [socket.create_connection(listener.address) for _ in range(40)]
    listener.accept(0.5)
    assert (len(listener._strangers) == 40) == (guard == "STRANGERS")
    for stranger in strangers:
        stranger.close()


def test_a_selector_sees_that_there_is_something_to_accept(listener: Listener) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        assert not selector.select(0.0)
        with connect(listener.address, TOKEN, 1, 5.0):
            assert selector.select(5.0)


def test_closing_it_wakes_up_who_waits_and_refuses_connections(listener: Listener) -> None:
    threading.Timer(0.2, listener.close).start()
    began = time.monotonic()
    assert listener.accept(30.0) == []
    assert time.monotonic() - began < 10
    with pytest.raises(ConnectionRefusedError):
        connect(listener.address, TOKEN, 1, 5.0)


def test_a_child_process_keeps_nothing_open(listener: Listener) -> None:
    """Otherwise a rank that has ended could be reached for as long as a worker of its dataloader lives."""
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60.0,), daemon=True)
    with socket.create_connection(listener.address) as stranger:
        assert listener.accept(0.1) == []
        child.start()
        with connect(listener.address, TOKEN, 1, 5.0):  # here it goes on
            [caller] = listener.accept(5.0)
            caller.connection.close()
        for connection in (
            *listener._strangers,
            listener._socket,
        ):  # as the kernel closes them where a process is killed
            os.close(connection.detach())
        assert until_closed(stranger) == b""
        connections = iter(lambda: connect(listener.address, TOKEN, 1, 5.0), None)
        with pytest.raises(ConnectionRefusedError):  # soon: a busy machine may not have let the child close them yet
            deque(map(socket.socket.close, islice(connections, 1000)), 0)
    child.kill()
    child.join()


@pytest.mark.parametrize("busy", [False, True])
def test_a_peer_is_reached_and_nothing_that_it_says_at_once_is_lost(
    busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy peer may answer only the second connection."""
    monkeypatch.setattr(transport, "HURRY", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        caller = MessageTransport(1, "token")
        caller.addresses = {0: server.getsockname()}

        def answer() -> None:
            connections = [server.accept()[0] for _ in range(2 if busy else 1)]
            connections[-1].sendall(greeting("token", 0) + b'{"a": 1}\n{"a": 2}\n')
            assert connections[-1].recv(GREETING) == greeting("token", 1)
            assert until_closed(connections[-1]) == b""
            for connection in connections:
                connection.close()

        peer = threading.Thread(target=answer)
        peer.start()
        what, link, _ = caller.reach(0, 10)
        assert (what, link.open) == ("opened", True)
        events = [*caller.poll(5), *caller.poll(0.2)]
        assert [event.message for event in events] == [{"a": 1}, {"a": 2}]
        caller.close()
        peer.join(10)


@pytest.mark.parametrize(("listens", "found"), [(True, "late"), (False, "refused")])
def test_a_peer_that_is_not_reached(listens: bool, found: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        if not listens:
            server.close()
        caller = MessageTransport(1, "token")
        caller.addresses = {0: address}
        began = time.monotonic()
        assert caller.reach(0, 0.3).what == found
        assert time.monotonic() - began < 5
        caller.close()


def test_it_listens_within_a_range_until_all_ports_are_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listen_within(range(port, port + 2))
        try:
            found = Listener("127.0.0.1", TOKEN)
            assert found.address == ("127.0.0.1", port + 1)
            for listen in (lambda: Listener("127.0.0.1", TOKEN), lambda: free_port("127.0.0.1")):
                with pytest.raises(CommunicationError, match=rf"all ports from {port} to {port + 1} .*`ports`"):
                    listen()
            found.end()
            assert free_port("127.0.0.1") == port + 1
        finally:
            listen_within(())
    assert free_port("127.0.0.1") == 0
