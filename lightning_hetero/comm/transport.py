"""Transport: the listening socket of a rank, which hands over connections once they have shown a token.

All connections between ranks that this package makes itself begin in the same way, with one line from the end that
connects: the token of the service, a blank, and the number of the peer. Nothing else is read before.
"""

import hmac
import os
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

HostPort = tuple[str, int]

GREETING = 256  # bytes of the first line, at most
STRANGERS = 16  # connections at a time, beside those of peers, that have not said who they are
HURRY = 5.0  # seconds within which they must say it


class Caller(NamedTuple):
    """Connection of a peer that has shown the token.

    Attributes:
        connection: the socket.
        peer: number of the peer, as it says.
    """

    connection: socket.socket
    peer: int


def greeting(token: str, peer: int) -> bytes:
    """The first line of a connection.

    Args:
        token: of the service.
        peer: number of this end.
    """
    return f"{token} {peer}\n".encode()


def connect(address: HostPort, token: str, peer: int, seconds: float) -> socket.socket:
    """Connect to a :class:`Listener`.

    Args:
        address: of the listener.
        token: of the service.
        peer: number of this end.
        seconds: longest wait.

    Raises:
        OSError: nobody can be reached there.
    """
    connection = socket.create_connection(address, seconds)
    try:
        connection.sendall(greeting(token, peer))
    except OSError:
        connection.close()
        raise
    return connection


class Listener:
    """Listening socket that hands over connections once they have shown the token and said who they are.

    What strangers send is not parsed. A few connections of strangers are kept, for some seconds; where there are more,
    the oldest one is closed.

    Only one thread may use it, except for :meth:`close`.

    Args:
        interface: address to listen on.
        token: secret of the service, without blanks. Only peers may know it.
        peers: number of peers, all of which may connect at the same moment.
        made: called with each new connection, before anything is read from it.

    Attributes:
        address: where peers connect.
        token: the secret.
        peers: number of peers; it may change.
    """

    def __init__(
        self,
        interface: str,
        token: str,
        peers: int = 0,
        made: Callable[[socket.socket], None] = lambda connection: None,
    ) -> None:
        self.token, self.peers, self._made = token, peers, made
        self._socket = socket.create_server((interface, 0), backlog=256)
        self._socket.setblocking(False)
        self.address: HostPort = self._socket.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._strangers: dict[socket.socket, tuple[float, bytes]] = {}  # since when, and what they have sent
        self._closed = False

    def fileno(self) -> int:
        """File descriptor for a selector: it is readable when :meth:`accept` has something to do."""
        return self._selector.fileno()

    def accept(self, seconds: float = 0.0) -> list[Caller]:
        """The peers that have connected and said who they are.

        Args:
            seconds: longest wait for one.

        Returns:
            Their connections, which are blocking; none if none came in time, or if this is closed.
        """
        until = time.monotonic() + seconds
        while not self._closed:
            left = max(until - time.monotonic(), 0.0)
            if (callers := self._turn(min(left, HURRY) if self._strangers else left)) or not left:
                return callers
        return []

    def _turn(self, seconds: float) -> list[Caller]:
        callers = list[Caller]()
        for key, _ in self._selector.select(seconds):
            connection = key.fileobj
            if connection is self._socket:
                self._admit()
            elif connection in self._strangers:
                callers += self._read(connection)
        now = time.monotonic()
        for connection in [one for one, (since, _) in self._strangers.items() if now - since > HURRY]:
            self._forget(connection).close()
        return callers

    def _admit(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:  # it has gone again
            return
        except OSError:
            if not self._closed:
                time.sleep(0.01)  # too many open files, say
            return
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._made(connection)
        self._strangers[connection] = time.monotonic(), b""
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._strangers) > self.peers + STRANGERS:
            self._forget(next(iter(self._strangers))).close()

    def _read(self, connection: socket.socket) -> list[Caller]:
        """The peer, if its first line is whole and right; other connections are closed, unless more may come."""
        since, before = self._strangers[connection]
        try:
            there, end, _ = connection.recv(GREETING + 1, socket.MSG_PEEK).partition(b"\n")
            part = connection.recv(len(there) + len(end))  # what comes after the line is for whom it is
        except BlockingIOError:
            return []
        except OSError:
            part = end = b""
        line = (before + part).removesuffix(b"\n")
        if part and not end and len(line) <= GREETING:
            self._strangers[connection] = since, line
            return []
        self._forget(connection)
        token, _, name = line.partition(b" ")
        if end and len(line) <= GREETING and hmac.compare_digest(token, self.token.encode()):
            with suppress(ValueError):
                caller = Caller(connection, int(name))
                connection.setblocking(True)
                return [caller]
        connection.close()
        return []

    def _forget(self, connection: socket.socket) -> socket.socket:
        self._selector.unregister(connection)
        del self._strangers[connection]
        return connection

    def close(self) -> None:
        """Listen no longer; who waits in :meth:`accept`, in any thread, gets nobody. Idempotent."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # which wakes up who waits; closing it would not

    def end(self) -> None:
        """Close all that is left, on the thread that uses it; idempotent."""
        self.close()
        for connection in (self._socket, *self._strangers):
            connection.close()
        self._strangers = {}
        self._selector.close()

    def after_fork(self) -> None:
        """Close the connections in a child process, which would keep them open for as long as it lives."""
        for connection in (self._socket, *self._strangers):
            if connection.fileno() >= 0:
                os.close(connection.detach())
        self._strangers = {}
        self._selector.close()
