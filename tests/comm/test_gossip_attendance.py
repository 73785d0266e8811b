"""Peers that have ended or are silent: they are known, and a pair in rounds does not wait for them repeatedly."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from gossip_team import meet, team

from lightning_hetero.comm.gossip_peers import PeerLiveness
from lightning_hetero.comm.transport import VectorChannel


class FakePeer:
    """A peer that answers connections, or does not."""

    def __init__(self) -> None:
        self.error: OSError | None = TimeoutError("no answer")
        self.calls: list[float] = []

    def __call__(self, peer: int) -> None:
        self.calls.append(time.monotonic())
        if self.error is not None:
            raise self.error


def until(true: object, attendance: PeerLiveness, peer: int) -> bool:
    deadline = time.monotonic() + 20
    while (peer in attendance) is not true and time.monotonic() < deadline:
        time.sleep(0.005)
    return (peer in attendance) is true


def test_a_late_peer_is_back_when_it_answers_a_knock_or_sends_something() -> None:
    fake, changes = FakePeer(), list[int]()
    attendance = PeerLiveness(fake, 0.02, lambda: changes.append(1))
    assert 3 in attendance
    attendance.late(3)
    attendance.late(3)
    assert 3 not in attendance
    assert 4 in attendance
    assert not attendance.has_ended(3)
    while len(fake.calls) < 3:
        time.sleep(0.005)
    assert 3 not in attendance
    fake.error = None
    assert until(True, attendance, 3)
    fake.error = TimeoutError("no answer")
    attendance.late(3)
    assert 3 not in attendance
    attendance.heard(3)
    assert 3 in attendance
    assert len(changes) >= 4
    attendance.close()


def test_a_peer_that_is_late_again_is_left_alone_for_a_while() -> None:
    fake = FakePeer()
    fake.error = None
    attendance = PeerLiveness(fake, 0.2, lambda: None)
    attendance.late(3)
    assert until(True, attendance, 3)
    began, known = time.monotonic(), len(fake.calls)
    attendance.late(3)
    assert until(True, attendance, 3)
    assert fake.calls[known] - began > 0.75
    attendance.met(3)
    attendance.late(3)
    assert until(True, attendance, 3)
    attendance.close()


def test_a_peer_that_has_ended_stays_so_and_nobody_knocks_after_the_end() -> None:
    fake = FakePeer()
    attendance = PeerLiveness(fake, 0.02, lambda: None)
    attendance.late(3)
    attendance.ended(3)
    attendance.heard(3)
    attendance.late(3)
    assert attendance.has_ended(3)
    assert 3 not in attendance
    attendance.late(4)
    attendance.close()
    deadline = time.monotonic() + 10
    while any(t.name == "hetero-gossip-knocker" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(t.name == "hetero-gossip-knocker" for t in threading.enumerate())


def test_nobody_knocks_at_a_peer_that_is_found_to_be_late_after_the_end() -> None:
    attendance = PeerLiveness(FakePeer(), 0.02, lambda: None)
    attendance.close()
    attendance.late(3)
    assert not any(t.name == "hetero-gossip-knocker" for t in threading.enumerate())


def test_a_connection_that_ends_brings_one_knock_and_a_knock_brings_none(monkeypatch: pytest.MonkeyPatch) -> None:
    knocks = list[int]()
    with team([1, 1]) as (one, other):
        assert meet(one, other) == (True, True)
        for member in (one, other):
            liveness = member.pairing.liveness

            def ping(peer: int, knock: Callable[[int], None] = liveness._ping) -> None:
                knocks.append(peer)
                knock(peer)

            monkeypatch.setattr(liveness, "_ping", ping)
        one.pairing.drop(1)
        other.pairing.drop(0)
        time.sleep(0.5)
        assert 1 <= len(knocks) <= 2  # one for each connection that there was


@pytest.mark.parametrize("end", ["lose", "close"])
def test_a_connection_that_is_made_while_its_peer_is_lost_is_closed(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with team([1, 1]) as (one, _):
        peers = one.pairing
        connect = peers._connect

        def late(peer: int) -> VectorChannel:
            channel = connect(peer)
            peers.lose(peer) if end == "lose" else peers.close()
            return channel

        monkeypatch.setattr(peers, "_connect", late)
        with pytest.raises(ConnectionRefusedError):
            peers.channel(1)
        assert not peers._out


@pytest.mark.clock
def test_a_pair_in_rounds_waits_once_for_a_silent_peer_and_not_at_all_for_one_that_has_ended() -> None:
    limit = 0.6
    with team([1, 1, 1], limit=limit) as (one, two, three), socket.create_server(("127.0.0.1", 0)) as deaf:
        for member, whom in ((one, 1), (three, 1)):  # the first of the pair, and the second
            member.pairing.know({1: deaf.getsockname()})
            began = time.monotonic()
            for turn in range(12):
                member.offer([whom], float(turn))
                assert not member.take(10 * limit)
            assert time.monotonic() - began < 4 * limit
        one.pairing.know({1: two.pairing.address, 2: three.pairing.address})
        three.pairing.close()
        began = time.monotonic()
        for turn in range(20, 32):
            one.offer([2], float(turn))
            assert not one.take(10 * limit)
        assert time.monotonic() - began < limit
        assert one.pairing.liveness.has_ended(2)
        with suppress(OSError):
            deaf.shutdown(socket.SHUT_RDWR)
