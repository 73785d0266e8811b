"""Both peers of a pair count an exchange, or neither: threads in one process, with faults of all kinds between them."""

import gc
import os
import random
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from gossip_team import Member, Proxy, meet, team, total
from leftovers import nothing_left_in_memory

from lightning_hetero.algorithms.topologies import random_matching
from lightning_hetero.comm.gossip import ANY
from lightning_hetero.comm.gossip_client import Endpoint, pair_client
from lightning_hetero.comm.topology import interface_towards
from lightning_hetero.comm.transport import listen_within
from lightning_hetero.errors import CommunicationError

# -- a pair --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("boxes", [False, True])
@pytest.mark.parametrize("weights", [(2, 6), (0, 4)])
def test_a_pair_meets_by_weight_and_keeps_its_sum(weights: tuple[float, float], boxes: bool) -> None:
    with team(weights, boxes=boxes) as (one, other):
        one.x[:], other.x[:] = torch.tensor([0.0, 8.0, -4.0]), torch.tensor([4.0, 0.0, 12.0])
        before = total([one, other])
        assert meet(one, other) == (True, True)
        assert torch.equal(one.x, before / sum(weights))
        assert torch.equal(other.x, one.x)
        one.x += 1.0  # and again over the same connection
        assert meet(other, one, ANY) == (True, True)
        assert torch.equal(total([one, other]), before + weights[0])


def test_shared_memory_brings_bitwise_what_the_network_brings() -> None:
    results = []
    for boxes in (False, True):
        torch.manual_seed(3)
        with team([5, 2, 3, 7], boxes=boxes, size=1001) as members:
            for member in members:
                member.x.normal_()
            for turn in range(12):
                for i, to in enumerate(random_matching(4, turn, 1)):
                    if i < to[0]:
                        assert meet(members[i], members[to[0]], turn) == (True, True)
            results.append(torch.stack([member.x for member in members]))
    assert torch.equal(*results)
    assert results[0].std(0).max() < 1


def test_moving_meanwhile_keeps_the_sum() -> None:
    with team([1, 1]) as (one, other):
        one.x[:] = 8.0
        one.offer([1], 1)
        other.offer([0], 1)
        one.x += 32.0  # a step
        other.x -= 16.0
        assert one.take(10)
        assert other.take(10)
        assert torch.equal(one.x, torch.full((3,), 36.0).double())
        assert torch.equal(other.x, torch.full((3,), -12.0).double())


def test_only_the_same_round_will_do() -> None:
    with team([1, 1]) as (one, other):
        one.x[:] = 2.0
        one.offer([1], 3)
        other.offer([0], 4)
        assert one.pairing.result(5) is None
        assert not one.is_open  # the other has gone on: nobody waits for it
        assert other.is_open
        assert not one.take(0)
        one.offer([1], 4)
        assert one.take(5)
        assert other.take(5)
        assert other.x[0] == 1.0


def test_a_peer_that_has_gone_on_is_not_waited_for() -> None:
    with team([1, 1], limit=20.0) as (one, other):
        other.offer([0], 3)
        one.offer([1], 4)  # it has left round 3 out
        began = time.monotonic()
        assert other.pairing.result(10) is None
        assert time.monotonic() - began < 5
        assert not other.is_open


def test_a_late_question_of_an_offer_says_nothing_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with team([1, 1, 1, 1], limit=20.0) as members:
        for i, member in enumerate(members):
            member.x[:] = 2.0**i
        held, go_on = threading.Event(), threading.Event()
        peers = members[1].pairing
        connect = peers.channel

        def late(peer: int) -> Any:
            held.set()
            assert go_on.wait(10)
            return connect(peer)

        monkeypatch.setattr(peers, "channel", late)
        members[1].pairing._selector.wants(0, 1.0)
        members[1].offer([0], 1.0)
        assert held.wait(10)  # it is about to ask
        members[0].offer([1], 1.0)  # and is asked itself
        assert members[0].take(10)
        assert members[1].take(10)
        members[0].offer([2], 2.0)
        members[1].offer([3], 2.0)
        time.sleep(0.3)  # member 0 has asked in vain, and waits
        go_on.set()  # its question of round 1 goes out only now
        time.sleep(0.2)
        members[2].offer([0], 2.0)
        members[3].offer([1], 2.0)
        assert [member.take(10) for member in members] == [True] * 4
        assert [float(member.x[0]) for member in members] == [2.75, 4.75, 2.75, 4.75]
        assert not any(member.pairing.misses for member in members)


@pytest.mark.parametrize("held", ["ASK", "NO"])  # ASK: the other closes a silent connection, just as late
def test_a_peer_that_did_not_answer_in_time_is_not_waited_for_until_it_asks(held: str) -> None:
    frozen, awake = threading.Event(), threading.Event()

    def judge(name: str, message: bytes) -> bytes:
        if name == held:
            frozen.set()
            awake.wait(60)
        return message

    def greet(drawn: bytes) -> bytes:
        if frozen.is_set():  # otherwise the silent peer would answer the first greeting, and be asked again
            awake.wait(60)
        return drawn

    with team([1, 1], limit=2.0) as (one, other):
        proxy = Proxy(other.pairing.address, judge, greet)
        one.pairing.know({1: proxy.address})
        for turn, least, most in ((1.0, 1.9, 30.0), (2.0, 0.0, 15.0), (3.0, 0.0, 15.0)):
            began = time.monotonic()
            one.offer([1], turn)
            assert not one.take(20.0)
            assert least < time.monotonic() - began < most
        assert sum(one.pairing.misses.values()) == 1  # asked once only
        assert 1 not in one.pairing.liveness
        one.offer([1], 4.0)
        other.offer([0], 4.0)  # the second of the pair asks if it was not asked for a while
        assert other.take(10)
        assert one.take(0)
        awake.set()
        assert meet(one, other, 5.0) == (True, True)
        proxy.close()


@pytest.mark.parametrize("turn", [ANY, 1.0])
def test_a_failure_of_the_thread_that_asks_is_told(monkeypatch: pytest.MonkeyPatch, turn: float) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("odd")

    with team([1, 1]) as (one, _other):
        monkeypatch.setattr(one.pairing, "_ask", fail)
        one.offer([1], turn)
        with pytest.raises(CommunicationError, match=r"replica 0 can exchange no more.*odd"):
            one.take(10)


def test_three_peers_that_ask_each_other_in_a_circle_over_a_slow_link() -> None:
    def judge(name: str, message: bytes) -> bytes:
        time.sleep(0.03)
        return message

    with team([1, 1, 1], proxy=judge) as members:
        for i, member in enumerate(members):
            member.pairing.channel((i + 1) % 3)  # connected, so that all ask at once
            member.pairing._selector.wants((i + 1) % 3, ANY)
        for member in members:
            member.offer([i for i in range(3) if i != member.pairing.me])
        deadline = time.monotonic() + 20
        while (left := sum(member.is_open for member in members)) != 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert left == 1


def test_the_random_numbers_of_the_user_do_not_depend_on_whom_it_asks() -> None:
    state = random.getstate()
    with team([1, 1, 1]) as (one, other, _):
        assert meet(one, other, ANY) == (True, True)
        other.offer([0, 2])
        assert other.pairing.result(0.3) is None  # refused, again and again
    assert random.getstate() == state


def test_pausing() -> None:
    with team([1, 1]) as (one, other):
        one.pairing.pause()
        one.offer([1])
        other.offer([0])
        assert one.pairing.result(0.3) is other.pairing.result(0.0) is None
        one.pairing.resume()
        assert one.take(10)
        assert other.take(10)


# -- 100 schedules -------------------------------------------------------------------------------------------


def schedule(members: list[Member], draw: random.Random, faults: dict[str, Any]) -> int:
    """Run a random round of a random form with random faults, on threads; returns the number of exchanges."""
    for member in members:
        member.x[:] = torch.tensor([float(draw.randrange(-512, 512)) for _ in range(3)])
    before, first_come, turn = total(members), draw.random() < 0.5, draw.randrange(1000)
    faults["cut"], faults["late"] = draw.choice([0, 0, 0.1, 0.5]), draw.choice([0, 0, 0.02])
    matching = random_matching(len(members), turn, 7)
    plans = [(draw.uniform(0, 0.03), draw.choice([0.0, 0.02, 0.1])) for _ in members]

    def one(member: Member) -> bool:
        late, wait = plans[member.pairing.me]
        time.sleep(late)
        whom = [i for i in range(len(members)) if i != member.pairing.me] if first_come else matching[member.pairing.me]
        if not whom:
            return False
        member.offer(whom, ANY if first_come else turn)
        return member.take(wait)

    with ThreadPoolExecutor(len(members)) as pool:
        met = sum(pool.map(one, members, timeout=60))
    assert torch.equal(total(members), before)
    return met


@pytest.mark.timeout(200)
@pytest.mark.parametrize("seed", range(5))
def test_100_random_schedules_keep_the_sum(seed: int) -> None:
    draw, faults = random.Random(seed), {"cut": 0.0, "late": 0.0}

    def judge(name: str, message: bytes) -> bytes | None:
        time.sleep(random.uniform(0, faults["late"]))
        return None if random.random() < faults["cut"] else message

    met = 0
    with team([draw.choice([1, 3]) for _ in range(draw.randrange(2, 6))], boxes=seed % 2 == 1, proxy=judge) as members:
        for _ in range(20):
            met += schedule(members, draw, faults)
        faults["cut"] = 0.0
        # Broken connections end, and then no fault is between them, even if they did not answer each other in time.
        deadline, turns = time.monotonic() + 60, count(2000)
        while meet(members[0], members[1], next(turns), 5) != (True, True):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert met % 2 == 0
    assert met > 0


# -- the network, and what is left ---------------------------------------------------------------------------


def test_listens_on_the_given_interface_only() -> None:
    with team([1]) as [one]:
        host, port = one.pairing.address
        listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"] == [host]
        for address in {a.address for found in psutil.net_if_addrs().values() for a in found if a.family == 2}:
            if not address.startswith("127.0.0.1"):
                with pytest.raises(OSError, match="refused"):
                    socket.create_connection((address, port), 1)
    assert interface_towards("127.0.0.1") == "127.0.0.1"


def left() -> tuple[set[str], int, int]:
    """Threads, sockets and names in shared memory."""
    threads = {t.name for t in threading.enumerate() if t.name.startswith("hetero-gossip")}
    mapped = [path for path in Path("/dev/shm").glob("lightning-hetero-*") if path.stat().st_uid == os.getuid()]
    return threads, len(psutil.Process().net_connections("tcp")), len(mapped)


class LostLinks:
    """Links of a replica; the other one is lost when all are to say where they listen."""

    index, columns, in_columns = 0, [(0, 1)], None

    def __init__(self) -> None:
        self.gathered = 0

    def gather(self, value: Any) -> list[Any]:
        self.gathered += 1
        if self.gathered > 1:
            raise CommunicationError("rank 1 has ended")
        return [value, value]


def test_nothing_is_left_of_peers_that_were_lost_while_they_met() -> None:
    links: Any = LostLinks()
    with nothing_left_in_memory():
        with pytest.raises(CommunicationError, match="rank 1 has ended"):
            pair_client(Endpoint("127.0.0.1", "here", 5.0), links, [torch.zeros(3)], "fp32", Counter(), Counter())
        deadline = time.monotonic() + 10
        while left()[0] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left()[0] == set()
        gc.collect()


def test_nothing_is_left_where_no_port_is_free() -> None:
    with nothing_left_in_memory(), socket.create_server(("127.0.0.1", 0)) as taken:
        listen_within([taken.getsockname()[1]])
        try:
            with pytest.raises(CommunicationError, match="are taken"):
                Member(0, 1.0, 5.0)
        finally:
            listen_within(())
        gc.collect()


@pytest.mark.clock  # others may have files for a moment
def test_nothing_is_left() -> None:
    before = left()
    with team([1, 1, 1], boxes=True) as members:
        meet(members[0], members[1])
        meet(members[1], members[2])
        members[0].offer([1, 2])  # open still
        assert {"hetero-gossip-asker", "hetero-gossip-listener", "hetero-gossip"} == left()[0]
        assert left()[2] <= before[2]
    members[0].pairing.close()
    deadline = time.monotonic() + 10
    while (left()[0] or left()[1] > before[1]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left()[0] == set()
    assert left()[1] <= before[1]
