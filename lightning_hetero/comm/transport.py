"""Transport between ranks: listening sockets, the token with which connections begin, and messages.

All connections between ranks that this package makes itself begin in the same way, with one line from the end that
connects: the token of the service, a blank, and the number of the peer. Nothing else is read before. Then messages
come: lines of JSON, with many peers on one thread (:class:`MessageTransport`), or numbers and vectors, with a thread
for each connection (:class:`VectorChannel`).
"""

import errno
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_hetero.comm.threads import Background, abort_too, exclude_from_abort
from lightning_hetero.errors import CommunicationError, not_none

HostPort = tuple[str, int]

GREETING = 256  # bytes of the first line, at most
STRANGERS = 16  # connections at a time, beside those of peers, that have not said who they are
HURRY = 5.0  # seconds within which they must say it
_ANSWER = 3.0  # seconds within which a machine takes a connection; a lost packet is sent again after 1 s


_ports: Sequence[int] = (0,)


def listen_within(ports: Sequence[int]) -> None:
    """Let all sockets on which this process listens from now on have one of some ports.

    Args:
        ports: to choose from; with none the system chooses.
    """
    global _ports
    _ports = ports or (0,)


def listening_socket(interface: str) -> socket.socket:
    """A socket that listens at an address, at a port that :func:`listen_within` allows.

    Args:
        interface: address to listen on.

    Raises:
        CommunicationError: all these ports are taken.
    """
    for port in _ports:
        try:
            return socket.create_server((interface, port), backlog=256)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise CommunicationError(
        f"all ports from {_ports[0]} to {_ports[-1]} (the strategy's `ports`) are taken at {interface}. Give a longer "
        "range, or end what listens there."
    )


def free_port(interface: str) -> int:
    """A port at which another library can listen; 0, by which the system chooses, unless there is a range.

    Args:
        interface: address to listen on.

    Raises:
        CommunicationError: all these ports are taken.
    """
    if _ports == (0,):
        return 0
    with listening_socket(interface) as free:
        return free.getsockname()[1]


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
        made: called with each new connection, before anything is read from it.

    Attributes:
        address: where peers connect.
        token: the secret.
        peers: number of peers, all of which may connect at the same moment; to be set.
    """

    def __init__(
        self, interface: str, token: str, made: Callable[[socket.socket], None] = lambda connection: None
    ) -> None:
        self.token, self.peers, self._made = token, 0, made
        self._socket = listening_socket(interface)
        exclude_from_abort(self._socket)
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


_PART = 1 << 16  # bytes that are read at once
_LINE = 1 << 18  # bytes of a message; the largest names some thousand ranks
_BACKLOG = 1 << 20  # bytes that wait to be sent


class LinkEvent(NamedTuple):
    """Event on a connection.

    Attributes:
        what: ``opened``, ``message``, ``closed``, ``refused`` (nobody listens there), ``late`` (the other end has not
            answered in time, or not said who it is), or ``stranger`` (it does not begin as a peer does).
        link: the connection.
        message: that has come.
    """

    what: str
    link: "MessageLink"
    message: dict[str, Any]


class MessageLink:
    """Connection over which messages go: mappings as JSON has them, each on a line.

    Args:
        transport: of which it is a part.
        connection: the socket.
        peer: number of the other end.
        mine: whether this end made the connection.

    Attributes:
        open: whether both ends have said who they are.
        closed: whether it has ended.
        dropped: whether this end has closed it.
        since: when it began, by ``time.monotonic()``.
    """

    def __init__(self, transport: "MessageTransport", connection: socket.socket, peer: int, mine: bool) -> None:
        self.transport, self.connection, self.peer, self.mine = transport, connection, peer, mine
        exclude_from_abort(connection)
        self.open = self.closed = self.dropped = False
        self.connecting = mine
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
            self.transport.end(self)
        elif not self.closed:
            self.transport.watch(self)

    def close(self) -> None:
        """Close the connection; nothing is heard of it any more, not even what has come already."""
        self.dropped = True
        self.transport.forget(self)


class MessageTransport:
    """Transport of messages between peers: listens for them, and connects to them.

    Each connection begins with a line from both ends: the token and the peer's number. Nothing else is read before.
    Only one thread may use it, except for :meth:`wake`.

    Args:
        me: number of this peer.
        token: secret of the service, without blanks.
        interface: address to listen on; ``None``: this peer only connects to others.

    Attributes:
        address: where this peer listens, if it does.
        addresses: where others do; ``None`` for one that only connects to this peer. All others are sent away, unless
            it is ``None`` itself: then whoever has the token may connect.
    """

    def __init__(self, me: int, token: str, interface: str | None = None) -> None:
        self._token, self._greeting = token.encode(), greeting(token, me)
        self.addresses: dict[int, HostPort | None] | None = {}
        self._listener = None if interface is None else Listener(interface, token, made=exclude_from_abort)
        self.address = None if self._listener is None else self._listener.address
        self._wakes, self._woken = socket.socketpair()
        for end in (self._wakes, self._woken):
            end.setblocking(False)
            exclude_from_abort(end)
        self._selector = selectors.DefaultSelector()
        if self._listener is not None:
            self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._links: set[MessageLink] = set()
        self._happened: deque[LinkEvent] = deque()

    def connect(self, peer: int) -> MessageLink:
        """Begin to connect to a peer. What becomes of it is told by :meth:`poll`."""
        connection = socket.socket()
        connection.setblocking(False)
        link = MessageLink(self, connection, peer, mine=True)
        link.outgoing = self._greeting
        self._links.add(link)
        self._selector.register(connection, selectors.EVENT_WRITE, link)
        try:
            error = connection.connect_ex(not_none((self.addresses or {})[peer], "the address of a peer"))
        except OSError:  # a name that is not known
            error = errno.EHOSTUNREACH
        if error not in (0, errno.EINPROGRESS):
            self.end(link, _ending(error))
        return link

    def reach(self, peer: int, seconds: float) -> LinkEvent:
        """Connect to a peer that may be busy, and wait until it answers.

        Args:
            peer: its number.
            seconds: longest wait.

        Returns:
            The end of the wait: the connection is ``opened``, or why it is not. :meth:`poll` tells all other events.
        """
        until, others = time.monotonic() + seconds, list[LinkEvent]()
        event = LinkEvent("late", self.connect(peer), {})
        while event.what == "late" and (left := until - time.monotonic()) > 0:
            link = self.connect(peer) if event.link.closed else event.link
            happened = self.poll(min(left, HURRY))
            event = next((event for event in happened if event.link is link), LinkEvent("late", link, {}))
            others += [other for other in happened if other is not event]
        self._happened.extendleft(reversed(others))
        return event

    def poll(self, seconds: float) -> Collection[LinkEvent]:
        """Events on the connections; waits for the first one."""
        for key, ready in self._selector.select(0.0 if self._happened else seconds):
            if key.fileobj is self._woken:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
            elif key.fileobj is not self._listener and not key.data.closed:
                self._handle(key.data, ready)
        if self._listener is not None:
            self._listener.peers = len(self.addresses or ())
            for caller in self._listener.accept():
                self._take(caller)
        now = time.monotonic()
        for link in [link for link in self._links if not link.open]:
            if now - link.since > (_ANSWER if link.connecting else HURRY):
                self.end(link, "late")
        happened, self._happened = self._happened, deque()
        return happened

    def wake(self) -> None:
        """Let :meth:`poll` return; from any thread."""
        with suppress(OSError):
            self._wakes.send(b"\0")

    def _take(self, caller: Caller) -> None:
        """A peer has connected."""
        if self.addresses is not None and caller.peer not in self.addresses:
            caller.connection.close()
            return
        caller.connection.setblocking(False)
        link = MessageLink(self, caller.connection, caller.peer, mine=False)
        self._links.add(link)
        self._selector.register(link.connection, selectors.EVENT_READ, link)
        self._opened(link)
        link.write(self._greeting)

    def _handle(self, link: MessageLink, ready: int) -> None:
        if link.connecting and ready & selectors.EVENT_WRITE:
            if error := link.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.end(link, _ending(error))
                return
            link.connecting = False
        if ready & selectors.EVENT_WRITE:
            link.flush()
        if ready & selectors.EVENT_READ and not link.closed:
            self._read(link)

    def _read(self, link: MessageLink) -> None:
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
                    self._happened.append(LinkEvent("message", link, json.loads(line)))
        except (ValueError, RecursionError):
            self.end(link, "closed" if link.open else "stranger")
        if not part or len(link.incoming) > (_LINE if link.open else GREETING):
            self.end(link)

    def _meet(self, link: MessageLink, line: bytes) -> None:
        """Read the first line of the other end, to which this one has connected."""
        token, _, name = line.partition(b" ")
        if len(line) > GREETING or not hmac.compare_digest(token, self._token):
            raise ValueError("a stranger")
        if int(name) != link.peer:
            raise ValueError("another peer")
        self._opened(link)

    def _opened(self, link: MessageLink) -> None:
        link.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.open = True
        self._happened.append(LinkEvent("opened", link, {}))

    def watch(self, link: MessageLink) -> None:
        """Wait for what a connection can do next."""
        reads = 0 if link.connecting else selectors.EVENT_READ
        writes = selectors.EVENT_WRITE if link.connecting or link.outgoing else 0
        self._selector.modify(link.connection, reads | writes, link)

    def end(self, link: MessageLink, what: str = "closed") -> None:
        """Close a connection, and tell that it has ended."""
        if not link.closed:
            self.forget(link)
            self._happened.append(LinkEvent(what, link, {}))

    def forget(self, link: MessageLink) -> None:
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
        if self._listener is not None:
            self._listener.end()
        for one in (self._selector, self._wakes, self._woken):
            one.close()


def _ending(error: int) -> str:
    return "refused" if error == errno.ECONNREFUSED else "closed"


KEY_BYTES = 16
#: key, kind, serial number, how many numbers, bytes of vectors; then a checksum of all
_HEADER = struct.Struct(f"!{KEY_BYTES}sIQIQ")
_CHECKSUM = struct.Struct("!I")
_MOST_NUMBERS = 64


class VectorMessage(NamedTuple):
    """A message with numbers and vectors.

    Attributes:
        kind: of the message.
        numbers: a few numbers; what they mean depends on the kind.
        vectors: vectors on the CPU.
    """

    kind: int
    numbers: tuple[float, ...] = ()
    vectors: tuple[Tensor, ...] = ()


class RefusedError(Exception):
    """Refusal of a message that must not be believed. Says why in one word."""


class VectorChannel:
    """Sends and receives vectors over one connection. Each message arrives complete and in time, or not at all.

    Each connection has its own key, made of the token and of random bytes from one end. So messages that were recorded
    from another connection are refused.

    Args:
        connection: to the other end.
        token: a secret that both ends must have; the key until :meth:`begin`.
        peer: number of the other end.
        seconds: within which a message must be sent, or have come.

    Attributes:
        peer: number of the other end.
        received: number of messages that have come.
    """

    def __init__(self, connection: socket.socket, token: bytes, peer: int, seconds: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        abort_too(connection)
        self._connection, self._key, self.peer, self._seconds = connection, token, peer, seconds
        self._sent = self.received = 0  # serial numbers, too: a message that comes twice is refused

    def begin(self, draws: bool, deadline: float) -> None:
        """Agree on the key.

        Args:
            draws: whether this end draws the random bytes.
            deadline: time by which they must have come, or be sent.

        Raises:
            OSError: they were too late, or the connection has broken.
        """
        drawn = secrets.token_bytes(KEY_BYTES) if draws else bytearray(KEY_BYTES)
        if draws:
            self._limit(deadline)
            self._connection.sendall(drawn)
        else:
            self._fill(memoryview(drawn), deadline)
        self._key = hmac.digest(self._key, drawn, hashlib.sha256)[:KEY_BYTES]

    def send(self, kind: int, numbers: Sequence[float] = (), vectors: Sequence[Tensor] = ()) -> int:
        """Send a message.

        Args:
            kind: of the message.
            numbers: at most 64.
            vectors: contiguous vectors on the CPU.

        Returns:
            The bytes sent.

        Raises:
            OSError: it could not be sent in time. The connection cannot be used any more.
        """
        deadline = time.monotonic() + self._seconds
        parts: list[Any] = [struct.pack(f"!{len(numbers)}d", *numbers), *map(_bytes, vectors)]
        self._sent += 1
        size = sum(len(part) for part in parts[1:])
        header = _HEADER.pack(self._key, kind, self._sent, len(numbers), size)
        checksum = zlib.crc32(header)
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        for part in (header + _CHECKSUM.pack(checksum), *parts):
            self._limit(deadline)
            self._connection.sendall(part)
        return len(header) + _CHECKSUM.size + len(parts[0]) + size

    def receive(
        self, into: Callable[[int], Sequence[Tensor]] | None = None, times: float | None = 1.0
    ) -> VectorMessage:
        """Receive a message.

        Args:
            into: gives the vectors to fill, for a kind of message that comes with vectors. Default: none may.
            times: how many times the usual seconds it may take; ``None``: no limit.

        Raises:
            OSError: it did not come in time, or the connection has broken.
            RefusedError: it has another key, is damaged, or has come before.
        """
        deadline = None if times is None else time.monotonic() + times * self._seconds
        head = memoryview(bytearray(_HEADER.size + _CHECKSUM.size))
        self._fill(head, deadline)
        header = head[: _HEADER.size]
        key, kind, serial, count, size = _HEADER.unpack(header)
        [checksum] = _CHECKSUM.unpack(head[_HEADER.size :])
        if not hmac.compare_digest(key, self._key):
            raise RefusedError("token")
        if serial != self.received + 1:
            raise RefusedError("replayed")
        vectors: tuple[Tensor, ...] = ()
        if size:
            if into is None:
                raise RefusedError("uninvited")
            vectors = tuple(into(kind))
        memories = [_bytes(vector) for vector in vectors]
        if count > _MOST_NUMBERS or size != sum(map(len, memories)):
            raise RefusedError("size")
        numbers = memoryview(bytearray(8 * count))
        found = zlib.crc32(header)
        for memory in (numbers, *memories):
            self._fill(memory, deadline)
            found = zlib.crc32(memory, found)
        if found != checksum:
            raise RefusedError("damaged")
        self.received = serial
        return VectorMessage(kind, struct.unpack(f"!{count}d", numbers), vectors)

    def swap(
        self,
        kind: int,
        numbers: Sequence[float],
        vectors: Sequence[Tensor],
        into: Callable[[int], Sequence[Tensor]],
    ) -> tuple[VectorMessage, int]:
        """Send a message and receive one at the same time, so that both directions of a link are used.

        Args:
            kind: of the message to send.
            numbers: at most 64.
            vectors: contiguous vectors on the CPU.
            into: gives the vectors to fill, for the kind of message that comes.

        Returns:
            What has come, and the bytes sent.

        Raises:
            OSError: one of them was too late, or the connection has broken. It is closed.
            RefusedError: what has come must not be believed. The connection is closed.
        """
        sender = Background(lambda: self.send(kind, numbers, vectors))
        try:
            message = self.receive(into)
        except BaseException:
            self.close()  # this also ends the sender
            with suppress(OSError):
                sender.result()
            raise
        return message, sender.result()

    def _fill(self, memory: memoryview, deadline: float | None) -> None:
        while len(memory):
            self._limit(deadline)
            got = self._connection.recv_into(memory)
            if not got:
                raise ConnectionError("the other end has closed the connection")
            memory = memory[got:]

    def _limit(self, deadline: float | None) -> None:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError("too late")
        self._connection.settimeout(left)

    def close(self) -> None:
        """Break the connection. Another thread may call this."""
        with suppress(OSError):  # it is broken already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _bytes(vector: Tensor) -> memoryview:
    return memoryview(vector.view(torch.uint8).numpy())  # type: ignore[arg-type]
