"""Connections of a pair that break, stall or change a byte at each of the six messages; and false peers."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gossip_team import Judge, Proxy, meet, team, total

from lightning_hetero.comm.gossip import ANY, PairResult, PairTransport
from lightning_hetero.comm.gossip_peers import MessageKind

LIMIT = 0.5
MESSAGES = ["ASK", "YES", "SWAP", "BACK", "COMMIT", "DONE"]


class Once:
    """Acts on the first message of a name, and lets all others pass."""

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


def exchange_with_fault(
    act: Judge, turn: float = 1.0, wait: float = 2.2, again: bool = True, limit: float = LIMIT
) -> tuple[tuple[bool, bool], torch.Tensor, Any]:
    """Let peer 0 ask peer 1 with a fault; then both try again. Who counted, the change of the sum, refusals.

    Offers are open for ``wait`` limits.
    """
    with team([1, 3], limit=limit, proxy=act) as (one, other):
        one.x[:], other.x[:] = torch.tensor([0.0, 8.0, -4.0]), torch.tensor([4.0, 0.0, 12.0])
        before = total([one, other])
        one.offer([1], turn)
        other.offer([0], turn)
        other.pairing._selector._at = time.monotonic() + 60  # it does not ask by itself
        counted = one.take(wait * limit), other.take(wait * limit)
        off = total([one, other]) - before
        before = total([one, other])
        # In the first round a peer may not wait for one that was late; then the late one waits in vain, and asks.
        assert not again or any(meet(one, other, turn + 2 + i, 3 * limit) == (True, True) for i in range(8))
        assert torch.equal(total([one, other]), before)
        return counted, off, one.pairing.refused + other.pairing.refused


@pytest.mark.parametrize("name", MESSAGES)
def test_the_connection_breaks(name: str) -> None:
    counted, off, _ = exchange_with_fault(Once(name, cut))
    assert counted == (False, False) if name != "DONE" else counted[0] == counted[1]
    assert not off.any()


def _hasty(self: PairTransport, peer: int, turn: float, weight: float) -> PairResult:
    """Ask for an exchange, and count it at COMMIT, which is too early."""
    channel, numbers = self.channel(peer), (turn, weight, 1.0)
    channel.send(MessageKind.ASK, numbers)
    assert channel.receive().kind == MessageKind.YES
    assert self._peer_agrees()
    channel.send(MessageKind.SWAP, numbers, self.outgoing)
    answer = channel.receive(lambda _: self.inbox)
    channel.send(MessageKind.COMMIT)
    return PairResult(peer, answer.numbers[1], self.inbox, 0)


def test_the_control_counts_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PairTransport, "_ask", _hasty)
    counted, off, _ = exchange_with_fault(Once("COMMIT", cut), again=False)
    assert counted == (True, False)
    assert off.any()


@pytest.mark.parametrize("name", ["BACK", "DONE"])
def test_the_connection_breaks_between_peers_that_take_any_partner(name: str) -> None:
    # The offer stays open for the next try; if DONE is lost, the peer that asked learns that the exchange has counted.
    counted, off, _ = exchange_with_fault(Once(name, cut), ANY, wait=20)
    assert counted == (True, True)
    assert not off.any()


@pytest.mark.parametrize("name", ["YES", "COMMIT"])
def test_a_message_is_late(name: str) -> None:
    counted, off, _ = exchange_with_fault(Once(name, late(1.5)))
    assert counted == (False, False)
    assert not off.any()


def test_the_last_message_has_twice_as_long() -> None:
    limit = 1.0  # second; the limit is nearly two, for a busy machine
    counted, off, _ = exchange_with_fault(Once("DONE", late(1.1, limit)), limit=limit)
    assert counted == (True, True)
    assert not off.any()


def test_a_message_is_very_late() -> None:
    counted, off, _ = exchange_with_fault(Once("DONE", late(3.2)), wait=4)
    assert counted[0] == counted[1]
    assert not off.any()


def test_all_messages_are_slow() -> None:
    limit = 1.5

    def slow(name: str, message: bytes) -> bytes:
        time.sleep(
            0.3 * limit
        )  # two are in time, with a reserve for a busy machine; all of them together would be late
        return message

    counted, off, _ = exchange_with_fault(slow, wait=8, again=False, limit=limit)
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
        proxy = Proxy(other.pairing.address, slow, lambda drawn: time.sleep(0.8 * LIMIT) or drawn)
        one.pairing.know({1: proxy.address})
        one.x[:] = 8.0
        before = total([one, other])
        one.offer([1])
        other.offer([])
        time.sleep(0.05)
        counted = one.take(0), other.take(8 * LIMIT)
        proxy.close()
        assert counted[0] == counted[1]
        assert torch.equal(total([one, other]), before)
