"""How a center's host learns that somebody wants to visit: a wait that can be ended, unlike one of gloo's."""

import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Iterable
from typing import NamedTuple

_TOKEN, _RANK = 16, 4  # bytes
_MOST_STRANGERS = 32  # connections at a time that have not said who they are


class WakeupAddress(NamedTuple):
    """Where visitors ring.

    Attributes:
        host: by its address.
        port: of the host.
        token: the job's secret; who does not know it is sent away.
    """

    host: str
    port: int
    token: bytes


class Wakeup:
    """The host's end: a connection from each visitor, on which every byte is a visit to come.

    Args:
        interface: address to listen on.

    Attributes:
        address: where visitors ring; to be told to ranks of the job only.
    """

    def __init__(self, interface: str) -> None:
        self._listener = socket.create_server((interface, 0), backlog=128)
        host, port = self._listener.getsockname()[:2]
        self.address = WakeupAddress(host, port, secrets.token_bytes(_TOKEN))
        self._visitors: dict[int, socket.socket] = {}
        self._wake, self._woken = socket.socketpair()

    def welcome(self, ranks: Iterable[int], seconds: float) -> None:
        """Let visitors connect; who else does is sent away, as are those who have been silent for longest among many.

        Raises:
            OSError: they do not within so many seconds.
        """
        self._listener.settimeout(seconds)
        until, missing = time.monotonic() + seconds, set(ranks)
        nameless: dict[socket.socket, bytearray] = {}  # with what each has said, in the order in which they came
        try:
            while missing:
                ready = _ready([self._listener, *nameless], max(until - time.monotonic(), 0.0))
                if not ready:
                    raise TimeoutError(f"rank(s) {sorted(missing)} did not come within {seconds:g} s")
                if self._listener in ready:
                    connection, _ = self._listener.accept()
                    connection.setblocking(False)
                    nameless[connection] = bytearray()
                    if len(nameless) > _MOST_STRANGERS:  # a visitor says at once who it is
                        longest = next(iter(nameless))
                        del nameless[longest]
                        longest.close()
                for connection in nameless.keys() & set(ready):  # nobody waits for one that says nothing
                    if _says_more(connection, nameless[connection]):
                        continue
                    rank = self._name(nameless.pop(connection))
                    if rank in missing:
                        missing.remove(rank)
                        self._visitors[rank] = connection
                    else:
                        connection.close()
        finally:
            for connection in (self._listener, *nameless):
                connection.close()

    def _name(self, said: bytearray) -> int | None:
        """The rank with which a visitor introduces itself; ``None``: it is none of ours."""
        if len(said) != _TOKEN + _RANK or not hmac.compare_digest(said[:_TOKEN], self.address.token):
            return None
        return int.from_bytes(said[_TOKEN:], "big")

    def wait(self, ranks: Iterable[int] | None = None) -> int | None:
        """Wait until one of some ranks rings, by default of all that are there; ``None``: the wait has been ended.

        Raises:
            ConnectionError: one has ended.
        """
        there = self._visitors if ranks is None else {rank: self._visitors[rank] for rank in ranks}
        sockets = {connection: rank for rank, connection in there.items()}
        ready = _ready([self._wake, *sockets])
        if self._wake in ready:
            return None
        rank = sockets[ready[0]]
        if not ready[0].recv(1):
            raise ConnectionError(f"rank {rank} has ended")
        return rank

    def say_goodbye(self, rank: int) -> None:
        """A visitor comes no more."""
        self._visitors.pop(rank).close()

    def end(self) -> None:
        """End a wait, from another thread; idempotent."""
        if self._woken.fileno() >= 0:
            self._woken.close()

    def close(self) -> None:
        """Close all connections; by the thread that waits."""
        for connection in (self._listener, self._wake, *self._visitors.values()):
            connection.close()


class WakeupClient:
    """A visitor's end.

    Args:
        address: of the wakeup.
        rank: this one's.
        seconds: longest wait for the host.
    """

    def __init__(self, address: WakeupAddress, rank: int, seconds: float) -> None:
        self._connection = socket.create_connection((address.host, address.port), seconds)
        self._connection.sendall(address.token + rank.to_bytes(_RANK, "big"))

    def press(self) -> None:
        """Announce a visit.

        Raises:
            OSError: the host has ended, or serves no more.
        """
        if self.host_ended:
            raise ConnectionError("its host has ended")
        self._connection.sendall(b"!")

    @property
    def host_ended(self) -> bool:
        """Whether the host has ended, or serves no more."""
        # It never says anything: what could be read is the end.
        return self._connection.fileno() >= 0 and bool(_ready([self._connection], 0.0))

    def close(self) -> None:
        """Leave; idempotent."""
        self._connection.close()


def _ready(connections: Iterable[socket.socket], seconds: float | None = None) -> list[socket.socket]:
    """Those on which something has come, or that have ended; waits for one, by default for ever."""
    with selectors.DefaultSelector() as selector:  # `select` itself fails where a process has a thousand files open
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ, connection)
        return [key.data for key, _ in selector.select(seconds)]


def _says_more(connection: socket.socket, said: bytearray) -> bool:
    """Take what has come of a visitor's first words; whether more is to come."""
    try:
        part = connection.recv(_TOKEN + _RANK - len(said))
    except BlockingIOError:
        return True
    except OSError:
        return False
    said += part
    return bool(part) and len(said) < _TOKEN + _RANK
