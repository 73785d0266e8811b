"""Connections between gossip peers: each listens on one port, and connects to the others when it needs to."""

import hashlib
import hmac
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from lightning_hetero.comm.shared_memory import MappedVectors
from lightning_hetero.comm.threads import abort_too, close_at_exit
from lightning_hetero.comm.transport import (
    HostPort,
    Listener,
    RefusedError,
    VectorChannel,
    VectorMessage,
    connect,
)
from lightning_hetero.errors import DisagreementError


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
        self._closed = False

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
            if self._closed or peer in self._ended or peer in self._silent:
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
            self._closed = True
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
        deadline: seconds within which a message must be answered.
    """

    token: bytes
    deadline: float


class PeerTransport(ABC):
    """Base of the transports: a peer's connections to others, for which it listens, and what it offers or sends.

    Args:
        me: this peer.
        session: what all peers share.
        interface: address to listen on, of the network between the peers.
        like: vectors of the sizes and dtypes to come, on the CPU.

    Attributes:
        address: where others reach this peer.
        liveness: which peers can be reached.
        refused: number of messages that were refused, by reason.
        ledger: exchanges that have counted here.
        numbers: of the exchanges that this peer asks for.
        outbox: memory that the other peers of this host see.
        outgoing: the vectors in it, where this peer writes what it offers or sends.
        boxes: the same memory of the other peers of this host.
    """

    def __init__(self, me: int, session: Session, interface: str, like: Sequence[Tensor]) -> None:
        self.me, self.session, self.refused = me, session, Counter[str]()
        self.outbox, self.boxes = MappedVectors(like), dict[int, MappedVectors]()
        self.outgoing = self.outbox.vectors
        self._changed = threading.Condition()  # guards what belongs to subclasses
        self.ledger, self.numbers = ExchangeLedger(), itertools.count(float(time.time_ns() // 1000))
        self.liveness = PeerLiveness(lambda peer: self._connect(peer).close(), session.deadline, self._wake)
        self._addresses: dict[int, HostPort] = {}
        # Of the secret, not the secret itself: the first line of a connection can be read on the way.
        self._greeting = hmac.digest(session.token, b"connect", hashlib.sha256).hex()
        self._listener = Listener(interface, self._greeting, made=abort_too)
        self.address = self._listener.address
        self._lock = threading.Lock()
        self._out: dict[int, VectorChannel] = {}
        self._others: dict[VectorChannel, None] = {}  # those that come from peers, and those that are being made
        self._closed = False
        close_at_exit(self)
        threading.Thread(target=self._listen, name="hetero-gossip-listener", daemon=True).start()

    @abstractmethod
    def _attend(self, channel: VectorChannel, message: VectorMessage) -> None:
        """Handle an exchange from its first message on; in a thread of the connection."""

    def _place(self, kind: int) -> Sequence[Tensor]:
        """The vectors to fill, for a first message that comes with vectors."""
        raise RefusedError("uninvited")

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def set_outboxes(self, paths: Mapping[int, str]) -> None:
        """Learn where the peers of this host write their values.

        Raises:
            DisagreementError: one cannot be opened, or holds another model.
        """
        for peer, path in paths.items():
            try:
                self.boxes[peer] = MappedVectors(self.outgoing, path)
            except (OSError, ValueError) as error:
                raise DisagreementError(
                    f"replica {peer}'s values cannot be read in shared memory: {error}. It has another model, or lives "
                    "elsewhere under the same host name: give hosts, or containers, names of their own."
                ) from error

    def know(self, addresses: Mapping[int, HostPort]) -> None:
        """Learn the addresses of all peers."""
        self._addresses = dict(addresses)
        self._listener.peers = len(addresses)

    @property
    def count(self) -> int:
        """Number of peers."""
        return len(self._addresses)

    def channel(self, peer: int) -> VectorChannel:
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
            if self._closed or self.liveness.has_ended(peer):  # meanwhile: nobody else would close it
                self.drop(peer)
                raise ConnectionRefusedError("the peer has ended")
        return channel

    def _connect(self, peer: int) -> VectorChannel:
        deadline = self.deadline_in()
        try:
            connection = connect(self._addresses[peer], self._greeting, self.me, self.session.deadline)
        except ConnectionRefusedError:  # the process has ended
            self.liveness.ended(peer)
            raise
        channel = VectorChannel(connection, self.session.token, peer, self.session.deadline)
        try:
            with self._known(channel):
                channel.begin(False, deadline)
        except OSError:
            channel.close()
            raise
        return channel

    @contextmanager
    def _known(self, channel: VectorChannel) -> Iterator[None]:
        """Let :meth:`lose` and :meth:`close` close a channel in this block."""
        with self._lock:
            self._others[channel] = None
            closed = self._closed
        if closed:
            channel.close()
        try:
            yield
        finally:
            with self._lock:
                del self._others[channel]

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

    def commit(self, channel: VectorChannel, number: float) -> int:
        """End an exchange that this peer began, once it has received everything.

        Returns:
            The bytes sent.

        Raises:
            TimeoutError: the exchange does not count for the other peer.
        """
        sent, done = 0, False
        with suppress(OSError, RefusedError):
            sent = channel.send(MessageKind.COMMIT)
            done = channel.receive(times=2).kind == MessageKind.DONE
        if not done and not self.counted(channel.peer, number):
            raise TimeoutError("too late")
        return sent

    def await_commit(self, channel: VectorChannel, number: float) -> None:
        """Wait until the peer that began an exchange has received everything, then count it.

        Raises:
            OSError: its message came too late, or not at all.
            RefusedError: another message came.
        """
        until = self.deadline_in()
        if channel.receive().kind != MessageKind.COMMIT:
            raise RefusedError("uninvited")
        if time.monotonic() > until or not self.ledger.count(channel.peer, number):
            raise TimeoutError("too late")  # perhaps this process was frozen

    def counted(self, peer: int, number: float) -> bool:
        """Whether an exchange of this peer has counted for another one. Asks until it answers or seems dead."""
        until = self.deadline_in(3)
        while time.monotonic() < until and not self._closed:
            self.drop(peer)
            try:
                channel = self.channel(peer)
                channel.send(MessageKind.COUNTED, (number,))
                return channel.receive().kind == MessageKind.YES
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
            channels = [channel for channel in self._others if channel.peer == peer]
        for channel in channels:
            channel.close()

    def drop(self, peer: int) -> None:
        """Close the connection to a peer. The next call of :meth:`channel` makes a new one."""
        if channel := self._out.pop(peer, None):
            channel.close()

    def _listen(self) -> None:
        while not self._closed:
            for connection, peer in self._listener.accept(_LOOK):
                channel = VectorChannel(connection, self.session.token, peer, self.session.deadline)
                threading.Thread(target=self._welcome, args=(channel,), name="hetero-gossip", daemon=True).start()
        self._listener.end()

    def _welcome(self, channel: VectorChannel) -> None:
        try:
            with self._known(channel):
                channel.begin(True, self.deadline_in())
                self._converse(channel)
        except OSError:
            pass  # the other end has closed it, or was too late
        except RefusedError as error:
            self._count_refused(error)
        finally:
            channel.close()
        if channel.received and channel.peer in self._addresses and not self._closed:  # else it was only a knock
            self.liveness.doubt(channel.peer)

    def _converse(self, channel: VectorChannel) -> None:
        """Handle what a peer begins, until it closes the connection."""
        times: float | None = 1.0
        while not self._closed:
            message = channel.receive(self._place, times)
            times = None  # a known peer may be silent between two exchanges
            if message.kind == MessageKind.COUNTED and len(message.numbers) == 1:
                counted = self.ledger.settle(channel.peer, message.numbers[0])
                channel.send(MessageKind.YES if counted else MessageKind.NO)
            else:
                self._attend(channel, message)

    def close(self) -> None:
        """Close all connections; idempotent."""
        with self._lock:
            self._closed = True
            channels, self._out = [*self._others, *self._out.values()], {}
        self.liveness.close()
        self._listener.close()
        for channel in channels:
            channel.close()
