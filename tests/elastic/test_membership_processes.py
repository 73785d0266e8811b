"""Members in processes that are killed and frozen."""

import signal
import time

import pytest
from members import LONG, TERMS, in_processes

from lightning_hetero.comm.membership_protocol import NextView
from lightning_hetero.errors import MembershipLostError

SINGLE = [[0], [1], [2], [3]]


def agreed(processes, members, of: int | None = None):
    """The time at which the last member agreed, and the view of all of them."""
    results = [processes[member].receive() for member in members]
    views = [view for _, view in results]
    assert all(isinstance(view, NextView) for view in views), views
    assert len({repr(view) for view in views}) == 1
    return max(when for when, _ in results), views[0]


def lost(process) -> str:
    """The error with which a member must end."""
    _, error = process.receive()
    assert isinstance(error, MembershipLostError), error
    return str(error)


@pytest.mark.parametrize("killed", [[0], [3], [0, 1]], ids=str)
def test_killed(killed: list[int]) -> None:
    """Nobody waits for a timeout."""
    with in_processes([[0], [1], [2], [3], [4]], TERMS._replace(grace=LONG)) as processes:
        died = time.time()
        for member in killed:
            processes[member].signal(signal.SIGKILL)
        alive = [member for member in range(5) if member not in killed]
        when, view = agreed(processes, alive)
        assert when - died < LONG / 4
        if len(view.members) > len(alive):  # the first death was agreed on before the second
            when, view = agreed(processes, alive)
        assert view.members == tuple(alive)
        assert view.roster.host == min(alive)
        assert "has ended without an error message" in view.lost[killed[-1]]


def test_frozen_member_is_left_out_and_learns_it_when_it_thaws() -> None:
    with in_processes(SINGLE) as processes:
        processes[2].signal(signal.SIGSTOP)
        froze = time.time()
        when, view = agreed(processes, [0, 1, 3])
        assert view.members == (0, 1, 3)
        assert TERMS.grace / 2 < when - froze < LONG / 4
        assert "has not been heard of for" in view.lost[2]
        processes[2].signal(signal.SIGCONT)
        assert f"left out since view {view.roster.number}: it has not been heard of for" in lost(processes[2])
        assert not any(processes[one].end.poll(0.5) for one in (0, 1, 3))


def test_frozen_coordinator() -> None:
    with in_processes(SINGLE) as processes:
        processes[0].signal(signal.SIGSTOP)
        froze = time.time()
        when, view = agreed(processes, [1, 2, 3])
        assert view.members == (1, 2, 3)
        assert view.roster.host == 1
        assert TERMS.grace / 2 < when - froze < LONG / 4
        processes[0].signal(signal.SIGCONT)
        assert f"left out since view {view.roster.number}: it has not been heard of for" in lost(processes[0])
        assert not any(processes[one].end.poll(0.5) for one in (1, 2, 3))
