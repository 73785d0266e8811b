"""Connections between members: JSON lines over TCP, handled by one thread."""

import errno
import hmac
import json
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from lightning_hetero.comm.leaving import spare

HostPort = tuple[str, int]

_GREETING = 256  # bytes of the first line, before which nothing is known about the other end
_PART = 1 << 16  # bytes that are read at once
_LINE = 1 << 18  # bytes of a message; the largest names some thousand members
_BACKLOG = 1 << 20  # bytes that wait to be sent
_STRANGERS = 16  # connections at a time, beside those of members, that have not said who they are
_HURRY = 5.0  # seconds within which they must say it, and within which a connection must be made


class Happening(NamedTuple):
    """Something that has happened on a connection.

    Attributes:
        what: ``opened``, ``message``, ``closed``, or ``refused`` (nobody listens there).
        link: the connection.
        message: that has come.
    """

    what: str
    link: "Link"
    message: dict[str, Any]


class Link:
    """A connection to another member.

    Args:
        wire: of which it is a part.
        connection: the socket.
        peer: id of the other member; ``None`` until it has said it.

    Attributes:
        mine: whether this member made the connection.
        open: whether both ends have said who they are.
        closed: whether it has ended.
        dropped: whether this member has closed it.
        since: when it began, by ``time.monotonic()``.
    """

    def __init__(self, wire: "Wire", connection: socket.socket, peer: int | None) -> None:
        self.wire, self.connection, self.peer = wire, connection, peer
        spare(connection)
        self.mine, self.open, self.closed = peer is not None, False, False
        self.dropped = False
        self.connecting = self.mine
        self.since = time.monotonic()
        self.incoming, self.outgoing = b"", b""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, now or as soon as the other end takes it."""
        self.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def write(self, data: bytes) -> None:
        """Send bytes, now or as soon as the other end takes them."""
        if not self.closed:
            self.outgoing += data
            self.flush()

    def flush(self) -> None:
        """Send what waits."""
        if self.outgoing and not self.connecting:
            try:
                self.outgoing = self.outgoing[self.connection.send(self.outgoing) :]
            except BlockingIOError:
                pass
            except OSError:
                self.outgoing = b""  # the end of the connection will be read
        if len(self.outgoing) > _BACKLOG:
            self.wire.end(self)
        elif not self.closed:
            self.wire.watch(self)

    def close(self) -> None:
        """Close the connection; nothing is heard of it any more, not even what has come already."""
        self.dropped = True
        self.wire.forget(self)


class Wire:
    """Listens for other members, and connects to them. Only one thread may use it, except for :meth:`wake`.

    Each connection begins with a line from both ends: the job's token and the id. Nothing else is read before.

    Args:
        me: this member.
        interface: address to listen on.
        token: the job's secret.

    Attributes:
        address: where this member listens.
        addresses: where others do.
    """

    def __init__(self, me: int, interface: str, token: str) -> None:
        self._token = token.encode()
        self._greeting = f"{token} {me}\n".encode()
        self.addresses: dict[int, HostPort] = {}
        self._listener = socket.create_server((interface, 0), backlog=256)
        self._listener.setblocking(False)
        self.address: HostPort = self._listener.getsockname()[:2]
        self._wakes, self._woken = socket.socketpair()
        for end in (self._wakes, self._woken):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._links: set[Link] = set()
        self._happened: deque[Happening] = deque()

    def connect(self, peer: int) -> Link:
        """Begin to connect to a member. What becomes of it is told by :meth:`poll`."""
        connection = socket.socket()
        connection.setblocking(False)
        link = Link(self, connection, peer)
        link.outgoing = self._greeting
        self._links.add(link)
        self._selector.register(connection, selectors.EVENT_WRITE, link)
        try:
            error = connection.connect_ex(self.addresses[peer])
        except OSError:  # a name that is not known
            error = errno.EHOSTUNREACH
        if error not in (0, errno.EINPROGRESS):
            self.end(link, _ending(error))
        return link

    def poll(self, seconds: float) -> Collection[Happening]:
        """What has happened; waits for the first thing."""
        for key, ready in self._selector.select(0.0 if self._happened else seconds):
            if key.fileobj is self._woken:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
            elif key.fileobj is self._listener:
                self._accept()
            elif not key.data.closed:
                self._handle(key.data, ready)
        now = time.monotonic()
        for link in [link for link in self._links if not link.open and now - link.since > _HURRY]:
            self.end(link)
        happened, self._happened = self._happened, deque()
        return happened

    def wake(self) -> None:
        """Let :meth:`poll` return; from any thread."""
        with suppress(OSError):
            self._wakes.send(b"\0")

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            time.sleep(0.01)  # too many open files, say
            return
        connection.setblocking(False)
        link = Link(self, connection, None)
        self._links.add(link)
        self._selector.register(connection, selectors.EVENT_READ, link)
        strangers = sorted((link for link in self._links if link.peer is None), key=lambda link: link.since)
        if len(strangers) > _STRANGERS + len(self.addresses):
            self.forget(strangers[0])

    def _handle(self, link: Link, ready: int) -> None:
        if link.connecting and ready & selectors.EVENT_WRITE:
            if error := link.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.end(link, _ending(error))
                return
            link.connecting = False
        if ready & selectors.EVENT_WRITE:
            link.flush()
        if ready & selectors.EVENT_READ and not link.closed:
            self._read(link)

    def _read(self, link: Link) -> None:
        try:
            part = link.connection.recv(_PART)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        *lines, link.incoming = (link.incoming + part).split(b"\n")
        try:
            for line in lines:
                if not link.open:
                    self._meet(link, line)
                else:
                    self._happened.append(Happening("message", link, json.loads(line)))
        except (ValueError, RecursionError):
            part = b""
        if not part or len(link.incoming) > (_LINE if link.open else _GREETING):
            self.end(link)

    def _meet(self, link: Link, line: bytes) -> None:
        """Read the first line of the other end. A process that wants to join would say so here."""
        token, _, name = line.partition(b" ")
        if len(line) > _GREETING or not hmac.compare_digest(token, self._token):
            raise ValueError("a stranger")
        peer = int(name)
        if peer not in self.addresses or link.peer not in (None, peer):
            raise ValueError("no member of the job")
        link.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.peer, link.open = peer, True
        if not link.mine:
            link.write(self._greeting)
        self._happened.append(Happening("opened", link, {}))

    def watch(self, link: Link) -> None:
        """Wait for what a connection can do next."""
        writes = selectors.EVENT_WRITE if link.connecting or link.outgoing else 0
        events = writes or selectors.EVENT_READ
        self._selector.modify(link.connection, events if link.connecting else events | selectors.EVENT_READ, link)

    def end(self, link: Link, what: str = "closed") -> None:
        """Close a connection, and tell that it has ended."""
        if not link.closed:
            self.forget(link)
            if link.peer is not None:
                self._happened.append(Happening(what, link, {}))

    def forget(self, link: Link) -> None:
        """Close a connection."""
        if not link.closed:
            link.closed = True
            self._selector.unregister(link.connection)
            self._links.discard(link)
            link.connection.close()

    def close(self) -> None:
        """Close all connections, and listen no longer."""
        for link in list(self._links):
            if not link.connecting:
                with suppress(OSError):  # unread messages would take what was sent last with them
                    link.connection.recv(_PART)
            self.forget(link)
        for one in (self._selector, self._listener, self._wakes, self._woken):
            one.close()

    def after_fork(self) -> None:
        """Close the connections in a child process, which would keep them open for as long as it lives."""
        connections = [self._listener, self._wakes, self._woken, *(link.connection for link in self._links)]
        for connection in connections:
            if connection.fileno() >= 0:
                os.close(connection.detach())
        self._selector.close()


def _ending(error: int) -> str:
    return "refused" if error == errno.ECONNREFUSED else "closed"
