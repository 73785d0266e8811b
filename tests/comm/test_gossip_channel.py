"""Messages between peers arrive whole, once, in time and from this job, or not at all."""

import itertools
import random
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetero.comm.gossip_peers import MessageKind
from lightning_hetero.comm.transport import RefusedError, VectorChannel, VectorMessage

TOKEN, HEADER = bytes(range(16)), struct.Struct("!16sIQIQI")
FIELDS = {"token": 16, "kind": 4, "serial": 8, "numbers": 4, "size": 8, "crc": 4}
AT = dict(zip(FIELDS, itertools.accumulate(FIELDS.values(), initial=0), strict=False))
VECTORS = (torch.arange(5, dtype=torch.float64), torch.tensor([1.5, -2.0], dtype=torch.bfloat16))


def line() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


def places(kind: MessageKind | None = None, vectors: Sequence[Tensor] = VECTORS) -> list[Tensor]:
    return [torch.zeros_like(vector) for vector in vectors]


def recorded(*messages: tuple[MessageKind, Sequence[float], Sequence[Tensor]], token: bytes = TOKEN) -> bytes:
    """Bytes of messages on the wire."""
    one, other = line()
    with one, other:
        channel = VectorChannel(one, token, 2, 5.0)
        sent = sum(channel.send(*message) for message in messages)
        channel.close()
        found = b"".join(iter(lambda: other.recv(1 << 16), b""))
        assert len(found) == sent
        return found


def delivered(wire: bytes, count: int = 1, into: Any = places, token: bytes = TOKEN) -> list[VectorMessage]:
    """Messages that a peer receives from these bytes."""
    one, other = line()
    with one, other:
        one.sendall(wire)
        one.shutdown(socket.SHUT_WR)
        channel = VectorChannel(other, token, 0, 1.0)
        return [channel.receive(into) for _ in range(count)]


PUSH = recorded((MessageKind.PUSH, (3.0, 0.25), VECTORS))


def flipped(wire: bytes, at: int, mask: int) -> bytes:
    return wire[:at] + bytes([wire[at] ^ mask]) + wire[at + 1 :]


def test_messages_arrive_bitwise() -> None:
    assert HEADER.size == sum(FIELDS.values())
    assert len(PUSH) == HEADER.size + 16 + 44
    [message] = delivered(PUSH)
    assert (message.kind, message.numbers) == (MessageKind.PUSH, (3.0, 0.25))
    assert all(torch.equal(a, b) for a, b in zip(message.vectors, VECTORS, strict=True))
    several = recorded((MessageKind.ASK, (1.0,), ()), (MessageKind.SWAP, (), VECTORS), (MessageKind.NO, (), ()))
    assert [m.kind for m in delivered(several, 3)] == [MessageKind.ASK, MessageKind.SWAP, MessageKind.NO]


@pytest.mark.parametrize("at", [*range(HEADER.size, len(PUSH), 9), len(PUSH) - 1])
def test_a_flipped_byte_of_the_payload(at: int) -> None:
    for mask in (1, 0x80):
        with pytest.raises(RefusedError, match="damaged"):
            delivered(flipped(PUSH, at, mask))


@pytest.mark.parametrize(
    ("field", "reason"),
    [("token", "token"), ("serial", "replayed"), ("crc", "damaged")],
)
def test_a_flipped_byte_of_the_header(field: str, reason: str) -> None:
    for at in range(AT[field], AT[field] + FIELDS[field]):
        with pytest.raises(RefusedError, match=reason):
            delivered(flipped(PUSH, at, 1 << random.randrange(8)))


@pytest.mark.parametrize("field", ["numbers", "size"])
def test_a_flipped_byte_of_a_length(field: str) -> None:
    for at in range(AT[field], AT[field] + FIELDS[field]):
        with pytest.raises((RefusedError, OSError)):  # otherwise it waits for more bytes in vain
            delivered(flipped(PUSH, at, 1 << random.randrange(8)) + bytes(8 * 64))


def test_a_flipped_byte_of_the_kind() -> None:
    for at, bit in itertools.product(range(AT["kind"], AT["serial"]), range(8)):
        with pytest.raises(RefusedError):
            delivered(flipped(PUSH, at, 1 << bit))


def test_another_kind() -> None:
    for kind in (0, 9, 255, 2**32 - 1):
        wire = PUSH[: AT["kind"]] + struct.pack("!I", kind) + PUSH[AT["serial"] :]
        with pytest.raises(RefusedError, match="damaged"):
            delivered(wire)


def test_another_job() -> None:
    with pytest.raises(RefusedError, match="token"):
        delivered(recorded((MessageKind.NO, (), ()), token=bytes(16)))


def test_replays_gaps_and_swaps() -> None:
    first, second, third = (recorded(*[(MessageKind.ASK, (float(i),), ()) for i in range(n)]) for n in (1, 2, 3))
    parts = first, second[len(first) :], third[len(second) :]
    assert [m.numbers for m in delivered(b"".join(parts), 3)] == [(0.0,), (1.0,), (2.0,)]
    for order in ([0, 0], [0, 1, 1], [1], [0, 2], [1, 0]):
        with pytest.raises(RefusedError, match="replayed"):
            delivered(b"".join(parts[i] for i in order), len(order))


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(6, dtype=torch.float64), VECTORS[1]),
        (torch.zeros(4, dtype=torch.float64), VECTORS[1]),
        (torch.zeros(5, dtype=torch.float64),),
        (torch.zeros(5, dtype=torch.float64), torch.zeros(3, dtype=torch.uint8)),
        (),
    ],
)
def test_vectors_of_another_model(other: tuple[Tensor, ...]) -> None:
    with pytest.raises(RefusedError, match="size"):
        delivered(recorded((MessageKind.SWAP, (), VECTORS)), into=lambda _: places(vectors=other))
    if other:
        with pytest.raises(RefusedError, match="size"):
            delivered(recorded((MessageKind.SWAP, (), other)))


def test_lengths_that_nobody_would_send_take_no_memory() -> None:
    for count, size in ((2**32 - 1, 44), (65, 44), (2, 2**63), (2, 43), (2, 45)):
        wire = PUSH[: AT["numbers"]] + struct.pack("!IQ", count, size) + PUSH[AT["crc"] :]
        with pytest.raises(RefusedError, match="size"):
            delivered(wire)


def test_garbage() -> None:
    draw = random.Random(1)
    for wire in (b"GET / HTTP/1.1\r\nHost: x\r\nUser-Agent: a port scanner, who knocks everywhere\r\n\r\n", bytes(99)):
        with pytest.raises(RefusedError, match="token"):
            delivered(wire)
    for _ in range(50):
        with pytest.raises((RefusedError, OSError)):
            delivered(draw.randbytes(draw.randrange(100)) if draw.random() < 0.5 else draw.randbytes(44) + PUSH[44:])


def test_any_beginning_of_a_message_is_none() -> None:
    for length in range(0, len(PUSH), 7):
        one, other = line()
        with one, other:
            one.sendall(PUSH[:length])
            one.close()
            with pytest.raises(ConnectionError):
                VectorChannel(other, TOKEN, 0, 5.0).receive(places)


@pytest.mark.parametrize("drip", [False, True])
def test_the_deadline_is_of_the_whole_message(drip: bool) -> None:
    one, other = line()
    stop = threading.Event()

    def trickle() -> None:
        for i in range(len(PUSH)):
            if stop.wait(0.02):
                return
            one.sendall(PUSH[i : i + 1])

    thread = threading.Thread(target=trickle)
    if drip:
        thread.start()
    with one, other:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            VectorChannel(other, TOKEN, 0, 0.3).receive(places)
        assert 0.25 < time.monotonic() - began < 20
        stop.set()
        if drip:
            thread.join()


def test_sending_has_a_deadline_too() -> None:
    one, other = line()
    with one, other:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            VectorChannel(one, TOKEN, 0, 0.3).send(MessageKind.SWAP, (), [torch.zeros(1 << 23)])  # nobody reads 32 MiB
        assert 0.25 < time.monotonic() - began < 20


def test_closing_ends_a_receive_on_another_thread() -> None:
    one, other = line()
    with one, other:
        channel, ended = VectorChannel(other, TOKEN, 0, 5.0), []

        def wait() -> None:
            try:
                channel.receive(places, None)
            except OSError:
                ended.append(True)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        channel.close()
        channel.close()
        thread.join(30)
        assert ended == [True]
