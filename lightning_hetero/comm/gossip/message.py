"""Messages between peers: a header with a checksum, a few numbers, and vectors."""

import hmac
import socket
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_hetero.comm.background import Background
from lightning_hetero.comm.leaving import cut_too

TOKEN_BYTES = 16
#: magic, token, epoch, kind, sender, serial number, how many numbers, bytes of vectors; then a checksum of all
_HEADER = struct.Struct(f"!4s{TOKEN_BYTES}sIIIQIQ")
_CHECKSUM = struct.Struct("!I")
_MAGIC = b"lhg1"
_MOST_NUMBERS = 64


class Kind(IntEnum):
    """Kinds of messages."""

    ASK = 1  # will you exchange with me?
    YES = 2
    NO = 3
    SWAP = 4  # my values; and, as the answer, yours
    COMMIT = 5  # I have yours: let it count
    DONE = 6  # it counts
    PUSH = 7  # part of my values, which is yours now
    COUNTED = 8  # has my exchange of this number counted with you?


class Message(NamedTuple):
    """A message.

    Attributes:
        kind: of the message.
        sender: the peer that sends it.
        numbers: a few numbers; what they mean depends on the kind.
        vectors: vectors on the CPU.
    """

    kind: Kind
    sender: int
    numbers: tuple[float, ...] = ()
    vectors: tuple[Tensor, ...] = ()


class RefusedError(Exception):
    """A message must not be believed. Says why in one word."""


class Channel:
    """Sends and receives messages over one connection. Each arrives complete and in time, or not at all.

    Args:
        connection: to the other end.
        token: a secret that both ends must have.
        epoch: version of the list of members; both ends must have the same.
        me: this peer.

    Attributes:
        caller: the peer at the other end, once a message with the token has come.
    """

    def __init__(self, connection: socket.socket, token: bytes, epoch: int, me: int) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        cut_too(connection)
        self._connection, self._token, self._epoch, self._me = connection, token, epoch, me
        self.caller: int | None = None
        self._sent = self._received = 0  # serial numbers: a message that comes twice is refused

    def send(self, kind: Kind, numbers: Sequence[float], vectors: Sequence[Tensor], deadline: float) -> int:
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

    def receive(self, into: Callable[[Kind], Sequence[Tensor]], deadline: float | None) -> Message:
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
        if kind not in set(Kind):
            raise RefusedError("damaged")
        vectors = tuple(into(Kind(kind))) if size else ()
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
        return Message(Kind(kind), sender, struct.unpack(f"!{count}d", numbers), vectors)

    def swap(
        self,
        kind: Kind,
        numbers: Sequence[float],
        vectors: Sequence[Tensor],
        into: Callable[[Kind], Sequence[Tensor]],
        deadline: float,
    ) -> tuple[Message, int]:
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


def nowhere(kind: Kind) -> Sequence[Tensor]:
    """Refuse vectors, where none are expected."""
    raise RefusedError("uninvited")


def _bytes(vector: Tensor) -> memoryview:
    return memoryview(vector.view(torch.uint8).numpy())  # type: ignore[arg-type]
