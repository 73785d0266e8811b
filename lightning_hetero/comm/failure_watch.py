"""Connections between ranks over which the news of a failure spreads."""

import hmac
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Literal, NamedTuple

from lightning_hetero.comm.leaving import close_at_exit, spare

_LONGEST = 4096  # bytes of a message
_UNNAMED = 16  # connections at a time, beside those of ranks, that have not said which rank they are
_HURRY = 10.0  # seconds within which they must say it
_TEXT = 300  # characters of an error's text that are sent
#: Of a rank that has said nothing.
GONE = (
    "has ended without a word: killed, out of memory, its program is over, or gloo has aborted it at a collective of "
    "your own with unequal sizes or types on the ranks"
)

#: ``failed``: an error of its own. ``echo``: an error because of another rank. ``gone``: its process has ended.
Kind = Literal["failed", "echo", "gone"]


class Failure(NamedTuple):
    """What has happened to a rank.

    Attributes:
        rank: the rank.
        kind: of failure.
        run: number of the fit, validation, test or prediction in which it happened.
        how: completes "rank 2 ...".
    """

    rank: int
    kind: Kind
    run: int
    how: str

    def __str__(self) -> str:
        return f"rank {self.rank} {self.how}"


class Failures:
    """Keeps a connection between rank 0 and every other rank, on which nothing is sent until one fails, or waits long.

    A rank sends its error to rank 0 before it ends. If a rank was killed, its connection ends. Rank 0 forwards all of
    this to the others, in its order. So every rank knows which failure came first, also if its own connection broke
    with a rank that ended only because of that failure.

    Args:
        rank: this process.
        world: number of ranks.
        host: on rank 0, the address to listen on.
        told: called when another rank has told of its failure, or has ended.
        heard: called with each message of :meth:`tell` from another rank, on a thread.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        host: str = "",
        told: Callable[[Failure], None] = lambda failure: None,
        heard: Callable[[dict], None] = lambda _: None,
    ) -> None:
        self._told, self._heard = told, heard
        self.rank, self.world, self.run = rank, world, 0
        self._changed = threading.Condition()  # guards all that follows
        self._known: dict[tuple[int, Kind], Failure] = {}  # in order
        self._others: dict[socket.socket, int] = {}  # of rank 0: the rank at the other end, -1 until it is known
        self._closed = False
        self._listener = socket.create_server((host, 0), backlog=256) if rank == 0 else None
        self._token = secrets.token_hex(16) if rank == 0 else ""
        close_at_exit(self)

    @property
    def where(self) -> tuple[str, int, str]:
        """Address, port and token for the other ranks; on rank 0."""
        assert self._listener is not None
        return *self._listener.getsockname()[:2], self._token

    def listen(self) -> None:
        """Begin to listen; on rank 0."""
        threading.Thread(target=self._serve, name="hetero-failures", daemon=True).start()

    def connect(self, where: tuple[str, int, str], seconds: float) -> None:
        """Connect to rank 0; on another rank.

        Args:
            where: its address, port and token.
            seconds: longest wait.

        Raises:
            OSError: rank 0 cannot be reached.
        """
        host, port, token = where
        connection = socket.create_connection((host, port), seconds)
        connection.settimeout(None)
        spare(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.sendall(f"{token} {self.rank}\n".encode())
        self._others[connection] = 0
        threading.Thread(target=self._receive, args=(connection,), name="hetero-failures", daemon=True).start()

    # -- what ranks send and ask -------------------------------------------------------------------

    def announce(self, kind: Kind, how: str) -> None:
        """Let all ranks know what has happened to this one, before it ends.

        Args:
            kind: of failure.
            how: completes "rank 2 ...".
        """
        failure = Failure(self.rank, kind, self.run, how[:_TEXT])
        with self._changed:
            self._record(failure)
            self._forward(failure)

    def tell(self, **message: object) -> None:
        """Send a message to all other ranks, or to one.

        Args:
            **message: can be written as JSON; ``to``: the rank, if to one.
        """
        with self._changed:
            self._pass_on({**message, "by": self.rank})

    def first(self, seconds: float) -> Failure | None:
        """The failure of another rank that came first; ``None``: none is known.

        Args:
            seconds: longest wait for one.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._first() is not None, seconds)
            return self._first()

    def _first(self) -> Failure | None:
        for failure in self._known.values():
            echo = self._known.get((failure.rank, "echo"))
            blameless = failure.kind == "echo" or (echo is not None and echo.run >= self.run)
            of_now = failure.kind == "gone" or failure.run >= self.run
            if failure.rank != self.rank and of_now and not blameless:
                return failure
        return None

    def _record(self, failure: Failure) -> None:
        old = self._known.get((failure.rank, failure.kind))
        if old is None or old.run < failure.run:
            self._known.pop((failure.rank, failure.kind), None)
            self._known[failure.rank, failure.kind] = failure
            self._changed.notify_all()
            if failure.rank != self.rank:
                self._told(failure)

    def _forward(self, failure: Failure) -> None:
        line = _line(failure._asdict())
        for connection, rank in self._others.items():
            if rank not in (failure.rank, -1):
                with suppress(OSError):  # it has ended as well
                    connection.sendall(line)

    def _pass_on(self, message: dict) -> None:
        line, to = _line(message), message.get("to")
        for connection, rank in self._others.items():
            if rank not in (message["by"], -1) and (self.rank or to in (None, rank)):
                with suppress(OSError):
                    connection.sendall(line)

    def _lost(self, rank: int) -> Failure:
        explained = any((rank, kind) in self._known for kind in ("failed", "echo"))
        return Failure(rank, "gone", self.run, "has ended" if explained else GONE)

    # -- other ranks than 0 ------------------------------------------------------------------------

    def _receive(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            for message in _messages(connection):
                with self._changed:
                    if "by" in message:
                        self._heard(message)
                    else:
                        self._record(Failure(**message))
        with self._changed:
            if not self._closed:
                self._record(self._lost(0))

    # -- rank 0 ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        assert self._listener is not None
        self._listener.setblocking(False)
        buffers: dict[socket.socket, bytes] = {}
        since: dict[socket.socket, float] = {}  # start of the connections that have not said which rank they are
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)

            def drop(connection: socket.socket) -> None:
                selector.unregister(connection)
                connection.close()
                since.pop(connection, None)
                buffers.pop(connection, None)
                with self._changed:
                    rank = self._others.pop(connection, -1)
                    if rank >= 0 and not self._closed:
                        failure = self._lost(rank)
                        self._record(failure)
                        self._forward(failure)

            while not self._closed:
                ready = [key.fileobj for key, _ in selector.select(_HURRY if since else None)]
                for late in [c for c, then in since.items() if time.monotonic() - then > _HURRY]:
                    drop(late)
                for one in ready:
                    assert isinstance(one, socket.socket)
                    if one is self._listener:
                        with suppress(OSError):
                            connection, _ = one.accept()
                            if len(since) >= _UNNAMED + self.world:
                                drop(min(since, key=since.__getitem__))
                            spare(connection)
                            connection.settimeout(1.0)  # for sending; what is read has already come
                            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                            selector.register(connection, selectors.EVENT_READ)
                            buffers[connection], since[connection] = b"", time.monotonic()
                    elif one in buffers and not self._read(one, buffers, since):
                        drop(one)
            for connection in (self._listener, *buffers):
                connection.close()

    def _read(
        self, connection: socket.socket, buffers: dict[socket.socket, bytes], since: dict[socket.socket, float]
    ) -> bool:
        """Handle what has come; whether to keep the connection."""
        try:
            part = connection.recv(_LONGEST)
            *lines, rest = (buffers[connection] + part).split(b"\n")
            if not part or len(rest) > _LONGEST:
                return False
            buffers[connection] = rest
            for line in lines:
                with self._changed:
                    if connection not in since:
                        message = json.loads(line)
                        if "by" in message:
                            message["by"] = self._others[connection]
                            self._pass_on(message)
                            if message.get("to") in (None, 0):
                                self._heard(message)
                            continue
                        failure = Failure(self._others[connection], message["kind"], message["run"], message["how"])
                        self._record(failure)
                        self._forward(failure)
                        continue
                    token, _, rank = line.partition(b" ")  # what a stranger sends is not parsed
                    if not hmac.compare_digest(token, self._token.encode()):
                        return False
                    self._others[connection] = int(rank)
                    del since[connection]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return True

    def close(self) -> None:
        """Close all connections; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            connections = [*self._others, *([self._listener] if self._listener else [])]
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def after_fork(self) -> None:
        """Close the connections in a child process, which would keep them open for as long as it lives."""
        for connection in (*self._others, self._listener):
            if connection is not None and connection.fileno() >= 0:
                os.close(connection.detach())  # at once: a file object may still refer to it


def _line(message: dict[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _messages(connection: socket.socket) -> Iterator[dict]:
    with connection.makefile("rb") as lines:
        for line in lines:
            yield json.loads(line)
