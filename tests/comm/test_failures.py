"""First failure of a job, as rank 0 and the others learn of it."""

import json
import multiprocessing
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest

from lightning_hetero.comm import failures
from lightning_hetero.comm.failures import Failure, FailureChannel
from lightning_hetero.comm.waits import WaitWatchdog

LONG = 20.0  # seconds for what takes no time on a machine that is not busy


@contextmanager
def ranks(world: int = 4) -> Iterator[list[FailureChannel]]:
    """All ranks, in this process."""
    first, *others = everyone = [FailureChannel(rank, world) for rank in range(world)]
    where = first.listen("127.0.0.1")
    for other in others:
        other.connect(where, LONG)
    for one in everyone:
        one.run += 1
    try:
        yield everyone
    finally:
        for one in everyone:
            one.close()


def die(one: FailureChannel) -> None:
    """End a rank as the kernel would: its connections end."""
    one.close()


def named(one: FailureChannel) -> tuple[int, str] | None:
    failure = one.first(LONG)
    return failure and (failure.rank, failure.kind)


def test_a_rank_that_ends_without_a_word_is_known_to_all() -> None:
    with ranks() as everyone:
        die(everyone[2])
        assert [named(everyone[rank]) for rank in (0, 1, 3)] == [(2, "gone")] * 3
        assert "rank 2 has ended without an error message" in str(everyone[3].first(0))


def test_what_came_first_wins_over_its_echoes() -> None:
    with ranks() as everyone:
        everyone[3].announce("echo", "has lost another rank")  # before the others know of which rank
        die(everyone[3])
        assert everyone[1].first(0.3) is None
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


def test_an_error_is_of_its_own_run_only() -> None:
    with ranks(3) as everyone:
        for one in everyone:
            one.announce("failed", "failed with ValueError: an option")
        assert named(everyone[1]) is not None
        for one in everyone:
            one.run += 1
        assert [one.first(0.1) for one in everyone] == [None] * 3
        everyone[1].announce("failed", "failed with ValueError: another")
        assert [str(everyone[rank].first(LONG)) for rank in (0, 2)] == ["rank 1 failed with ValueError: another"] * 2
        die(everyone[1])
        for one in everyone:
            one.run += 1
        assert [str(everyone[rank].first(LONG)) for rank in (0, 2)] == ["rank 1 has ended"] * 2


def test_strangers_change_nothing() -> None:
    with ranks(2) as (first, other):
        address = first._transport.address
        strangers = [socket.create_connection(address) for _ in range(60)]
        for number, stranger in enumerate(strangers):
            contents = [
                b"\x00" * 9000,
                b"0" * 32 + b" 1\n",
                json.dumps({"rank": 1, "kind": "failed", "run": 1, "how": "failed"}).encode() + b"\n",
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
        assert first.first(0.3) is None
        assert first._links.keys() == {1}
        other.announce("failed", "failed")
        assert first.first(LONG) == Failure(1, "failed", 1, "failed")
        for stranger in strangers:
            stranger.close()


def _send_descriptors(one: FailureChannel, end: Connection) -> None:
    end.send([link.connection.fileno() for link in one._links.values()])


def test_a_child_process_does_not_keep_connections_open(monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks(3) as everyone:
        for one in everyone:
            monkeypatch.setattr(failures, "_failures", one)
            ours, theirs = multiprocessing.Pipe()
            child = multiprocessing.get_context("fork").Process(target=_send_descriptors, args=(one, theirs))
            child.start()
            assert ours.recv() == [-1] * (2 if one.rank == 0 else 1)
            child.join()
            ours.close()
            theirs.close()
            assert all(link.connection.fileno() >= 0 for link in one._links.values())


def test_ranks_are_named_by_their_first_numbers_after_others_were_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks(2) as (first, other):
        monkeypatch.setattr(failures, "_failures", first)
        monkeypatch.setattr(failures, "_numbers", (1, 4))  # of five, 0, 2 and 3 were lost
        monkeypatch.setattr(failures.dist, "get_rank", lambda: 0)
        monkeypatch.setattr(failures.dist, "get_world_size", lambda: 2)
        other.announce("failed", "failed with ValueError")
        assert str(failures.first_failure(LONG)) == "rank 4 failed with ValueError"
        assert failures.this_rank() == "rank 1 (one of the 2 that remain)"
        monkeypatch.setattr(failures, "_numbers", ())
        assert str(failures.first_failure(LONG)) == "rank 1 failed with ValueError"
        assert failures.this_rank() == "rank 0 of 2"


def test_a_message_without_sense_ends_the_connection_of_the_rank_that_has_sent_it() -> None:
    with ranks(3) as everyone:
        everyone[0]._heard = WaitWatchdog(0, 3, int, 30.0).heard
        everyone[1].tell(to=0, about="place", place=[])
        assert [named(everyone[rank]) for rank in (0, 2)] == [(1, "gone")] * 2
