"""A pair's connection breaks, stalls or lies at each of the six messages; and peers that are not what they seem."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gossip_pairing import Judge, Member, Proxy, hang_up, meet, read, team, total

from lightning_hetero.comm.gossip.message import Channel, Kind, nowhere
from lightning_hetero.comm.gossip.peer_selector import ANY
from lightning_hetero.comm.gossip.swapping import Swap, Swapping
from lightning_hetero.errors import DisagreementError

LIMIT = 0.5
MESSAGES = ["ASK", "YES", "SWAP", "BACK", "COMMIT", "DONE"]


class Once:
    """Does something to the first message of a name, and lets all others pass."""

    def __init__(self, name: str, act: Callable[[bytes], bytes | None]) -> None:
        self.name, self.act, self.done = name, act, False

    def __call__(self, name: str, message: bytes) -> bytes | None:
        if name != self.name or self.done:
            return message
        self.done = True
        return self.act(message)


def cut(message: bytes) -> None:
    return None


def late(times: float, limit: float = LIMIT) -> Callable[[bytes], bytes]:
    return lambda message: time.sleep(times * limit) or message


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda message: message[:at] + bytes([message[at] ^ 0x10]) + message[at + 1 :]


def duel(
    act: Judge, turn: float = 1.0, wait: float = 2.2, again: bool = True, limit: float = LIMIT
) -> tuple[tuple[bool, bool], torch.Tensor, Any]:
    """Peer 0 asks peer 1 in bad weather; then both try again. Who counted, by how much the sum is off, refusals.

    Offers are open for ``wait`` limits.
    """
    with team([1, 3], limit=limit, proxy=act) as (one, other):
        one.x[:], other.x[:] = torch.tensor([0.0, 8.0, -4.0]), torch.tensor([4.0, 0.0, 12.0])
        before = total([one, other])
        one.offer([1], turn)
        other.offer([0], turn)
        other.pairing._selector._at = time.monotonic() + 60  # asks nobody itself
        counted = one.take(wait * limit), other.take(wait * limit)
        off = total([one, other]) - before
        before = total([one, other])
        # Who was late may not be waited for in the first round; then that one waits in vain, and asks.
        assert not again or any(meet(one, other, turn + 2 + i, 3 * limit) == (True, True) for i in range(8))
        assert torch.equal(total([one, other]), before)
        return counted, off, one.pairing.peers.refused + other.pairing.peers.refused


@pytest.mark.parametrize("name", MESSAGES)
def test_the_connection_breaks(name: str) -> None:
    counted, off, _ = duel(Once(name, cut))
    assert counted == (False, False) if name != "DONE" else counted[0] == counted[1]
    assert not off.any()


def _hasty(self: Swapping, peer: int, turn: float, weight: float, agreed: Callable[[], bool]) -> Swap:
    """Counts the exchange that it has asked for already at COMMIT."""
    channel, numbers, peers = self._peers.channel(peer), (turn, weight, 1.0), self._peers
    channel.send(Kind.ASK, numbers, (), peers.soon())
    assert channel.receive(nowhere, peers.soon()).kind is Kind.YES
    assert agreed()
    channel.send(Kind.SWAP, numbers, self._outbox.vectors, peers.soon())
    answer = channel.receive(lambda _: self.inbox, peers.soon())
    channel.send(Kind.COMMIT, (), (), peers.soon())
    return Swap(peer, answer.numbers[1], self.inbox, 0)


def test_the_control_counts_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Swapping, "ask", _hasty)
    counted, off, _ = duel(Once("COMMIT", cut), again=False)
    assert counted == (True, False)
    assert off.any()


@pytest.mark.parametrize("name", ["BACK", "DONE"])
def test_the_connection_breaks_between_peers_that_take_any_partner(name: str) -> None:
    # The offer stays open, and is taken at the next try; if DONE is lost, who asked finds out that it has counted.
    counted, off, _ = duel(Once(name, cut), ANY, wait=20)
    assert counted == (True, True)
    assert not off.any()


@pytest.mark.parametrize("name", ["YES", "COMMIT"])
def test_a_message_is_late(name: str) -> None:
    counted, off, _ = duel(Once(name, late(1.5)))
    assert counted == (False, False)
    assert not off.any()


def test_the_last_message_has_twice_as_long() -> None:
    limit = 1.0  # second; nearly as much is left, for a busy machine
    counted, off, _ = duel(Once("DONE", late(1.1, limit)), limit=limit)
    assert counted == (True, True)
    assert not off.any()


def test_a_message_is_very_late() -> None:
    counted, off, _ = duel(Once("DONE", late(3.2)), wait=4)
    assert counted[0] == counted[1]
    assert not off.any()


def test_all_messages_are_slow() -> None:
    limit = 1.5

    def slow(name: str, message: bytes) -> bytes:
        time.sleep(
            0.3 * limit
        )  # two are in time, and leave some for a busy machine; all of them together would be late
        return message

    counted, off, _ = duel(slow, wait=8, again=False, limit=limit)
    assert counted == (True, True)
    assert not off.any()


def test_a_link_with_latency_is_used_well() -> None:
    asked = []

    def far(name: str, message: bytes) -> bytes:
        asked.append(name)
        time.sleep(0.02)
        return message

    with team([1, 1], limit=5.0, proxy=far) as (one, other):
        meet(one, other, 1)  # connections
        asked.clear()
        for turn in range(2, 8):
            other.offer([0], turn)
            time.sleep(0.1 if turn % 2 else 0.0)
            one.offer([1], turn)
            assert one.take(5)
            assert other.take(5)
        assert asked.count("SWAP") == 6
        assert asked.count("ASK") <= 36, asked.count("ASK")


def test_withdrawing_while_the_longest_exchange_is_on() -> None:
    share = {"YES": 0.8, "BACK": 0.8, "DONE": 1.8}

    def slow(name: str, message: bytes) -> bytes:
        time.sleep(share.pop(name, 0) * LIMIT)
        return message

    with team([1, 3], limit=LIMIT) as (one, other):
        proxy = Proxy(other.pairing.peers.address, slow, lambda drawn: time.sleep(0.8 * LIMIT) or drawn)
        one.pairing.peers.know({1: proxy.address})
        one.x[:] = 8.0
        before = total([one, other])
        one.offer([1])
        other.offer([])
        time.sleep(0.05)
        counted = one.take(0), other.take(8 * LIMIT)
        proxy.close()
        assert counted[0] == counted[1]
        assert torch.equal(total([one, other]), before)


# -- lies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "at", "reason"),
    [
        ("SWAP", -1, "damaged"), ("BACK", 60, "damaged"), ("ASK", 0, "token"), ("BACK", 22, "epoch"),
        ("YES", 39, "replayed"),
    ],
)  # fmt: skip
def test_a_flipped_byte_is_refused_and_counted(name: str, at: int, reason: str) -> None:
    counted, off, refused = duel(Once(name, flip(at)))
    assert counted == (False, False)
    assert not off.any()
    assert refused == {reason: 1}


@pytest.mark.parametrize("name", ["ASK", "SWAP", "BACK"])
def test_a_message_twice_in_a_connection(name: str) -> None:
    # BACK again stands where DONE is expected: who asked connects anew, and finds out that it has counted.
    _, off, refused = duel(Once(name, lambda message: message + message))
    assert not off.any()
    assert sum(refused.values()) == (name != "BACK")


def test_an_earlier_connection_again() -> None:
    recorded, drawn = [], []

    def judge(name: str, message: bytes) -> bytes:
        if name in ("ASK", "SWAP", "COMMIT"):
            recorded.append(message)
        return message

    with team([1, 1], limit=LIMIT) as (one, other):
        proxy = Proxy(other.pairing.peers.address, judge, lambda found: drawn.append(found) or found)
        one.pairing.peers.know({1: proxy.address})
        one.x[:] = 8.0
        one.offer([1])
        other.offer([])
        assert one.take(5)
        assert other.take(5)
        proxy.close()
        one.pairing.peers.know({1: other.pairing.peers.address})
        other.offer([])
        with socket.create_connection(other.pairing.peers.address) as thief:
            assert read(thief, 16) not in drawn
            thief.sendall(b"".join(recorded[-3:]))
            assert thief.recv(99) == b""  # hung up
        assert other.pairing.peers.refused == {"token": 1}
        assert not other.take(0.2)
        assert torch.equal(other.x, one.x)
        assert any(meet(one, other, 2 + i, 1.0) == (True, True) for i in range(5))


def test_port_scanners_and_strangers() -> None:
    with team([1, 1], limit=LIMIT) as (one, other):
        stranger, address = Member(1, 1.0, LIMIT, token=bytes(16)), one.pairing.peers.address
        stranger.pairing.outbox.hide()
        one.offer([])
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4000), b"\x16\x03\x01" + bytes(200)):
            with socket.create_connection(address) as scanner:
                scanner.sendall(words)
        stranger.pairing.peers.know({0: address})
        stranger.offer([0])
        deadline = time.monotonic() + 20
        while not (stranger.pairing.misses and one.pairing.peers.refused["token"] >= 3) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not stranger.take(0)
        assert one.pairing.is_open
        assert set(one.pairing.peers.refused) == {"token"}
        assert one.pairing.peers.refused["token"] >= 3
        other.offer([0])
        assert one.take(5)
        assert other.take(5)
        stranger.pairing.close()


def test_a_scanner_that_says_nothing_is_sent_away() -> None:
    with team([1], limit=LIMIT) as [one]:
        scanner = socket.create_connection(one.pairing.peers.address)
        read(scanner, 16)
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
            member.pairing.peers.know({peer.pairing.me: peer.pairing.peers.address})
            if size == 30:  # sizes are rounded up to cache lines
                with pytest.raises(DisagreementError, match="another model"):
                    member.pairing.know_boxes({peer.pairing.me: peer.path})
        one.x[:], other.x[:] = 1.0, 2.0
        assert meet(one, other, wait=3 * LIMIT) == (False, False)
        assert "size" in one.pairing.peers.refused + other.pairing.peers.refused
    finally:
        for member in (one, other):
            member.pairing.outbox.hide()
            member.pairing.close()


def test_memory_that_is_not_there(tmp_path: Path) -> None:
    # Nor is it made: so it is where two hosts have one name, or two containers of one host a /dev/shm each.
    with team([1], limit=LIMIT) as [one], pytest.raises(DisagreementError, match="missing"):
        one.pairing.know_boxes({1: str(tmp_path / "missing")})
    assert not (tmp_path / "missing").exists()


def test_what_is_not_invited() -> None:
    with team([1], limit=LIMIT) as [one]:
        one.offer([])
        for kind in set(Kind) - {Kind.ASK}:
            connection = socket.create_connection(one.pairing.peers.address)
            channel = one.pairing.peers._channel(connection, read(connection, 16))
            channel.send(kind, (ANY, 1.0), (), time.monotonic() + 1)
            with pytest.raises(OSError, match=r"closed|reset"):
                channel.receive(lambda _: (), time.monotonic() + 5)
            channel.close()
        assert one.pairing.peers.refused == {"uninvited": len(Kind) - 1}
        assert not one.take(0)
        assert isinstance(channel, Channel)
