"""Connections between gossip peers: each listens on one port, and connects to the others when it needs to."""

import hashlib
import hmac
import secrets
import socket
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_hetero.comm.shared_memory import MappedVectors
from lightning_hetero.comm.threads import Background, abort_too, close_at_exit
from lightning_hetero.comm.transport import HostPort, Listener, connect
from lightning_hetero.errors import DisagreementError

TOKEN_BYTES = 16
#: magic, token, epoch, kind, sender, serial number, how many numbers, bytes of vectors; then a checksum of all
_HEADER = struct.Struct(f"!4s{TOKEN_BYTES}sIIIQIQ")
_CHECKSUM = struct.Struct("!I")
_MAGIC = b"lhg1"
_MOST_NUMBERS = 64


class MessageKind(IntEnum):
    """Kinds of messages."""

    ASK = 1  # will you exchange with me?
    YES = 2
    NO = 3
    SWAP = 4  # my values; and, as the answer, yours
    COMMIT = 5  # I have yours: let it count
    DONE = 6  # it counts
    PUSH = 7  # part of my values, which is yours now
    COUNTED = 8  # has my exchange of this number counted with you?


class PeerMessage(NamedTuple):
    """A message.

    Attributes:
        kind: of the message.
        sender: the peer that sends it.
        numbers: a few numbers; what they mean depends on the kind.
        vectors: vectors on the CPU.
    """

    kind: MessageKind
    sender: int
    numbers: tuple[float, ...] = ()
    vectors: tuple[Tensor, ...] = ()


class RefusedError(Exception):
    """Refusal of a message that must not be believed. Says why in one word."""


class PeerChannel:
    """Sends and receives messages over one connection. Each arrives complete and in time, or not at all.

    Args:
        connection: to the other end.
        token: a secret that both ends must have.
        epoch: version of the list of members; both ends must have the same.
        me: this peer.

    Attributes:
        caller: the peer at the other end, once it is known.
    """

    def __init__(self, connection: socket.socket, token: bytes, epoch: int, me: int) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        abort_too(connection)
        self._connection, self._token, self._epoch, self._me = connection, token, epoch, me
        self.caller: int | None = None
        self._sent = self._received = 0  # serial numbers: a message that comes twice is refused

    def send(self, kind: MessageKind, numbers: Sequence[float], vectors: Sequence[Tensor], deadline: float) -> int:
        """Send a message.

        Args:
            kind: of the message.
            numbers: at most 64.
            vectors: contiguous vectors on the CPU.
            deadline: time at which it must be sent, by ``time.monotonic()``.

        Returns:
            The bytes sent.

        Raises:
            OSError: it could not be sent in time. The connection cannot be used any more.
        """
        parts: list[Any] = [struct.pack(f"!{len(numbers)}d", *numbers), *map(_bytes, vectors)]
        self._sent += 1
        size = sum(len(part) for part in parts[1:])
        header = _HEADER.pack(_MAGIC, self._token, self._epoch, kind, self._me, self._sent, len(numbers), size)
        checksum = zlib.crc32(header)
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        for part in (header + _CHECKSUM.pack(checksum), *parts):
            self._limit(deadline)
            self._connection.sendall(part)
        return len(header) + _CHECKSUM.size + len(parts[0]) + size

    def receive(self, into: Callable[[MessageKind], Sequence[Tensor]], deadline: float | None) -> PeerMessage:
        """Receive a message.

        Args:
            into: gives the vectors to fill, for a kind of message that comes with vectors.
            deadline: time by which it must have come, by ``time.monotonic()``; ``None``: no limit.

        Raises:
            OSError: it did not come in time, or the connection has broken.
            RefusedError: it is from another job or another list of members, is damaged, or has come before.
        """
        head = memoryview(bytearray(_HEADER.size + _CHECKSUM.size))
        self._fill(head, deadline)
        header = head[: _HEADER.size]
        magic, token, epoch, kind, sender, serial, count, size = _HEADER.unpack(header)
        [checksum] = _CHECKSUM.unpack(head[_HEADER.size :])
        if magic != _MAGIC or not hmac.compare_digest(token, self._token):
            raise RefusedError("token")
        self.caller = sender
        if epoch != self._epoch:
            raise RefusedError("epoch")
        if serial != self._received + 1:
            raise RefusedError("replayed")
        if kind not in set(MessageKind):
            raise RefusedError("damaged")
        vectors = tuple(into(MessageKind(kind))) if size else ()
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
        self._received = serial
        return PeerMessage(MessageKind(kind), sender, struct.unpack(f"!{count}d", numbers), vectors)

    def swap(
        self,
        kind: MessageKind,
        numbers: Sequence[float],
        vectors: Sequence[Tensor],
        into: Callable[[MessageKind], Sequence[Tensor]],
        deadline: float,
    ) -> tuple[PeerMessage, int]:
        """Send a message and receive one at the same time, so that both directions of a link are used.

        Args:
            kind: of the message to send.
            numbers: at most 64.
            vectors: contiguous vectors on the CPU.
            into: gives the vectors to fill, for the kind of message that comes.
            deadline: time by which both must be done, by ``time.monotonic()``.

        Returns:
            What has come, and the bytes sent.

        Raises:
            OSError: one of them was too late, or the connection has broken. It is closed.
            RefusedError: what has come must not be believed. The connection is closed.
        """
        sender = Background(lambda: self.send(kind, numbers, vectors, deadline))
        try:
            message = self.receive(into, deadline)
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


def refuse_vectors(kind: MessageKind) -> Sequence[Tensor]:
    """Refuse vectors, where none are expected."""
    raise RefusedError("uninvited")


def _bytes(vector: Tensor) -> memoryview:
    return memoryview(vector.view(torch.uint8).numpy())  # type: ignore[arg-type]


_CONFIRM_SECONDS = (0.01, 0.05, 0.2, 0.5, 1.0)  # seconds between knocks: a dying process may still accept a connection
_LONGEST_PING_PAUSE = 4  # deadlines for which a peer that is late again and again is not asked


class PeerLiveness:
    """Liveness of peers: which of them can be reached.

    A peer has *ended* once its port refuses a connection. This is known at once, and for good. A peer is *silent* from
    the moment when it did not answer in time until it sends something itself, or answers a knock: a background thread
    knocks again and again. So a frozen peer costs one deadline, however long it stays frozen. A peer that is late twice
    without a successful exchange in between does answer knocks, but is too slow. It is not asked for four deadlines.

    Args:
        ping: connects to a peer and waits for its greeting. Raises an ``OSError`` if none comes within the deadline.
        deadline: seconds within which a peer must answer.
        changed: called when the answer for a peer has changed.
    """

    def __init__(self, ping: Callable[[int], None], deadline: float, changed: Callable[[], None]) -> None:
        self._ping, self._deadline, self._changed = ping, deadline, changed
        self._lock = threading.Lock()
        self._ended: set[int] = set()
        self._silent: dict[int, threading.Event] = {}  # set to stop the thread that knocks
        self._slow: set[int] = set()  # late since the latest successful exchange with them

    def __contains__(self, peer: object) -> bool:
        with self._lock:
            return peer not in self._ended and peer not in self._silent

    def has_ended(self, peer: int) -> bool:
        """Whether a peer's port has refused a connection."""
        with self._lock:
            return peer in self._ended

    def ended(self, peer: int) -> None:
        """A peer's port has refused a connection."""
        with self._lock:
            self._ended.add(peer)
        self._stop_pinging(peer)
        self._changed()

    def late(self, peer: int) -> None:
        """A peer did not answer in time."""
        with self._lock:
            if peer in self._ended or peer in self._silent:
                return
            pause = _LONGEST_PING_PAUSE * self._deadline if peer in self._slow else 0.0
            self._slow.add(peer)
            over = self._silent[peer] = threading.Event()
        threading.Thread(
            target=self._ping_until, args=(peer, over, pause), name="hetero-gossip-knocker", daemon=True
        ).start()
        self._changed()

    def heard(self, peer: int) -> None:
        """A peer has sent something."""
        if self._stop_pinging(peer):
            self._changed()

    def met(self, peer: int) -> None:
        """An exchange with a peer has succeeded."""
        with self._lock:
            self._slow.discard(peer)

    def doubt(self, peer: int) -> None:
        """A peer has closed its connection: find out whether it has ended. Blocks."""
        for pause in _CONFIRM_SECONDS:
            with suppress(OSError):
                return self._ping(peer)
            if self.has_ended(peer):
                return
            time.sleep(pause)

    def close(self) -> None:
        """Knock no more; idempotent."""
        with self._lock:
            for over in self._silent.values():
                over.set()

    def _stop_pinging(self, peer: int) -> bool:
        with self._lock:
            over = self._silent.pop(peer, None)
        if over is not None:
            over.set()
        return over is not None

    def _ping_until(self, peer: int, over: threading.Event, pause: float) -> None:
        while not over.wait(pause):
            pause = self._deadline
            try:
                self._ping(peer)
            except OSError:
                continue
            return self.heard(peer)


class ExchangeLedger:
    """Ledger of the latest exchange with each peer that has counted here.

    Peers number the exchanges that they ask for. If the last message of one is lost, the peer asks whether it has
    counted. If the answer is no, the exchange never counts afterwards.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted: dict[int, float] = {}
        self._void: dict[int, float] = {}

    def count(self, peer: int, number: float) -> bool:
        """Count an exchange, unless the peer was told that it has not counted. Returns whether it counts."""
        with self._lock:
            if number <= self._void.get(peer, -1.0):
                return False
            self._counted[peer] = number
            return True

    def settle(self, peer: int, number: float) -> bool:
        """Whether an exchange has counted. If not, it never will."""
        with self._lock:
            if number <= self._counted.get(peer, -1.0):
                return True
            self._void[peer] = number
            return False


EXCHANGE = 9  # deadlines that all messages of an exchange may take together
_LOOK = 10.0  # seconds between two looks at whether this peer has been closed, which also wakes it up


class Session(NamedTuple):
    """Values that all peers of a job share.

    Attributes:
        token: a secret. Messages without it are refused.
        epoch: version of the list of members. Messages with another one are refused.
        deadline: seconds within which a message must be answered.
    """

    token: bytes
    epoch: int
    deadline: float


class PeerConnections:
    """Listens for connections, and connects to other peers.

    Each connection has its own key, made of the token and of random bytes from the listener. So messages that were
    recorded from another connection are refused.

    Args:
        me: this peer.
        session: what all peers share.
        interface: address to listen on, of the network between the peers.
        attend: handles an exchange from its first message on; called in a thread of its own.
        into: gives the vectors to fill, for a first message that comes with vectors.
        changed: called when a peer can be reached now, or no longer.

    Attributes:
        address: where others reach this peer.
        liveness: which peers can be reached.
        refused: number of messages that were refused, by reason.
        ledger: exchanges that have counted here.
    """

    def __init__(
        self,
        me: int,
        session: Session,
        interface: str,
        attend: Callable[[PeerChannel, PeerMessage], None],
        into: Callable[[MessageKind], Sequence[Tensor]] = refuse_vectors,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.me, self.session, self.refused = me, session, Counter[str]()
        self.ledger = ExchangeLedger()
        self._attend, self._into = attend, into
        self.liveness = PeerLiveness(lambda peer: self._connect(peer).close(), session.deadline, changed)
        self._addresses: dict[int, HostPort] = {}
        # Of the secret, not the secret itself: the first line of a connection can be read on the way.
        self._greeting = hmac.digest(session.token, b"connect", hashlib.sha256).hex()
        self._listener = Listener(interface, self._greeting, made=abort_too)
        self.address = self._listener.address
        self._lock = threading.Lock()
        self._out: dict[int, PeerChannel] = {}
        self._in: dict[PeerChannel, None] = {}  # in the order in which they came
        self._making: dict[socket.socket, int] = {}  # connections that wait for the other end's first bytes
        self._closed = False
        close_at_exit(self)
        threading.Thread(target=self._listen, name="hetero-gossip-listener", daemon=True).start()

    def know(self, addresses: Mapping[int, HostPort]) -> None:
        """Learn the addresses of all peers."""
        self._addresses = dict(addresses)
        self._listener.peers = len(addresses)

    @property
    def count(self) -> int:
        """Number of peers."""
        return len(self._addresses)

    def channel(self, peer: int) -> PeerChannel:
        """A connection to a peer: the one of an earlier call, if it is still open, or a new one.

        Raises:
            ConnectionRefusedError: the peer has ended.
            OSError: the peer cannot be reached in time.
        """
        if self.liveness.has_ended(peer):
            raise ConnectionRefusedError("the peer has ended")
        if (channel := self._out.get(peer)) is None:
            channel = self._connect(peer)
            with self._lock:
                self._out[peer] = channel
        return channel

    def _connect(self, peer: int) -> PeerChannel:
        deadline = self.deadline_in()
        try:
            connection = connect(self._addresses[peer], self._greeting, self.me, self.session.deadline)
        except ConnectionRefusedError:  # the process has ended
            self.liveness.ended(peer)
            raise
        abort_too(connection)
        with self._lock:
            self._making[connection] = peer
        try:
            drawn = b""
            while len(drawn) < TOKEN_BYTES:
                connection.settimeout(max(deadline - time.monotonic(), 1e-3))
                part = connection.recv(TOKEN_BYTES - len(drawn))
                if not part:
                    raise ConnectionError("the other end has closed the connection")
                drawn += part
        except OSError:
            connection.close()
            raise
        finally:
            with self._lock:
                del self._making[connection]
        return self._channel(connection, drawn)

    def failed(self, peer: int, began: float, error: OSError | RefusedError) -> None:
        """Take note of an exchange that failed.

        Args:
            peer: with whom.
            began: its start, by ``time.monotonic()``.
            error: why it failed.
        """
        self.drop(peer)
        if isinstance(error, RefusedError):
            self._count_refused(error)
        if time.monotonic() - began > self.session.deadline / 2:  # it was late, whatever broke in the end
            self.liveness.late(peer)

    def _count_refused(self, error: RefusedError) -> None:
        with self._lock:
            self.refused[str(error)] += 1

    def deadline_in(self, times: float = 1.0) -> float:
        """The time in so many deadlines from now, by ``time.monotonic()``."""
        return time.monotonic() + times * self.session.deadline

    def commit(self, channel: PeerChannel, peer: int, number: float) -> int:
        """End an exchange that this peer began, once it has received everything.

        Returns:
            The bytes sent.

        Raises:
            TimeoutError: the exchange does not count for the other peer.
        """
        sent, done = 0, False
        with suppress(OSError, RefusedError):
            sent = channel.send(MessageKind.COMMIT, (), (), self.deadline_in())
            done = channel.receive(refuse_vectors, self.deadline_in(2)).kind is MessageKind.DONE
        if not done and not self.counted(peer, number):
            raise TimeoutError("too late")
        return sent

    def await_commit(self, channel: PeerChannel, peer: int, number: float) -> None:
        """Wait until the peer that began an exchange has received everything, then count it.

        Raises:
            OSError: its message came too late, or not at all.
            RefusedError: another message came.
        """
        until = self.deadline_in()
        if channel.receive(refuse_vectors, until).kind is not MessageKind.COMMIT:
            raise RefusedError("uninvited")
        if time.monotonic() > until or not self.ledger.count(peer, number):
            raise TimeoutError("too late")  # perhaps this process was frozen

    def counted(self, peer: int, number: float) -> bool:
        """Whether an exchange of this peer has counted for another one. Asks until it answers or seems dead."""
        until = self.deadline_in(3)
        while time.monotonic() < until and not self._closed:
            self.drop(peer)
            try:
                channel = self.channel(peer)
                channel.send(MessageKind.COUNTED, (number,), (), self.deadline_in())
                return channel.receive(refuse_vectors, self.deadline_in()).kind is MessageKind.YES
            except ConnectionRefusedError:
                return False  # it has ended
            except (OSError, RefusedError):
                time.sleep(0.02)
        return False

    def lose(self, peer: int) -> None:
        """A peer does not take part any more: whoever waits for it, in any thread, gets an error at once."""
        self.liveness.ended(peer)
        self.drop(peer)
        with self._lock:
            making = [connection for connection, other in self._making.items() if other == peer]
            asking = [channel for channel in self._in if channel.caller == peer]
        for connection in making:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for channel in asking:
            channel.close()

    def drop(self, peer: int) -> None:
        """Close the connection to a peer. The next call of :meth:`channel` makes a new one."""
        if channel := self._out.pop(peer, None):
            channel.close()

    def _channel(self, connection: socket.socket, drawn: bytes) -> PeerChannel:
        key = hmac.digest(self.session.token, drawn, hashlib.sha256)[:TOKEN_BYTES]
        return PeerChannel(connection, key, self.session.epoch, self.me)

    def _listen(self) -> None:
        while not self._closed:
            for connection, peer in self._listener.accept(_LOOK):
                drawn = secrets.token_bytes(TOKEN_BYTES)
                channel = self._channel(connection, drawn)
                channel.caller = peer
                with self._lock:
                    self._in[channel] = None
                if self._closed:
                    channel.close()
                threading.Thread(
                    target=self._welcome, args=(connection, channel, drawn), name="hetero-gossip", daemon=True
                ).start()
        self._listener.end()

    def _welcome(self, connection: socket.socket, channel: PeerChannel, drawn: bytes) -> None:
        try:
            connection.settimeout(self.session.deadline)
            connection.sendall(drawn)
            self._converse(channel)
        except OSError:
            pass  # the other end has closed it, or was too late
        except RefusedError as error:
            self._count_refused(error)
        finally:
            with self._lock:
                self._in.pop(channel, None)
            channel.close()
        if channel.caller in self._addresses and not self._closed:
            self.liveness.doubt(channel.caller)

    def _converse(self, channel: PeerChannel) -> None:
        """Handle what a peer begins, until it closes the connection."""
        first: float | None = self.deadline_in()
        while not self._closed:
            message = channel.receive(self._into, first)
            first = None  # a known peer may be silent between two exchanges
            if message.kind is MessageKind.COUNTED and len(message.numbers) == 1:
                counted = self.ledger.settle(message.sender, message.numbers[0])
                channel.send(MessageKind.YES if counted else MessageKind.NO, (), (), self.deadline_in())
            else:
                self._attend(channel, message)

    def close(self) -> None:
        """Close all connections; idempotent."""
        with self._lock:
            self._closed = True
            channels, self._out = [*self._in, *self._out.values()], {}
        self.liveness.close()
        self._listener.close()
        for channel in channels:
            channel.close()


def others_boxes(own: MappedVectors, paths: Mapping[int, str]) -> dict[int, MappedVectors]:
    """The outboxes of other peers of this host.

    Raises:
        DisagreementError: one cannot be opened, or holds another model.
    """
    boxes = {}
    for peer, path in paths.items():
        try:
            boxes[peer] = MappedVectors(own.vectors, path)
        except (OSError, ValueError) as error:
            raise DisagreementError(
                f"replica {peer}'s values cannot be read in shared memory: {error}. It has another model, or lives "
                "elsewhere under the same host name: give hosts, or containers, names of their own."
            ) from error
    return boxes
