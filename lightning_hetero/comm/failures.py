"""Which rank failed first: every rank can ask, also once others have gone."""

import hmac
import json
import os
import secrets
import selectors
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Literal, NamedTuple

import torch.distributed as dist

from lightning_hetero.comm.leaving import close_at_exit

_LONGEST = 4096  # bytes of a message
_UNNAMED = 16  # connections of strangers at a time, who do not say which rank they are
_HURRY = 10.0  # seconds within which they must
_TEXT = 300  # characters of an error that travel

#: ``failed``: an error of its own. ``echo``: an error because of another rank. ``gone``: its process has ended.
Kind = Literal["failed", "echo", "gone"]


class Failure(NamedTuple):
    """What has happened to a rank.

    Attributes:
        rank: whose.
        kind: of failure.
        run: number of the fit, validation or the like in which it happened.
        how: completes "rank 2 ...".
    """

    rank: int
    kind: Kind
    run: int
    how: str

    def __str__(self) -> str:
        return f"rank {self.rank} {self.how}"


class Failures:
    """Keeps a connection between rank 0 and every other rank, on which nothing is said until one fails.

    A rank tells rank 0 of its error before it ends; of a rank that was killed the connection ends. Rank 0 passes all of
    it on, in its order. So every rank knows what came first, even where it has lost the connection to another rank
    that only ended because of it.

    Args:
        rank: this process's.
        world: number of ranks.
        host: on rank 0, the address to listen on.
    """

    def __init__(self, rank: int, world: int, host: str = "") -> None:
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
        """On rank 0: address, port and token for the others."""
        assert self._listener is not None
        return *self._listener.getsockname()[:2], self._token

    def listen(self) -> None:
        """On rank 0: begin."""
        threading.Thread(target=self._serve, name="hetero-failures", daemon=True).start()

    def connect(self, where: tuple[str, int, str], seconds: float) -> None:
        """On another rank: begin.

        Raises:
            OSError: rank 0 cannot be reached.
        """
        host, port, token = where
        connection = socket.create_connection((host, port), seconds)
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.sendall(f"{token} {self.rank}\n".encode())
        self._others[connection] = 0
        threading.Thread(target=self._hear, args=(connection,), name="hetero-failures", daemon=True).start()

    # -- what ranks say and ask --------------------------------------------------------------------

    def tell(self, kind: Kind, how: str) -> None:
        """Say what has happened to this rank, before it ends."""
        failure = Failure(self.rank, kind, self.run, how[:_TEXT])
        with self._changed:
            self._note(failure)
            self._pass_on(failure)

    def first(self, patience: float) -> Failure | None:
        """What came first, waiting so many seconds for news; ``None``: nothing is known of any other rank."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._first() is not None, patience)
            return self._first()

    def _first(self) -> Failure | None:
        for failure in self._known.values():
            echo = self._known.get((failure.rank, "echo"))
            blameless = failure.kind == "echo" or (echo is not None and echo.run >= self.run)
            of_now = failure.kind == "gone" or failure.run >= self.run
            if failure.rank != self.rank and of_now and not blameless:
                return failure
        return None

    def _note(self, failure: Failure) -> None:
        old = self._known.get((failure.rank, failure.kind))
        if old is None or old.run < failure.run:
            self._known.pop((failure.rank, failure.kind), None)
            self._known[failure.rank, failure.kind] = failure
            self._changed.notify_all()

    def _pass_on(self, failure: Failure) -> None:
        line = _line(failure._asdict())
        for connection, rank in self._others.items():
            if rank not in (failure.rank, -1):
                with suppress(OSError):  # it has ended, too
                    connection.sendall(line)

    def _lost(self, rank: int) -> Failure:
        explained = any((rank, kind) in self._known for kind in ("failed", "echo"))
        how = "has ended" if explained else "has ended without a word: killed, out of memory, or its program is over"
        return Failure(rank, "gone", self.run, how)

    # -- other ranks than 0 ------------------------------------------------------------------------

    def _hear(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            for message in _messages(connection):
                with self._changed:
                    self._note(Failure(**message))
        with self._changed:
            if not self._closed:
                self._note(self._lost(0))

    # -- rank 0 ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        assert self._listener is not None
        self._listener.setblocking(False)
        buffers: dict[socket.socket, bytes] = {}
        since: dict[socket.socket, float] = {}  # of those that have not said yet which rank they are
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
                        self._note(failure)
                        self._pass_on(failure)

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
                            connection.settimeout(1.0)  # of what is sent: what is read is there
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
        """Act on what has come; whether to go on."""
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
                        failure = Failure(self._others[connection], message["kind"], message["run"], message["how"])
                        self._note(failure)
                        self._pass_on(failure)
                        continue
                    token, _, rank = line.partition(b" ")  # no parser reads what a stranger says
                    if not hmac.compare_digest(token, self._token.encode()):
                        return False
                    self._others[connection] = int(rank)
                    del since[connection]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return True

    def close(self) -> None:
        """Listen no more; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            connections = [*self._others, *([self._listener] if self._listener else [])]
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def after_fork(self) -> None:
        """In a child process: let go of the connections, which would stay open as long as the child lives."""
        for connection in (*self._others, self._listener):
            if connection is not None and connection.fileno() >= 0:
                os.close(connection.detach())  # at once, though a file object may still refer to it


def _line(message: dict[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _messages(connection: socket.socket) -> Iterator[dict]:
    with connection.makefile("rb") as lines:
        for line in lines:
            yield json.loads(line)


# -- this process's --------------------------------------------------------------------------------

_failures: Failures | None = None
_world: object = None  # the process group of all ranks that they belong to


def _after_fork() -> None:
    if _failures is not None:
        _failures.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def watch(interface: str, seconds: float) -> None:
    """Begin to watch all ranks, or a new run of them (collective over all ranks the first time).

    Args:
        interface: this machine's address on the job's network.
        seconds: longest wait for rank 0.
    """
    global _failures, _world
    if _world is not dist.group.WORLD:
        if _failures is not None:
            _failures.close()
        _failures, _world = Failures(dist.get_rank(), dist.get_world_size(), interface), dist.group.WORLD
        where = [_failures.where if _failures.rank == 0 else None]
        dist.broadcast_object_list(where, 0)
        if _failures.rank == 0:
            _failures.listen()
        elif where[0] is not None:
            try:
                _failures.connect(where[0], seconds)
            except OSError as error:
                warnings.warn(
                    f"rank {_failures.rank} cannot reach rank 0 at {where[0][0]}: {error}. Errors will not be able to "
                    "name a rank that has ended.",
                    stacklevel=2,
                )
    if _failures is not None:
        _failures.run += 1


def tell(kind: Kind, how: str) -> None:
    """Let all ranks know what has happened to this one, before it ends."""
    if _failures is not None:
        _failures.tell(kind, how)


def first(patience: float) -> Failure | None:
    """The rank whose failure came first, if one is known within so many seconds."""
    return None if _failures is None else _failures.first(patience)
