"""False peers: flipped bytes, old messages, strangers, other models."""

import os
import socket
import time
from pathlib import Path

import pytest
import torch
from gossip_team import TOKEN, Member, Proxy, call, hang_up, meet, read, team
from test_gossip_cuts import LIMIT, Once, exchange_with_fault, flip

from lightning_hetero.comm.gossip import ANY
from lightning_hetero.comm.gossip_peers import MessageKind
from lightning_hetero.comm.transport import VectorChannel
from lightning_hetero.errors import DisagreementError

# -- lies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "at", "reason"),
    [
        ("SWAP", -1, "damaged"), ("BACK", 44, "damaged"), ("ASK", 0, "token"), ("YES", 27, "replayed"),
    ],
)  # fmt: skip
def test_a_flipped_byte_is_refused_and_counted(name: str, at: int, reason: str) -> None:
    counted, off, refused = exchange_with_fault(Once(name, flip(at)))
    assert counted == (False, False)
    assert not off.any()
    assert refused == {reason: 1}


@pytest.mark.parametrize("name", ["ASK", "SWAP", "BACK"])
def test_a_message_twice_in_a_connection(name: str) -> None:
    # A second BACK comes in place of DONE: the peer that asked connects again, and learns that the exchange counts.
    _, off, refused = exchange_with_fault(Once(name, lambda message: message + message))
    assert not off.any()
    assert sum(refused.values()) == (name != "BACK")


def test_an_earlier_connection_again() -> None:
    recorded, drawn = [], []

    def judge(name: str, message: bytes) -> bytes:
        if name in ("ASK", "SWAP", "COMMIT"):
            recorded.append(message)
        return message

    with team([1, 1], limit=LIMIT) as (one, other):
        proxy = Proxy(other.pairing.address, judge, lambda found: drawn.append(found) or found)
        one.pairing.know({1: proxy.address})
        one.x[:] = 8.0
        one.offer([1])
        other.offer([])
        assert one.take(5)
        assert other.take(5)
        proxy.close()
        one.pairing.know({1: other.pairing.address})
        other.offer([])
        with call(other.pairing, 0) as thief:
            assert read(thief, 16) not in drawn
            thief.sendall(b"".join(recorded[-3:]))
            assert thief.recv(99) == b""  # hung up
        assert other.pairing.refused == {"token": 1}
        assert not other.take(0.2)
        assert torch.equal(other.x, one.x)
        assert any(meet(one, other, 2 + i, 1.0) == (True, True) for i in range(5))


def test_port_scanners_and_strangers() -> None:
    with team([1, 1], limit=LIMIT) as (one, other):
        stranger, address = Member(1, 1.0, LIMIT, token=bytes(16)), one.pairing.address
        stranger.pairing.outbox.hide()
        one.offer([])
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4000), b"\x16\x03\x01" + bytes(200)):
            with socket.create_connection(address) as scanner:
                scanner.sendall(words)
        stranger.pairing.know({0: address})
        stranger.offer([0])
        deadline = time.monotonic() + 20
        while not stranger.pairing.misses and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not stranger.take(0)
        assert one.is_open
        assert not one.pairing.refused  # nothing that they sent was taken for a message
        other.offer([0])
        assert one.take(5)
        assert other.take(5)
        stranger.pairing.close()


def test_a_scanner_that_says_nothing_is_sent_away() -> None:
    with team([1], limit=LIMIT) as [one]:
        scanner = socket.create_connection(one.pairing.address)
        scanner.settimeout(20)  # seconds; else this test hangs
        try:
            assert scanner.recv(1) == b""
        finally:
            hang_up(scanner)


@pytest.mark.parametrize("size", [2, 30])
def test_another_model(size: int) -> None:
    one, other = Member(0, 1.0, LIMIT), Member(1, 1.0, LIMIT, size=size)
    try:
        for member, peer in ((one, other), (other, one)):
            member.pairing.know({peer.pairing.me: peer.pairing.address})
            if size == 30:  # sizes are rounded up to cache lines
                with pytest.raises(DisagreementError, match="another model"):
                    member.pairing.set_outboxes({peer.pairing.me: peer.path})
        one.x[:], other.x[:] = 1.0, 2.0
        assert meet(one, other, wait=3 * LIMIT) == (False, False)
        assert "size" in one.pairing.refused + other.pairing.refused
    finally:
        for member in (one, other):
            member.pairing.outbox.hide()
            member.pairing.close()


def test_memory_that_is_not_there(tmp_path: Path) -> None:
    # Nor is it made: as with two hosts of one name, or two containers with a /dev/shm each.
    with team([1], limit=LIMIT) as [one], pytest.raises(DisagreementError, match="missing"):
        one.pairing.set_outboxes({1: str(tmp_path / "missing")})
    assert not (tmp_path / "missing").exists()


def test_what_is_not_invited() -> None:
    with team([1], limit=LIMIT) as [one]:
        one.offer([])
        for kind in set(MessageKind) - {MessageKind.ASK}:
            connection = call(one.pairing)
            channel = VectorChannel(connection, TOKEN, 0, 5.0)
            channel.begin(False, time.monotonic() + 5)
            channel.send(kind, (ANY, 1.0))
            with pytest.raises(OSError, match=r"closed|reset"):
                channel.receive(lambda _: ())
            channel.close()
        assert one.pairing.refused == {"uninvited": len(MessageKind) - 1}
        assert not one.take(0)
