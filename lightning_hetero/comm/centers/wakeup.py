"""Lets the host of a center wait for requests, in a wait that can be ended, unlike one in gloo."""

import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Iterable
from typing import NamedTuple

_TOKEN, _RANK = 16, 4  # bytes
_MOST_STRANGERS = 32  # connections at a time that have not sent which rank they are


class WakeupAddress(NamedTuple):
    """Where clients connect.

    Attributes:
        host: address of the host.
        port: on which it listens.
        token: a secret. Connections that do not send it are closed.
    """

    host: str
    port: int
    token: bytes


class Wakeup:
    """The host's end: a connection from each client, on which every byte announces a request.

    Args:
        interface: address to listen on.

    Attributes:
        address: where clients connect. Only ranks of the job may know it.
    """

    def __init__(self, interface: str) -> None:
        self._listener = socket.create_server((interface, 0), backlog=128)
        host, port = self._listener.getsockname()[:2]
        self.address = WakeupAddress(host, port, secrets.token_bytes(_TOKEN))
        self._clients: dict[int, socket.socket] = {}
        self._end_read, self._end_write = socket.socketpair()

    def accept_clients(self, ranks: Iterable[int], seconds: float) -> None:
        """Let clients connect. Other connections are closed; if many are silent, the oldest of these too.

        Args:
            ranks: of the clients.
            seconds: longest wait for them.

        Raises:
            OSError: not all clients have connected in time.
        """
        self._listener.settimeout(seconds)
        until, missing = time.monotonic() + seconds, set(ranks)
        unknown: dict[socket.socket, bytearray] = {}  # with what each has sent, in the order in which they came
        try:
            while missing:
                ready = _ready([self._listener, *unknown], max(until - time.monotonic(), 0.0))
                if not ready:
                    raise TimeoutError(f"rank(s) {sorted(missing)} did not come within {seconds:g} s")
                if self._listener in ready:
                    connection, _ = self._listener.accept()
                    connection.setblocking(False)
                    unknown[connection] = bytearray()
                    if len(unknown) > _MOST_STRANGERS:  # a client says at once which rank it is
                        longest = next(iter(unknown))
                        del unknown[longest]
                        longest.close()
                for connection in unknown.keys() & set(ready):  # a silent one delays nobody
                    if _more_to_come(connection, unknown[connection]):
                        continue
                    rank = self._rank_of(unknown.pop(connection))
                    if rank in missing:
                        missing.remove(rank)
                        self._clients[rank] = connection
                    else:
                        connection.close()
        finally:
            for connection in (self._listener, *unknown):
                connection.close()

    def _rank_of(self, sent: bytearray) -> int | None:
        """The rank of a client, from its first bytes; ``None``: it is no client."""
        if len(sent) != _TOKEN + _RANK or not hmac.compare_digest(sent[:_TOKEN], self.address.token):
            return None
        return int.from_bytes(sent[_TOKEN:], "big")

    def wait(self, ranks: Iterable[int] | None = None) -> int | None:
        """Wait for a request.

        Args:
            ranks: clients to wait for. Default: all that are connected.

        Returns:
            The rank of a client that has announced a request; ``None``: :meth:`end` has ended the wait.

        Raises:
            ConnectionError: a client has ended.
        """
        there = self._clients if ranks is None else {rank: self._clients[rank] for rank in ranks}
        sockets = {connection: rank for rank, connection in there.items()}
        ready = _ready([self._end_read, *sockets])
        if self._end_read in ready:
            return None
        rank = sockets[ready[0]]
        if not ready[0].recv(1):
            raise ConnectionError(f"rank {rank} has ended")
        return rank

    def remove(self, rank: int) -> None:
        """Forget a client, which has left."""
        self._clients.pop(rank).close()

    def end(self) -> None:
        """End a wait, from another thread; idempotent."""
        if self._end_write.fileno() >= 0:
            self._end_write.close()

    def close(self) -> None:
        """Close all connections. Only the thread that waits may call this."""
        for connection in (self._listener, self._end_read, *self._clients.values()):
            connection.close()


class WakeupClient:
    """A client's end.

    Args:
        address: of the host.
        rank: this process.
        seconds: longest wait for the host.
    """

    def __init__(self, address: WakeupAddress, rank: int, seconds: float) -> None:
        self._connection = socket.create_connection((address.host, address.port), seconds)
        self._connection.sendall(address.token + rank.to_bytes(_RANK, "big"))

    def announce(self) -> None:
        """Announce a request.

        Raises:
            OSError: the host has ended, or serves no more requests.
        """
        if self.host_ended:
            raise ConnectionError("its host has ended")
        self._connection.sendall(b"!")

    @property
    def host_ended(self) -> bool:
        """Whether the host has ended, or serves no more requests."""
        # The host never sends anything: if there is something to read, it is the end of the connection.
        return self._connection.fileno() >= 0 and bool(_ready([self._connection], 0.0))

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._connection.close()


def _ready(connections: Iterable[socket.socket], seconds: float | None = None) -> list[socket.socket]:
    """The connections that have something to read or have ended. Waits for one, by default without a limit."""
    with selectors.DefaultSelector() as selector:  # `select` itself fails where a process has a thousand files open
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ, connection)
        return [key.data for key, _ in selector.select(seconds)]


def _more_to_come(connection: socket.socket, sent: bytearray) -> bool:
    """Read what has come of a client's first bytes; whether more is to come."""
    try:
        part = connection.recv(_TOKEN + _RANK - len(sent))
    except BlockingIOError:
        return True
    except OSError:
        return False
    sent += part
    return bool(part) and len(sent) < _TOKEN + _RANK
