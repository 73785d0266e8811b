"""Pushes: a message is the other's or has never left, with its weight and its values, late or not."""

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from gossip_team import TOKEN, Judge, Proxy, call, read
from test_gossip_cuts import Once, cut, flip, late
from test_gossip_pairing import left

from lightning_hetero.algorithms.topologies import DIRECTED, sends
from lightning_hetero.comm.gossip import PushTransport, ReceivedPush
from lightning_hetero.comm.gossip_peers import Session

LIMIT = 0.5
MESSAGES = ["PUSH", "YES", "COMMIT", "DONE"]


class Giver:
    """A peer with ``x`` and ``w``, of which it gives away parts."""

    def __init__(
        self, index: int, x: Sequence[float], limit: float, token: bytes = TOKEN, interface: str = "127.0.0.1"
    ) -> None:
        self.x, self.w = torch.tensor(x, dtype=torch.float64), 1.0
        self.pushing = PushTransport(index, Session(token, limit), interface, [self.x])
        self.path = self.pushing.outbox.path

    def give(self, to: Sequence[int], turn: int) -> list[bool]:
        parts = self.x / (len(to) + 1), self.w / (len(to) + 1)
        gone = []
        for peer in to:
            self.pushing.outbox.vectors[0].copy_(parts[0])
            gone.append(self.pushing.push(peer, turn, parts[1]) is not None)
            if gone[-1]:
                self.x, self.w = self.x - parts[0], self.w - parts[1]
        return gone

    def get(self, turn: int, sources: Sequence[int], wait: float) -> list[tuple[int, int]]:
        pushes = self.pushing.collect(turn, sources, wait)
        for push in pushes:
            self.x, self.w = self.x + push.vectors[0], self.w + push.weight
        self.pushing.recycle(pushes)
        return [(push.peer, push.round_number) for push in pushes]


@contextmanager
def givers(
    count: int, limit: float = 5.0, boxes: bool = False, proxy: Judge | None = None, size: int = 3
) -> Iterator[list[Giver]]:
    members = [Giver(i, [float(64 * (i + 1)) - 32 * k for k in range(size)], limit) for i in range(count)]
    proxies = [Proxy(m.pushing.address, proxy) for m in members] if proxy else []
    for member in members:
        member.pushing.know({j: at.address for j, at in enumerate(proxies or [m.pushing for m in members])})
        if boxes:
            me = member.pushing.me
            member.pushing.set_outboxes({j: m.path for j, m in enumerate(members) if j != me})
    for member in members:
        member.pushing.outbox.hide()
    try:
        yield members
    finally:
        for member in members:
            member.pushing.close()
        for one in proxies:
            one.close()


def sums(members: Sequence[Giver]) -> list[float]:
    """Sums of the values and of the weights, with those of received pushes."""
    waiting = [push for member in members for push in member.pushing.waiting()]
    x = sum((member.x for member in members), sum((push.vectors[0] for push in waiting), torch.zeros(())))
    return [*x.tolist(), sum(member.w for member in members) + sum(push.weight for push in waiting)]


# -- rounds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("boxes", [False, True])
def test_rounds_are_the_matrices(boxes: bool) -> None:
    with givers(4, boxes=boxes) as members, ThreadPoolExecutor(4) as pool:
        before = sums(members)

        def play(member: Giver, topology: str, turn: int) -> None:
            to = sends(DIRECTED[topology], range(4), turn, 0)
            me = member.pushing.me
            assert all(member.give(to[me], turn))
            sources = [i for i in to if me in to[i]]
            assert sorted(member.get(turn, sources, 10)) == [(i, turn) for i in sorted(sources)]

        for turn in range(2):  # 2^2 peers: exact after two rounds
            list(pool.map(lambda m: play(m, "one_peer_exponential", turn), members, timeout=30))  # noqa: B023
        for member in members:
            assert member.w == 1.0
            assert member.x.tolist() == [part / 4 for part in before[:3]]
        assert sums(members) == before


def test_shared_memory_brings_bitwise_what_the_network_brings() -> None:
    results = []
    for boxes in (False, True):
        with givers(3, boxes=boxes, size=1001) as members:
            for member in members:
                member.x = torch.sin(torch.arange(1001, dtype=torch.float64) * (member.pushing.me + 1))
            for turn in range(6):
                for member in members:
                    assert all(member.give([j for j in range(3) if j != member.pushing.me], turn))
                for member in members:
                    member.get(turn, [j for j in range(3) if j != member.pushing.me], 10)
            results.append(torch.stack([torch.cat([m.x, torch.tensor([m.w])]) for m in members]))
    assert torch.equal(*results)


def test_fast_ones_are_not_taken_early_and_late_ones_count_when_they_come() -> None:
    with givers(3) as (one, two, three):
        before = sums([one, two, three])
        assert one.give([2], 5) == [True]  # a round ahead
        assert two.give([2], 3) == [True]  # a round behind
        assert three.get(4, [0, 1], 0.1) == [(1, 3)]
        assert sums([one, two, three]) == before
        began = time.monotonic()
        assert three.get(5, [0], 30) == [(0, 5)]
        assert time.monotonic() - began < 10
        assert sums([one, two, three]) == before
        assert three.w == 2.0
        assert three.get(6, [], 0) == []


def test_what_a_checkpoint_holds_comes_back() -> None:
    with givers(2) as (one, two):
        one.give([1], 1)
        one.give([1], 2)
        saved = [tuple(push) for push in two.pushing.waiting()]
        assert len(saved) == len(two.pushing.waiting()) == 2
    with givers(2) as (_, other):
        other.pushing.put([ReceivedPush(*push) for push in saved])
        assert other.get(2, [0], 10) == [(0, 1), (0, 2)]
        assert other.w == 1.0 + 0.5 + 0.25


# -- bad weather ---------------------------------------------------------------------------------------------


def push_in(act: Judge, boxes: bool = False) -> tuple[bool, int, list[float], Any]:
    """Whether peer 0 takes its push as sent, the number of received pushes, the change of the sums, refusals."""
    with givers(2, LIMIT, boxes, act) as (one, two):
        before = sums([one, two])
        [gone] = one.give([1], 1)
        time.sleep(4 * LIMIT if isinstance(act, Once) and act.slow else 0.3)  # type: ignore[attr-defined]
        came = len(two.pushing.waiting())
        off = [a - b for a, b in zip(sums([one, two]), before, strict=True)]
        refused = one.pushing.refused + two.pushing.refused
        assert any(one.give([1], 2) == [True] for _ in range(20))  # the first may find the connection closed
        two.get(2, [0], 5)
        assert [a - b for a, b in zip(sums([one, two]), before, strict=True)] == off
        return gone, came, off, refused


def once(name: str, act: Callable[[bytes], bytes | None], slow: bool = False) -> Once:
    judge = Once(name, act)
    judge.slow = slow  # type: ignore[attr-defined]
    return judge


@pytest.mark.parametrize(("name", "boxes"), [*((name, False) for name in MESSAGES), ("DONE", True)])
def test_the_connection_breaks(name: str, boxes: bool) -> None:
    gone, came, off, _ = push_in(once(name, cut), boxes)
    assert (gone, came) in ((False, 0), (True, 1))
    assert not any(off)


@pytest.mark.parametrize(("name", "times"), [("YES", 1.5), ("COMMIT", 1.5), ("DONE", 3.2)])
def test_a_message_is_late(name: str, times: float) -> None:
    gone, came, off, _ = push_in(once(name, late(times), slow=True))
    assert not any(off)
    assert (gone, came) == ((True, 1) if name == "DONE" else (False, 0))


@pytest.mark.parametrize(
    ("name", "at", "reason"), [("PUSH", -1, "damaged"), ("YES", 27, "replayed")],
)  # fmt: skip
def test_a_flipped_byte_is_refused_and_counted(name: str, at: int, reason: str) -> None:
    gone, came, off, refused = push_in(once(name, flip(at)))
    assert (gone, came) == (False, 0)
    assert not any(off)
    assert refused == {reason: 1}


@pytest.mark.parametrize("name", ["PUSH", "COMMIT"])
def test_a_message_twice_counts_once(name: str) -> None:
    _, came, off, refused = push_in(once(name, lambda message: message + message))
    assert came <= 1
    assert not any(off)
    assert sum(refused.values()) == 1


def test_a_frozen_peer_costs_a_deadline_and_garbage_nothing() -> None:
    with givers(1, LIMIT) as [one], socket.create_server(("127.0.0.1", 0)) as deaf:
        one.pushing.know({1: deaf.getsockname(), 2: ("127.0.0.1", 1)})
        before, began = sums([one]), time.monotonic()
        assert one.give([1, 2], 1) == [False, False]
        assert time.monotonic() - began < 10
        assert sums([one]) == before
        with call(one.pushing) as scanner:
            read(scanner, 16)
            scanner.sendall(bytes(200))
            assert scanner.recv(99) == b""
        assert one.pushing.refused == {"token": 1}
        assert one.pushing.waiting() == []


def test_a_silent_client_takes_no_memory() -> None:
    with givers(1, LIMIT) as [one]:
        before = threading.active_count()
        strangers = [call(one.pushing) for _ in range(20)]
        for stranger in strangers:
            read(stranger, 16)
        deadline = time.monotonic() + 20
        while (held := threading.active_count() - before) > 0 and time.monotonic() < deadline:
            time.sleep(0.05)
        for stranger in strangers:
            stranger.close()
        assert held <= 0  # a thread of an earlier test may have ended meanwhile


@pytest.mark.parametrize("seed", range(3))
def test_random_storms_keep_the_sums(seed: int) -> None:
    draw, faults = random.Random(seed), {"cut": 0.0, "late": 0.0}

    def judge(name: str, message: bytes) -> bytes | None:
        time.sleep(random.uniform(0, faults["late"]))
        return None if random.random() < faults["cut"] else message

    count = draw.randrange(2, 6)
    with givers(count, boxes=seed % 2 == 1, proxy=judge) as members, ThreadPoolExecutor(count) as pool:
        before, gone = sums(members), []

        def play(member: Giver, topology: str, turn: int, wait: float, pause: float) -> None:
            time.sleep(pause)
            to = sends(DIRECTED[topology], range(count), turn, 0)
            gone.extend(member.give(to[member.pushing.me], turn))
            member.get(turn, [i for i in to if member.pushing.me in to[i]], wait)

        for turn in range(8):
            faults["cut"], faults["late"] = draw.choice([0, 0.1, 0.5]), draw.choice([0, 0.02])
            topology = draw.choice(list(DIRECTED))
            jobs = [pool.submit(play, m, topology, turn, draw.choice([0, 0.1]), draw.uniform(0, 0.03)) for m in members]
            for job in jobs:
                job.result(60)
            for found, expected in zip(sums(members), before, strict=True):
                assert found == pytest.approx(expected, abs=1e-9)
        assert True in gone


@pytest.mark.clock  # others may have files for a moment
def test_nothing_is_left() -> None:
    before = left()
    with givers(3, boxes=True) as members:
        members[0].give([1, 2], 1)
        members[1].give([0], 1)
        assert left()[2] <= before[2]
    members[0].pushing.close()
    deadline = time.monotonic() + 10
    while (left()[0] or left()[1] > before[1]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left()[0] == set()
    assert left()[1] <= before[1]
