"""Agreement of members on who takes part: in threads of one process."""

import os
import signal
import socket
import time

import pytest
from members import LONG, TERMS, TOKEN, Threads, in_threads, until

from lightning_hetero.comm.membership import Membership
from lightning_hetero.comm.membership_protocol import NextView
from lightning_hetero.errors import MembershipLostError


def changing(threads: Threads, members: list[int]) -> None:
    until(lambda: all(threads.all[one].changing for one in members))


def steady(threads: Threads, members: list[int], seconds: float = 0.5) -> None:
    time.sleep(seconds)
    known = {one: threads.all[one]._member.lost.reasons for one in members}
    assert not any(threads.all[one].changing for one in members), known


def same(results: dict) -> NextView:
    """The view that all have agreed on."""
    views = list(results.values())
    assert all(isinstance(view, NextView) and view == views[0] for view in views), results
    return views[0]


def test_all_agree_on_those_that_remain() -> None:
    with in_threads([[0], [1], [2], [3]]) as threads:
        threads.all[2].close()
        died = time.monotonic()
        changing(threads, [0, 1, 3])
        view = same(threads.agree([0, 1, 3]))
        assert view.members == (0, 1, 3)
        assert view.progress == {0: (0, 0), 1: (1, 10), 3: (3, 30)}
        assert list(view.lost) == [2]
        assert view.lost[2].startswith("has ended without an error message: killed, out of memory")
        assert view.roster.host == 0
        assert view.offer == [os.getpid(), view.roster.number]
        steady(threads, [0, 1, 3])
        assert {one: called > 0 for one, called in threads.called.items()} == {0: True, 1: True, 2: False, 3: True}
        assert threads.called_at[3] - died < TERMS.grace  # nobody waits for its silence
        threads.all[0].close()
        changing(threads, [1, 3])
        again = threads.agree([1, 3])
        assert same(again).members == (1, 3)
        assert same(again).roster.number > view.roster.number
        assert list(same(again).lost) == [0]


@pytest.mark.parametrize("lost", [0, 2])
def test_it_is_known_how_far_a_lost_member_had_come(lost: int) -> None:
    with in_threads([[0], [1], [2]]) as threads:
        threads.done[lost] = 5
        alive = [one for one in range(3) if one != lost]
        informed = alive[:1] if lost else alive  # members hear of the coordinator, it hears of all
        until(lambda: all(threads.all[one]._member.heartbeat.steps.get(lost) == 5 for one in informed))
        threads.all[lost].close()
        changing(threads, alive)
        assert same(threads.agree(alive)).steps == {**dict.fromkeys(alive, 0), lost: 5}


def test_nobody_is_lost() -> None:
    with in_threads([[0], [1], [2]]) as threads:
        view = same(threads.agree([0, 1, 2]))
        assert (view.members, view.lost) == ((0, 1, 2), {})
        assert view.roster.number > 0


def test_broken_connections_are_made_anew() -> None:
    with in_threads([[0], [1], [2]]) as threads:
        for link in list(threads.all[0]._transport._links):
            link.connection.shutdown(socket.SHUT_RDWR)
        steady(threads, [0, 1, 2])
        until(lambda: sorted(threads.all[0]._member.inbound) == [1, 2])


def test_a_slow_member_is_waited_for() -> None:
    with in_threads([[0], [1]], TERMS._replace(grace=0.8)) as threads:
        threads.all[0]._post(lambda: threads.all[0]._member.request_view())
        changing(threads, [1])
        agreed = threads.agree_later([0])
        time.sleep(1.5)
        threads.agree_later([1], agreed)
        assert same(agreed.results()).members == (0, 1)


def test_a_member_that_does_not_come_is_left_out() -> None:
    with in_threads([[0], [1], [2]], TERMS._replace(timeout=1.0)) as threads:
        view = same(threads.agree([0, 1]))
        assert view.lost == {2: "did not come within 1 s"}
        with pytest.raises(MembershipLostError, match=r"left out since view .: it did not come within 1 s"):
            threads.all[2].agree((2,))


def test_a_coordinator_that_does_not_come_is_left_out() -> None:
    with in_threads([[0], [1], [2]], TERMS._replace(timeout=1.0)) as threads:
        view = same(threads.agree([1, 2]))
        assert view.lost == {0: "did not come within 1 s"}
        assert view.roster.host == 1
        with pytest.raises(MembershipLostError, match=r"left out since view .: it did not come within 1 s"):
            threads.all[0].agree((0,))


@pytest.mark.parametrize("lost", [0, 1, 5])
def test_a_replica_is_lost_as_a_whole(lost: int) -> None:
    units = [[0, 1], [2, 3], [4, 5]]
    with in_threads(units) as threads:
        threads.all[lost].close()
        other = lost ^ 1
        alive = [one for one in range(6) if one != lost]
        changing(threads, alive)
        results = threads.agree(alive)
        assert f"it lost rank {lost} of its replica" in str(results.pop(other))
        view = same(results)
        assert view.lost[other] == f"lost rank {lost} of its replica"
        assert view.roster.host == min(view.members) == (2 if lost < 2 else 0)


def test_too_few_remain() -> None:
    with in_threads([[0], [1], [2]], TERMS._replace(minimum=3)) as threads:
        threads.all[1].announce("failed", "failed with ValueError: no")
        changing(threads, [0, 2])
        for result in threads.agree([0, 2]).values():
            assert isinstance(result, MembershipLostError)
            assert "only 2 replicas remain, and at least 3 are required. Missing: rank 1 failed with" in str(result)


@pytest.mark.parametrize("failed", [0, 2])
def test_an_error_is_told(failed: int) -> None:
    with in_threads([[0], [1], [2]]) as threads:
        threads.all[failed].announce("failed", "failed with ValueError: no")
        alive = [one for one in range(3) if one != failed]
        changing(threads, alive)
        assert same(threads.agree(alive)).lost == {failed: "failed with ValueError: no"}


def test_one_that_has_left_is_not_lost() -> None:
    with in_threads([[0], [1], [2], [3]]) as threads:
        began = time.monotonic()
        threads.all[0].leave()
        threads.all[3].leave()
        assert time.monotonic() - began < LONG / 4
        steady(threads, [1, 2])
        view = same(threads.agree([1, 2]))
        assert view.lost == dict.fromkeys((0, 3), "has left: its run was over")
        threads.all[1].leave()
        assert threads.all[2].agree(()).members == (2,)  # no other member can go on


def test_all_leave_at_once() -> None:
    with in_threads([[one] for one in range(6)]) as threads:
        threads.at_once(lambda membership: membership.leave())
        for membership in threads.all.values():
            assert membership._member.lost._lost == {}
            assert not membership.changing
            assert not membership.survives


def test_strangers_change_nothing() -> None:
    with in_threads([[0], [1], [2]]) as threads:
        strangers = [socket.create_connection(threads.all[0].address) for _ in range(100)]
        contents = [b"", b"", b"\0" * 9000, b"0" * 32 + b" 1\n", f"{TOKEN} 7\n".encode(), b"GET / HTTP/1.1\r\n\r\n"]
        for number, stranger in enumerate(strangers):
            try:
                stranger.sendall(contents[number % len(contents)])
            except OSError:
                continue  # it has been refused
        steady(threads, [0, 1, 2])
        assert len(threads.all[0]._transport._links) <= 2 + 16 + 2
        threads.all[1].close()
        changing(threads, [0, 2])
        assert same(threads.agree([0, 2])).members == (0, 2)
        for stranger in strangers:
            stranger.close()


def test_a_member_that_talks_nonsense_is_cut_off_and_nobody_else_is() -> None:
    with in_threads([[0], [1], [2]]) as threads:
        with socket.create_connection(threads.all[0].address) as liar:
            liar.sendall(f"{TOKEN} 1\n[1]\n".encode())
            liar.settimeout(LONG)
            while liar.recv(4096):
                pass
        steady(threads, [0, 1, 2])
        until(lambda: sorted(threads.all[0]._member.inbound) == [1, 2])


@pytest.mark.clock
def test_a_partition_in_halves_goes_on_once() -> None:
    """Connections end, and new ones lead to addresses at which nobody answers."""
    with in_threads([[0], [1], [2], [3]], TERMS._replace(grace=1.0)) as threads, socket.socket() as nowhere:
        nowhere.bind(("127.0.0.1", 0))
        nowhere.listen(64)
        for one, membership in threads.all.items():
            wire = membership._transport
            wire.addresses = {
                other: address if (one < 2) == (other < 2) else nowhere.getsockname()
                for other, address in wire.addresses.items()
            }
        for link in list(threads.all[0]._transport._links):
            if link.peer in (2, 3):
                link.connection.shutdown(socket.SHUT_RDWR)
        began = time.monotonic()
        changing(threads, [0, 1, 2, 3])
        results = threads.agree([0, 1, 2, 3])
        assert time.monotonic() - began < LONG / 2
        assert same({one: results[one] for one in (0, 1)}).members == (0, 1)
        for one in (2, 3):
            assert "only 2 of 4 replicas remain without rank 0" in str(results[one])
            assert "rank 0 has not been heard of for" in str(results[one])


def test_a_child_process_does_not_keep_connections_open() -> None:
    with in_threads([[0], [1], [2]]) as threads:
        child = os.fork()
        if child == 0:
            time.sleep(LONG)
            os._exit(0)
        try:
            threads.all[2].close()
            changing(threads, [0, 1])
            assert same(threads.agree([0, 1])).members == (0, 1)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(threads.all[2].address)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_close_is_quick_and_may_come_first() -> None:
    with in_threads([[0], [1]]) as threads:
        began = time.monotonic()
        threads.all[0].close()
        threads.all[0].close()
        threads.all[0].leave()
        assert time.monotonic() - began < LONG / 4
    never = Membership(3, "127.0.0.1", TOKEN)
    assert not never.changing
    never.close()
