"""Pushes to peers that lag, freeze or are gone; and strangers."""

import socket
import threading
import time

import pytest
from test_gossip_pushing import LIMIT, givers, sums

from lightning_hetero.comm.gossip import ReceivedPush

# -- who lags, and who is gone -------------------------------------------------------------------------------


def test_a_peer_that_lags_gets_what_comes_and_is_not_waited_for() -> None:
    with givers(2) as (one, two):
        before, began = sums([one, two]), time.monotonic()
        assert two.get(3, [0], 0.05) == []  # waited for in vain
        assert one.give([1], 1) == [True]  # it lags behind
        assert two.get(5, [0], 30) == [(0, 1)]
        assert two.give([0], 5) == [True]  # farther ahead than a waiting peer can be
        assert one.get(2, [1], 30) == [(1, 5)]
        assert one.get(4, [1], 30) == []
        assert one.give([1], 5) == [True]  # it has caught up
        assert two.get(5, [0], 30) == [(0, 5)]
        assert time.monotonic() - began < 15
        assert sums([one, two]) == before


def test_a_peer_that_takes_nothing_is_not_given_everything() -> None:
    with givers(2) as (one, two):
        before = sums([one, two])
        assert [one.give([1], turn) for turn in range(5)] == [[True]] * 3 + [[False]] * 2
        assert one.w == 1 / 8
        assert len(two.pushing.waiting()) == 3
        assert sums([one, two]) == before
        two.get(9, [], 0)
        assert one.give([1], 6) == [True]
        assert sums([one, two]) == before


def test_a_push_without_weight_tells_of_the_round_only() -> None:
    for boxes in (False, True):
        with givers(2, boxes=boxes) as (one, two):
            one.pushing.outbox.vectors[0].fill_(7.0)
            assert one.pushing.push(1, 4, 0.0) is not None
            [push] = two.pushing.collect(4, [0], 30)
            assert push == ReceivedPush(0, 4, 0.0, [])
            two.pushing.recycle([push])


def test_a_peer_that_has_ended_is_waited_for_no_longer() -> None:
    with givers(3, limit=60.0) as (one, two, three):
        assert one.give([1], 1) == [True]
        threading.Timer(0.3, one.pushing.close).start()
        began = time.monotonic()
        assert two.get(2, [0], 60) == [(0, 1)]  # notices that one of its callers has closed the connection
        assert two.give([0], 2) == [False]
        assert three.give([0], 2) == [False]  # is refused
        assert three.get(2, [0], 60) == []
        assert time.monotonic() - began < 20
        assert two.pushing.liveness.has_ended(0)
        assert three.pushing.liveness.has_ended(0)
        assert not two.pushing.liveness.has_ended(2)
        assert three.give([1], 3) == [True]


@pytest.mark.clock
def test_a_silent_peer_costs_one_deadline_until_it_speaks() -> None:
    with givers(2, LIMIT) as (one, two), socket.create_server(("127.0.0.1", 0)) as deaf:
        there = two.pushing.address
        one.pushing.know({1: deaf.getsockname()})
        began = time.monotonic()
        assert [one.give([1], turn) for turn in range(20)] == [[False]] * 20
        assert one.get(3, [1], 30) == []
        assert time.monotonic() - began < 3 * LIMIT
        assert one.w == 1.0
        one.pushing.know({1: there})  # as if it had thawed
        deadline = time.monotonic() + 20
        while 1 not in one.pushing.liveness and time.monotonic() < deadline:
            time.sleep(0.01)
        assert one.give([1], 5) == [True]


def test_strangers_are_few_and_keep_nobody_away() -> None:
    with givers(2, limit=30.0) as (one, two):
        before = threading.active_count()
        assert one.give([1], 1) == [True]
        strangers = [socket.create_connection(two.pushing.address) for _ in range(200)]
        assert one.give([1], 2) == [True]  # over the connection that there is
        one.pushing.drop(1)
        assert one.give([1], 3) == [True]  # over another
        deadline = time.monotonic() + 60
        while threading.active_count() > before + 40 and time.monotonic() < deadline:
            time.sleep(0.02)
        held = threading.active_count() - before
        for stranger in strangers:
            stranger.close()
        assert held <= 40
