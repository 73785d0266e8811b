"""First failure of a job, as rank 0 and the others learn of it."""

import contextlib
import json
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest

from lightning_hetero.comm import failures
from lightning_hetero.comm.failure_reports import Failure
from lightning_hetero.comm.membership import Membership
from lightning_hetero.comm.waits import WaitWatchdog

TOKEN = "0123456789abcdef"
LONG = 20.0  # seconds for what takes no time on a machine that is not busy


@contextmanager
def ranks(world: int = 4) -> Iterator[list[Membership]]:
    """All ranks, in this process."""
    everyone = [Membership(rank, "127.0.0.1", TOKEN) for rank in range(world)]
    addresses = {one.me: one.address for one in everyone}
    for one in everyone:
        assert one.begin(addresses, LONG)
    for one in everyone:
        one.begin_run()
    try:
        yield everyone
    finally:
        for one in everyone:
            one.close()


def die(one: Membership) -> None:
    """End a rank as the kernel would: its connections end."""
    one.close()


def wait_for(condition: Callable[[], bool]) -> bool:
    """Whether a condition holds soon."""
    until = time.monotonic() + LONG
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def first(one: Membership, seconds: float) -> Failure | None:
    one.wait(lambda: one.reports.first() is not None, seconds)
    return one.reports.first()


def named(one: Membership) -> tuple[int, str] | None:
    failure = first(one, LONG)
    return failure and (failure.rank, failure.kind)


def test_a_rank_that_ends_without_a_word_is_known_to_all() -> None:
    with ranks() as everyone:
        die(everyone[2])
        assert [named(everyone[rank]) for rank in (0, 1, 3)] == [(2, "gone")] * 3
        assert "rank 2 has ended without an error message" in str(first(everyone[3], 0))


def test_what_came_first_wins_over_its_echoes() -> None:
    with ranks() as everyone:
        everyone[3].announce("echo", "has lost another rank")  # before the others know of which rank
        die(everyone[3])
        assert first(everyone[1], 0.3) is None
        everyone[2].announce("failed", "failed with ValueError: no")
        everyone[0].announce("echo", "has lost another rank")
        assert named(everyone[1]) == (2, "failed")
        die(everyone[0])
        die(everyone[2])
        time.sleep(0.2)
        assert [named(everyone[rank]) for rank in (0, 1)] == [(2, "failed")] * 2


def test_the_end_of_rank_0_is_seen_by_the_others() -> None:
    with ranks() as everyone:
        die(everyone[0])
        assert [named(one) for one in everyone[1:]] == [(0, "gone")] * 3


@pytest.fixture
def silent_address() -> Iterator[tuple[str, int]]:
    """An address at which no connection is made, nor refused: packets to it are lost."""
    with socket.socket() as full, contextlib.ExitStack() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        yield full.getsockname()


@pytest.mark.parametrize("ended", [0, 2])
def test_a_rank_whose_machine_is_gone_has_ended(ended: int, silent_address: tuple[str, int]) -> None:
    with ranks() as everyone:
        others = [one for one in everyone if one.me != ended]
        for one in others:
            (one._transport.addresses or {})[ended] = silent_address
        time.sleep(1.0)  # the first beats have come
        assert [first(one, 0.0) for one in others] == [None] * 3
        die(everyone[ended])
        began = time.monotonic()
        assert [named(one) for one in others] == [(ended, "gone")] * 3
        assert time.monotonic() - began < failures._SECONDS_FOR_NEWS


def test_a_rank_that_cannot_be_reached_lives_as_long_as_it_is_connected(silent_address: tuple[str, int]) -> None:
    with ranks(3) as everyone:
        for one in everyone[1:]:  # they turn to rank 0, which cannot turn to them
            (everyone[0]._transport.addresses or {})[one.me] = silent_address
        time.sleep(4.5)
        assert [first(one, 0.0) for one in everyone] == [None] * 3


def test_an_error_is_of_its_own_run_only() -> None:
    with ranks(3) as everyone:
        for one in everyone:
            one.announce("failed", "failed with ValueError: an option")
        assert named(everyone[1]) is not None
        for one in everyone:
            one.begin_run()
        assert [first(one, 0.1) for one in everyone] == [None] * 3
        everyone[1].announce("failed", "failed with ValueError: another")
        assert [str(first(everyone[rank], LONG)) for rank in (0, 2)] == ["rank 1 failed with ValueError: another"] * 2
        die(everyone[1])
        for one in everyone:
            one.begin_run()
        assert [str(first(everyone[rank], LONG)) for rank in (0, 2)] == ["rank 1 has ended"] * 2


def test_strangers_change_nothing() -> None:
    with ranks(2) as (one, other):
        address = one._transport.address
        strangers = [socket.create_connection(address) for _ in range(60)]
        for number, stranger in enumerate(strangers):
            contents = [
                b"\x00" * 9000,
                b"0" * 32 + b" 1\n",
                json.dumps({"k": "report", "v": [1, "failed", 1, "failed"]}).encode() + b"\n",
                b" 1\n\xff\n",
                b"[" * 4000 + b"\n",  # too deep for a JSON parser
                b"GET / HTTP/1.1\r\n\r\n",
                b"",
            ]
            try:
                stranger.sendall(contents[number % len(contents)])
            except OSError:
                continue  # it has been refused: there are too many
        for stranger in strangers[::2]:
            stranger.close()
        assert first(one, 0.3) is None
        assert one._member.inbound.keys() == {1}
        other.announce("failed", "failed")
        assert first(one, LONG) == Failure(1, "failed", 1, "failed")
        for stranger in strangers:
            stranger.close()


def _send_descriptors(one: Membership, end: Connection) -> None:
    end.send([link.connection.fileno() for link in one._transport._links])


def test_a_child_process_does_not_keep_connections_open() -> None:
    with ranks(3) as everyone:
        for one in everyone:
            ours, theirs = multiprocessing.Pipe()
            child = multiprocessing.get_context("fork").Process(target=_send_descriptors, args=(one, theirs))
            child.start()
            assert ours.recv() == [-1] * (2 if one.me == 0 else 1)
            child.join()
            ours.close()
            theirs.close()
            assert all(link.connection.fileno() >= 0 for link in one._transport._links)


def test_ranks_are_named_by_their_first_numbers_after_others_were_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks(5) as everyone:
        die(everyone[0])
        assert named(everyone[1]) == (0, "gone")
        monkeypatch.setattr(failures, "_membership", everyone[1])
        monkeypatch.setattr(failures.dist, "get_rank", lambda: 0)
        monkeypatch.setattr(failures.dist, "get_world_size", lambda: 2)
        failures.continue_to_watch([1, 4])
        everyone[1].reports.members = (1, 4)  # as they have agreed
        try:
            assert failures.first_failure(0.0) is None  # those that are not there any more have no part in it
            everyone[4].announce("failed", "failed with ValueError")
            assert str(failures.first_failure(LONG)) == "rank 4 failed with ValueError"
            assert failures.this_rank() == "rank 1 (one of the 2 that remain)"
        finally:
            monkeypatch.undo()
            failures.stop_watching()


@pytest.mark.parametrize("lost", [[0], [0, 1]], ids=str)
def test_later_reports_arrive_after_the_coordinator_was_lost(lost: list[int]) -> None:
    with ranks(5) as everyone:
        for rank in lost:
            die(everyone[rank])
        rest = [one for one in everyone if one.me not in lost]
        assert all(named(one) for one in rest)
        heard: list[dict] = []
        everyone[4].heard = heard.append
        everyone[3].announce("failed", "failed with ValueError: no")
        everyone[4].announce("failed", "failed with ValueError: neither")
        for one in rest:
            assert one.reports.silent(3)
            assert wait_for(lambda one=one: [error.rank for error in one.reports.errors()] == [3, 4]), (
                one.reports.errors()
            )
        everyone[3].announce("told", "")
        assert wait_for(lambda: all(one.reports.told(3) for one in rest))
        everyone[2].tell(to=4, about="notice", text="where I am")
        assert wait_for(lambda: heard == [{"to": 4, "about": "notice", "text": "where I am", "by": 2}])
        die(everyone[3])
        rest.remove(everyone[3])
        assert wait_for(lambda: all(one.reports.ended(3) in one.reports.all() for one in rest))


def test_what_a_rank_reports_while_the_coordinator_ends_is_not_lost() -> None:
    with ranks(4) as everyone:
        die(everyone[0])
        for one in everyone[1:]:
            one.announce("failed", f"failed on {one.me}")
        orders = [[error.rank for error in one.reports.errors()] for one in everyone[1:]]
        assert wait_for(lambda: all(len(one.reports.errors()) == 3 for one in everyone[1:])), orders
        orders = [[error.rank for error in one.reports.errors()] for one in everyone[1:]]
        assert orders == orders[:1] * 3


def test_nobody_is_judged_by_silence() -> None:
    """A rank that is busy for long, or stopped, has not failed."""
    with ranks(3) as everyone:
        everyone[2]._transport.poll = lambda seconds: time.sleep(0.2) or []  # type: ignore[method-assign]
        for one in everyone:
            one._member.timeout._given = 0.5
        assert [first(everyone[rank], 3.0) for rank in (0, 1)] == [None, None]


def test_a_message_without_sense_ends_the_connection_which_is_made_anew() -> None:
    with ranks(3) as everyone:
        everyone[0].heard = WaitWatchdog(0, range(3), 30.0).heard
        before = everyone[0]._member.inbound[1]
        everyone[1].tell(to=0, about="place", place=[])
        assert wait_for(lambda: everyone[0]._member.inbound.get(1) not in (None, before))
        assert [first(everyone[rank], 0.3) for rank in (0, 2)] == [None] * 2
        everyone[1].announce("failed", "failed")
        assert [named(everyone[rank]) for rank in (0, 2)] == [(1, "failed")] * 2
