"""Requests to join a job: those of processes that have gone, those that come late, those for another job."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from lightning_hetero.comm import join_requests, threads, transport
from lightning_hetero.comm.join_requests import (
    Admission,
    JobGoneError,
    JoinRequests,
    is_other_job,
    job_answers,
    request_to_join,
)
from lightning_hetero.comm.transport import MessageLink, MessageTransport
from lightning_hetero.errors import JoinRefusedError

LIMIT = timedelta(seconds=20)


@pytest.fixture
def requests() -> Iterator[JoinRequests]:
    made = JoinRequests("127.0.0.1", lambda compatibility: compatibility.get("problem"))
    yield made
    made.close()


class Asks(threading.Thread):
    """A process that asks to join, in a thread."""

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


def test_nodes_come_in_as_a_whole_in_the_order_of_their_ranks(requests: JoinRequests) -> None:
    requests.whole_nodes, seats = True, [("b", 1, 2), ("a", 1, 2), ("c", 0, 1), ("b", 0, 2)]
    others = {seat[:2]: Asks(requests.address, {"seat": seat}) for seat in seats}
    for number, other in enumerate(others.values(), start=1):
        other.start()
        _until(lambda number=number: requests._requests == number)
    _until(lambda: requests.waiting == 3)
    assert requests.invite(2) == [4, 1]  # the other rank of "a" has not come
    requests.admit([4, 1], view=1, before=2, store=["host", 1])
    for place in (0, 1):
        others["b", place].join(20)
        assert others["b", place].outcome == Admission(1, 2 + place, 4, 2, ["host", 1])
    assert requests.waiting == 1


def test_who_waits_for_the_rest_of_its_node_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(join_requests, "rank_zero_info", messages.append)
    requests = JoinRequests("127.0.0.1", lambda _: None, limit=0.5)
    requests.whole_nodes = True
    with pytest.raises(JoinRefusedError, match=r"joins with all of its 2 ranks.*within 0.5 s"):
        request_to_join(requests.address, {"seat": ("a", 0, 2)}, LIMIT, lambda: None)
    requests.close()
    assert "A rank of a was refused" in messages[0]


def test_where_the_job_goes_on_without_its_first_rank_those_that_wait_ask_the_next_one(requests: JoinRequests) -> None:
    other = Asks(requests.address)
    other.start()
    _until(lambda: requests.waiting == 1)
    requests.close(over=False)
    other.join(20)
    assert isinstance(other.outcome, JobGoneError)


def test_requests_are_taken_after_the_connections_of_a_view_were_broken(requests: JoinRequests) -> None:
    threads.abort_sockets()  # a rank was lost
    time.sleep(0.5)  # time for the thread to notice, if it did
    Asks(requests.address).start()
    _until(lambda: requests.waiting == 1)


def test_who_does_not_fit_is_told_why(requests: JoinRequests) -> None:
    with pytest.raises(JoinRefusedError, match="does not let this process in: too small"):
        request_to_join(requests.address, {"problem": "too small"}, LIMIT, lambda: None)
    assert requests.waiting == 0


def test_the_seat_of_another_version_is_not_read(requests: JoinRequests) -> None:
    """It is refused for its version, and those that come after it are heard."""
    seat = ["node", 0, 1, "what a later version adds"]
    with pytest.raises(JoinRefusedError, match="does not let this process in: another version"):
        request_to_join(requests.address, {"problem": "another version", "seat": seat}, LIMIT, lambda: None)
    Asks(requests.address).start()
    _until(lambda: requests.waiting == 1)


def _silent(requests: JoinRequests) -> tuple[MessageTransport, MessageLink]:
    """A process that asks, and then sends nothing."""
    wire, link = join_requests._reached(requests.address)
    link.send({"compatibility": {}})
    return wire, link


def test_who_does_not_answer_is_not_waited_for_twice(requests: JoinRequests, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that asks and freezes is left out when the others join."""
    monkeypatch.setattr(join_requests, "_READY", 0.5)
    wire, _ = _silent(requests)
    _until(lambda: requests.waiting == 1)
    alive = Asks(requests.address)
    alive.start()
    _until(lambda: requests.waiting == 2)
    assert requests.invite() == [2]
    assert requests.waiting == 0
    requests.admit([2], 1, 1, ["host", 1])
    alive.join(20)
    assert alive.outcome == Admission(1, 1, 2, 1, ["host", 1])
    messages: list[dict[str, Any]] = []
    _until(lambda: messages.extend(message for *_, message in wire.poll(0.1)) or {"again": True} in messages)
    wire.close()


@pytest.mark.parametrize("ends", [False, True])
def test_who_is_silent_or_ends_does_not_wait_any_more(
    requests: JoinRequests, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    monkeypatch.setattr(join_requests, "_GONE", 60.0 if ends else 0.5)
    wire, _ = _silent(requests)
    if ends:
        _until(lambda: requests.waiting == 1)
        wire.close()
    _until(lambda: requests._requests == 1 and requests.waiting == 0)
    wire.close()


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
    """The first rank freezes: its connections stay open."""
    monkeypatch.setattr(join_requests, "_SILENT", 1.0)
    frozen = threading.Event()
    monkeypatch.setattr(requests, "_incompatibility", lambda _: frozen.wait(20) or None)
    with pytest.raises(JobGoneError, match="silent for 1 s"):
        request_to_join(requests.address, {}, LIMIT, lambda: None)
    frozen.set()


def test_a_job_that_ends_is_given_up_at_once(requests: JoinRequests) -> None:
    other = Asks(requests.address)
    other.start()
    _until(lambda: requests.waiting == 1)
    requests._closed = True  # as if its process had been killed: no answer
    other.join(10)
    assert isinstance(other.outcome, JobGoneError)


def test_what_is_no_job_is_not_taken_for_one() -> None:
    """Another program listens at the address of a job that has ended."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"220 mail.example.com ESMTP\r\n")
                connection.recv(100)

        threading.Thread(target=greet, daemon=True).start()
        assert not is_other_job([*server.getsockname(), "0" * 32])


def test_a_job_that_is_busy_for_a_while_is_no_other_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process accepts connections, as the kernel does that for it, and answers late."""
    monkeypatch.setattr(transport, "HURRY", 0.2)
    made = JoinRequests("127.0.0.1", lambda _: None)
    poll, busy_until = made._transport.poll, time.monotonic() + 1.0

    def late(seconds: float) -> Any:
        time.sleep(max(busy_until - time.monotonic(), 0.0))
        return poll(seconds)

    monkeypatch.setattr(made._transport, "poll", late)
    assert job_answers(made.address)
    monkeypatch.setattr(join_requests, "_CONNECTED", 0.5)
    busy_until = time.monotonic() + 2.0
    time.sleep(0.5)  # until it is busy again
    assert not job_answers(made.address)
    assert not is_other_job(made.address)
    made.close()
