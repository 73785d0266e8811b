"""How a job takes requests to join: those that have gone, come late, or are for another job."""

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from lightning_hetero.comm import threads
from lightning_hetero.elastic import join_requests
from lightning_hetero.elastic.join_requests import (
    Admission,
    JobGoneError,
    JoinRequests,
    is_other_job,
    job_answers,
    request_to_join,
)
from lightning_hetero.errors import JoinRefusedError

LIMIT = timedelta(seconds=20)


@pytest.fixture
def requests() -> Iterator[JoinRequests]:
    made = JoinRequests("127.0.0.1", LIMIT, lambda compatibility: compatibility.get("problem"))
    yield made
    made.close()


class Asks(threading.Thread):
    """A process that asks, on a thread."""

    def __init__(self, address: Any, compatibility: dict[str, Any] | None = None) -> None:
        super().__init__(daemon=True)
        self.address, self.compatibility = address, compatibility or {}
        self.outcome: Any = None

    def run(self) -> None:
        try:
            self.outcome = request_to_join(self.address, self.compatibility, LIMIT, lambda: None)
        except Exception as error:
            self.outcome = error


def _until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_places_follow_those_that_are_there(requests: JoinRequests) -> None:
    others = [Asks(requests.address) for _ in range(3)]
    for other in others:
        other.start()
    _until(lambda: requests.waiting == 3)
    come = requests.invite(2)  # the third one must wait for the next time
    assert len(come) == 2
    assert requests.waiting == 1
    requests.admit(come, view=4, before=5, store=["host", 1])
    for other in others:
        other.join(20 if requests.waiting == 0 else 1)
    admitted = [other.outcome for other in others if other.outcome is not None]
    assert sorted(admitted) == [Admission(4, 5, 7, 5, ["host", 1]), Admission(4, 6, 7, 5, ["host", 1])]
    requests.close()
    for other in others:
        other.join(20)
    assert [str(one) for one in (other.outcome for other in others) if isinstance(one, JoinRefusedError)] == [
        "the job does not let this process in: it has come to its end"
    ]


def test_where_the_job_goes_on_without_its_first_rank_those_that_wait_ask_the_next_one(requests: JoinRequests) -> None:
    other = Asks(requests.address)
    other.start()
    _until(lambda: requests.waiting == 1)
    requests.close(over=False)
    other.join(20)
    assert isinstance(other.outcome, JobGoneError)


def test_requests_are_taken_after_the_connections_of_a_view_were_broken(requests: JoinRequests) -> None:
    threads.abort_sockets()  # a rank was lost
    time.sleep(0.5)  # for the thread to notice, if it would
    Asks(requests.address).start()
    _until(lambda: requests.waiting == 1)


def test_who_does_not_fit_is_told_why(requests: JoinRequests) -> None:
    with pytest.raises(JoinRefusedError, match="does not let this process in: too small"):
        request_to_join(requests.address, {"problem": "too small"}, LIMIT, lambda: None)
    assert requests.waiting == 0


def test_who_has_gone_is_not_waited_for_twice(requests: JoinRequests, monkeypatch: pytest.MonkeyPatch) -> None:
    """One asks and dies: it is left out when the others come, and forgotten."""
    monkeypatch.setattr(join_requests, "_READY", 0.5)
    store = join_requests._reached(requests.address)
    store.set("1/compatibility", "{}")
    store.add("1/alive", 1)
    assert store.add("requests", 1) == 1
    alive = Asks(requests.address)
    alive.start()
    _until(lambda: requests.waiting == 2)
    assert requests.invite() == [2]
    assert requests.waiting == 0
    requests.admit([2], 1, 1, ["host", 1])
    alive.join(20)
    assert alive.outcome == Admission(1, 1, 2, 1, ["host", 1])
    assert store.get("1/answer") == b'{"again": true}'


def test_who_is_silent_does_not_wait_any_more(requests: JoinRequests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_requests, "_GONE", 0.5)
    store = join_requests._reached(requests.address)
    store.add("1/alive", 1)
    store.set("1/compatibility", "{}")
    _until(lambda: requests.waiting == 1)
    _until(lambda: requests.waiting == 0)


def test_another_secret_is_another_job(requests: JoinRequests) -> None:
    host, port, _ = requests.address
    assert job_answers(requests.address)
    assert not job_answers([host, port, "0" * 32])
    assert is_other_job([host, port, "0" * 32])
    assert not is_other_job(requests.address)
    assert not is_other_job([host, 1, "0" * 32])  # nobody is there
    with pytest.raises(JobGoneError, match="another job answers"):
        request_to_join([host, port, "0" * 32], {}, LIMIT, lambda: None)


def test_a_job_that_falls_silent_is_given_up(requests: JoinRequests, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen first rank: its store may answer, but nothing counts up any more."""
    monkeypatch.setattr(join_requests, "_SILENT", 1.0)
    requests._closed.set()
    requests._thread.join()
    with pytest.raises(JobGoneError, match="silent for 1 s"):
        request_to_join(requests.address, {}, LIMIT, lambda: None)
