"""Connections between gossip peers. Each peer listens on one port, and connects to the others when it needs to."""

import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor

from lightning_hetero.comm.gossip.attendance import Attendance
from lightning_hetero.comm.gossip.ledger import Ledger
from lightning_hetero.comm.gossip.message import TOKEN_BYTES, Channel, Kind, Message, RefusedError, nowhere
from lightning_hetero.comm.leaving import close_at_exit, cut_too

HostPort = tuple[str, int]
EXCHANGE = 9  # deadlines that all messages of an exchange may take together
_MOST_STRANGERS = 32  # connections at a time on which no message with the token has come yet


class Session(NamedTuple):
    """What all peers of a job share.

    Attributes:
        token: a secret. Messages without it are refused.
        epoch: version of the list of members. Messages with another one are refused.
        deadline: seconds within which a message must be answered.
    """

    token: bytes
    epoch: int
    deadline: float


class Peers:
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
        attendance: which peers can be reached.
        refused: number of messages that were refused, by reason.
        ledger: exchanges that have counted here.
    """

    def __init__(
        self,
        me: int,
        session: Session,
        interface: str,
        attend: Callable[[Channel, Message], None],
        into: Callable[[Kind], Sequence[Tensor]] = nowhere,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.me, self.session, self.refused = me, session, Counter[str]()
        self.ledger = Ledger()
        self._attend, self._into = attend, into
        self.attendance = Attendance(lambda peer: self._connect(peer).close(), session.deadline, changed)
        self._addresses: dict[int, HostPort] = {}
        self._listener = socket.create_server((interface, 0), backlog=128)
        self.address: HostPort = self._listener.getsockname()[:2]
        self._lock = threading.Lock()
        self._out: dict[int, Channel] = {}
        self._in: dict[Channel, None] = {}  # in the order in which they came
        self._making: dict[socket.socket, int] = {}  # connections that wait for the other end's first bytes
        self._closed = False
        close_at_exit(self)
        threading.Thread(target=self._listen, name="hetero-gossip-listener", daemon=True).start()

    def know(self, addresses: Mapping[int, HostPort]) -> None:
        """Learn the addresses of all peers."""
        self._addresses = dict(addresses)

    @property
    def count(self) -> int:
        """Number of peers."""
        return len(self._addresses)

    def channel(self, peer: int) -> Channel:
        """A connection to a peer: the one of an earlier call, if it is still open, or a new one.

        Raises:
            ConnectionRefusedError: the peer has ended.
            OSError: the peer cannot be reached in time.
        """
        if self.attendance.has_ended(peer):
            raise ConnectionRefusedError("the peer has ended")
        if peer not in self._out:
            self._out[peer] = self._connect(peer)
        return self._out[peer]

    def _connect(self, peer: int) -> Channel:
        deadline = self.soon()
        try:
            connection = socket.create_connection(self._addresses[peer], self.session.deadline)
        except ConnectionRefusedError:  # the process has ended
            self.attendance.ended(peer)
            raise
        cut_too(connection)
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
            self.refused[str(error)] += 1
        if time.monotonic() - began > self.session.deadline / 2:  # it was late, whatever broke in the end
            self.attendance.late(peer)

    def soon(self, times: float = 1.0) -> float:
        """The time in so many deadlines from now, by ``time.monotonic()``."""
        return time.monotonic() + times * self.session.deadline

    def commit(self, channel: Channel, peer: int, number: float) -> int:
        """End an exchange that this peer began, once it has received everything.

        Returns:
            The bytes sent.

        Raises:
            TimeoutError: the exchange does not count for the other peer.
        """
        sent, done = 0, False
        with suppress(OSError, RefusedError):
            sent = channel.send(Kind.COMMIT, (), (), self.soon())
            done = channel.receive(nowhere, self.soon(2)).kind is Kind.DONE
        if not done and not self.counted(peer, number):
            raise TimeoutError("too late")
        return sent

    def await_commit(self, channel: Channel, peer: int, number: float) -> None:
        """Wait until the peer that began an exchange has received everything, then count it.

        Raises:
            OSError: its message came too late, or not at all.
            RefusedError: another message came.
        """
        until = self.soon()
        if channel.receive(nowhere, until).kind is not Kind.COMMIT:
            raise RefusedError("uninvited")
        if time.monotonic() > until or not self.ledger.count(peer, number):
            raise TimeoutError("too late")  # perhaps this process was frozen

    def counted(self, peer: int, number: float) -> bool:
        """Whether an exchange of this peer has counted for another one. Asks until it answers or seems dead."""
        until = self.soon(3)
        while time.monotonic() < until and not self._closed:
            self.drop(peer)
            try:
                channel = self.channel(peer)
                channel.send(Kind.COUNTED, (number,), (), self.soon())
                return channel.receive(nowhere, self.soon()).kind is Kind.YES
            except ConnectionRefusedError:
                return False  # it has ended
            except (OSError, RefusedError):
                time.sleep(0.02)
        return False

    def lose(self, peer: int) -> None:
        """A peer does not take part any more: whoever waits for it, in any thread, gets an error at once."""
        self.attendance.ended(peer)
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

    def _channel(self, connection: socket.socket, drawn: bytes) -> Channel:
        key = hmac.digest(self.session.token, drawn, hashlib.sha256)[:TOKEN_BYTES]
        return Channel(connection, key, self.session.epoch, self.me)

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # too many open files, say
                continue
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            cut_too(connection)
            drawn = secrets.token_bytes(TOKEN_BYTES)
            channel = self._channel(connection, drawn)
            with self._lock:
                self._in[channel] = None
                strangers = [other for other in self._in if other.caller is None]
            # A peer says at once who it is. If there are too many that have not, the oldest are closed.
            for other in [channel] if self._closed else strangers[:-_MOST_STRANGERS]:
                other.close()
            threading.Thread(
                target=self._welcome, args=(connection, channel, drawn), name="hetero-gossip", daemon=True
            ).start()

    def _welcome(self, connection: socket.socket, channel: Channel, drawn: bytes) -> None:
        try:
            connection.settimeout(self.session.deadline)
            connection.sendall(drawn)
            self._converse(channel)
        except OSError:
            pass  # the other end has closed it, or was too late
        except RefusedError as error:
            self.refused[str(error)] += 1
        finally:
            with self._lock:
                self._in.pop(channel, None)
            channel.close()
        if channel.caller in self._addresses and not self._closed:
            self.attendance.doubt(channel.caller)

    def _converse(self, channel: Channel) -> None:
        """Handle what a peer begins, until it closes the connection."""
        first: float | None = self.soon()
        while not self._closed:
            message = channel.receive(self._into, first)
            first = None  # a known peer may be silent between two exchanges
            if message.kind is Kind.COUNTED and len(message.numbers) == 1:
                counted = self.ledger.settle(message.sender, message.numbers[0])
                channel.send(Kind.YES if counted else Kind.NO, (), (), self.soon())
            else:
                self._attend(channel, message)

    def close(self) -> None:
        """Close all connections; idempotent."""
        with self._lock:
            self._closed = True
            channels = [*self._in, *self._out.values()]
        self._out = {}
        self.attendance.close()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for channel in channels:
            channel.close()
