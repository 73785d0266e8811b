"""Timeout for a silence, as it is learned."""

import sys
import threading

import pytest

from lightning_hetero.comm.failure_detector import AdaptiveTimeout


def listen(hearing: AdaptiveTimeout, seconds: float, begin: float = 0.0, every: float = 1.0, others: int = 3) -> float:
    """Receive messages of others regularly; returns the time at which that ends."""
    now = begin
    while now < begin + seconds:
        for other in range(1, others + 1):
            hearing.message_came(other, now)
        now += every
    return now


def test_what_the_user_gives_counts() -> None:
    hearing = AdaptiveTimeout(5.0)
    listen(hearing, 60.0, every=3.0)
    hearing.busy(1, 4.0)
    assert (hearing.grace, hearing.beat, hearing.lapse) == (5.0, 1.25, 1.25)


def test_a_regular_beat_makes_the_grace_short_after_some_seconds() -> None:
    hearing = AdaptiveTimeout(None)
    listen(hearing, 7.0)
    assert hearing.grace == 10.0
    listen(hearing, 5.0, begin=7.0)
    assert hearing.grace == 2.5
    assert hearing.beat == 1.0  # one small message in a second, and no more


@pytest.mark.parametrize(("gap", "grace"), [(1.1, 2.5), (1.6, 4.0), (2.5, 8.5), (30.0, 60.0)])
def test_the_longest_gap_of_the_last_minutes_counts(gap: float, grace: float) -> None:
    hearing = AdaptiveTimeout(None)
    now = listen(hearing, 20.0, others=1)
    hearing.message_came(1, now - 1.0 + gap)
    now = listen(hearing, 5 * 60.0, begin=now + gap, others=1)
    assert hearing.grace == pytest.approx(grace)
    listen(hearing, 8 * 60.0, begin=now, others=1)
    assert hearing.grace == 2.5


def test_where_processes_wait_for_a_core_a_silence_means_less() -> None:
    hearing = AdaptiveTimeout(None)
    now = listen(hearing, 20.0)
    hearing.busy(3, 2.0)
    assert hearing.grace == 2.5
    hearing.busy(3, 7.0)
    assert hearing.grace == 8.75
    hearing.busy(3, 1.0)
    listen(hearing, 5.0, begin=now)
    assert hearing.grace == 2.5


def test_what_was_learned_in_another_view_is_known_at_once() -> None:
    before = AdaptiveTimeout(None)
    listen(before, 20.0, every=1.5)
    now = AdaptiveTimeout(None)
    assert now.grace == 10.0
    now.before = before.longest
    assert now.grace == 3.5


def test_many_members_are_heard_less_often() -> None:
    assert [AdaptiveTimeout(None, members=n).beat for n in (2, 64, 128, 2000)] == [1.0, 1.0, 2.0, 2.0]


def test_a_member_that_stands_still_for_a_moment_still_judges_others() -> None:
    """Otherwise no loss would ever be noticed on a busy machine, where heartbeats are often late."""
    hearing = AdaptiveTimeout(None)
    assert hearing.lapse == 2.5
    listen(hearing, 20.0)
    assert hearing.lapse == 0.625


def test_who_had_no_connection_was_not_silent() -> None:
    """Members are connected with the coordinator only, and ask each other when it is silent."""
    hearing = AdaptiveTimeout(None)
    hearing.expect([1, 2, 3], 50.0)
    listen(hearing, 120.0, others=1)
    for other in (2, 3):
        hearing.connected(other, 120.0)
        hearing.message_came(other, 120.1)
    assert hearing.grace == 2.5


def test_another_thread_may_ask_meanwhile() -> None:
    """The training's thread asks for values that the membership's thread learns."""
    hearing, failed = AdaptiveTimeout(None), list[Exception]()
    now, interval = listen(hearing, 20.0), sys.getswitchinterval()
    learning = threading.Thread(target=listen, args=(hearing, 3e6, now, 61.0, 1))  # a period with each message
    sys.setswitchinterval(1e-6)
    try:
        learning.start()
        while learning.is_alive() and not failed:
            try:
                assert hearing.longest is not None
            except RuntimeError as error:
                failed.append(error)
        learning.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failed
