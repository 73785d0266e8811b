"""Ranks that die, stop or leave while others exchange with the center; and the files that are left."""

import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from homes import HOMES, LIMIT, WORLD, layout_of
from leftovers import nothing_left_in_memory
from ranks import attempt, run

from lightning_hetero.comm.centers.base import Center
from lightning_hetero.comm.threads import abort_sockets
from lightning_hetero.errors import CommunicationError

LEADERS = [[1], [0], [2]]  # the center lives with rank 1, the store of the process groups with rank 0
SHORT, SLACK = 2.0, 8.0  # seconds


@pytest.fixture(autouse=True)
def _no_new_files() -> Iterator[None]:
    with nothing_left_in_memory():
        yield


def begun(home: str, replicas: list[list[int]] = LEADERS, limit: timedelta = LIMIT) -> Center:
    dist.init_process_group("gloo", timeout=LIMIT)
    center = HOMES[home](layout_of(replicas, limit))
    center.open([torch.zeros(10_000)])
    dist.barrier()
    return center


def go(center: Center, push: float = 0.25) -> list[int]:
    return center.push_pull([torch.ones(10_000)], push).counts


def until_error(center: Center) -> tuple[str, float]:
    """Message of the error, and seconds of the exchange that raised it."""
    end = time.monotonic() + 30
    while (began := time.monotonic()) < end:
        try:
            go(center)
        except CommunicationError as error:
            return str(error), time.monotonic() - began
    return "none", math.inf


def after_all(survivors: int, folder: Path) -> None:
    """Wait until all survivors have got their errors: otherwise the first to close its center would be named."""
    (folder / str(dist.get_rank())).touch()
    end = time.monotonic() + 60
    while len(list(folder.iterdir())) < survivors and time.monotonic() < end:
        time.sleep(0.01)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# -- the host dies -------------------------------------------------------------------------------------------


def _host_dies(home: str, host: int, folder: Path) -> tuple[str, float]:
    order = [host, *(rank for rank in range(WORLD) if rank != host)]
    center = begun(home, [[rank] for rank in order], timedelta(seconds=5))
    if dist.get_rank() == host:
        threading.Timer(0.2, die).start()  # in the middle of exchanges
        while True:
            go(center)
    found = until_error(center)
    after_all(WORLD - 1, folder)
    center.close()
    return found


@pytest.mark.long(after=1)
@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("home", ["shared", "hogwild", "thread", "bf16", "turns"])
def test_the_hosts_death_is_an_error_of_all_others_that_names_it(home: str, host: int, tmp_path: Path) -> None:
    outcomes = attempt(_host_dies, WORLD, home, host, tmp_path)
    for rank, outcome in enumerate(outcomes):
        if rank == host:
            assert outcome.exitcode == -signal.SIGKILL
            continue
        assert outcome.value, outcome.trace
        message, seconds = outcome.value
        assert re.search(rf"\brank {host}\b", message), message
        assert seconds < 5 + SLACK


# -- a client dies or stops ---------------------------------------------------------------------------------


def _client_dies(home: str, holding: bool, folder: Path) -> tuple[str, float]:
    """Message of the others' error (or ``"none"``), and seconds of their longest exchange."""
    at_once = home in ("shared", "hogwild")  # at once, without waiting for the timeout
    center = begun(home, limit=timedelta(seconds=10 if at_once else SHORT))
    if dist.get_rank() == 2:
        go(center)
        if holding:
            with center._held():
                die()
        die()
    message, longest, end = "none", 0.0, time.monotonic() + (1.5 if home == "thread" else 15)
    while message == "none" and (began := time.monotonic()) < end:
        try:
            go(center)
        except CommunicationError as error:
            message = str(error)
        longest = max(longest, time.monotonic() - began)
    after_all(WORLD - 1, folder)
    center.close()
    return message, longest


@pytest.mark.parametrize(
    ("home", "holding"), [("shared", False), ("shared", True), ("hogwild", False), ("thread", False), ("turns", False)]
)
def test_a_dead_client_keeps_nobody_waiting(home: str, holding: bool, tmp_path: Path) -> None:
    outcomes = attempt(_client_dies, WORLD, home, holding, tmp_path)
    assert outcomes[2].exitcode == -signal.SIGKILL
    for outcome in outcomes[:2]:
        assert outcome.value, outcome.trace
        message, longest = outcome.value
        assert longest < 8  # the timeout, if at all
        if home in ("shared", "hogwild"):
            assert "rank 2 has ended" in message
        if home == "turns":
            assert message != "none"


def _stops(home: str, stopped: int, holding: bool, tries: Callable[[Center], Any]) -> Any:
    """Result of ``tries`` on the other ranks while one is stopped; then it goes on, and all can exchange again."""
    center = begun(home, limit=timedelta(seconds=SHORT))
    rank, processes = dist.get_rank(), [None] * WORLD
    dist.all_gather_object(processes, os.getpid())
    if rank == stopped:
        if holding:
            with center._held():
                os.kill(os.getpid(), signal.SIGSTOP)
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
        found = None
    else:
        try:
            while Path(f"/proc/{processes[stopped]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.01)
            found = tries(center)
        finally:
            store = dist.distributed_c10d._get_default_store()
            if store.add("done", 1) == WORLD - 1:
                os.kill(processes[stopped], signal.SIGCONT)
    if home in ("shared", "hogwild"):
        dist.barrier()
        go(center)
        dist.barrier()
        found = found, go(center)
        dist.barrier()
    center.close()
    return found


def test_a_lock_that_a_stopped_rank_holds_is_an_error_after_the_timeout() -> None:
    for rank, (found, counts) in enumerate(run(_stops, WORLD, "shared", 2, True, until_error)):
        if rank != 2:
            message, seconds = found
            assert "has stopped" in message
            assert SHORT <= seconds < SHORT + SLACK
        assert len(counts) == WORLD


def ten(center: Center) -> list[int]:
    for _ in range(10):
        counts = go(center)
    return counts


@pytest.mark.parametrize(("home", "stopped"), [("shared", 1), ("hogwild", 1), ("shared", 2)])
def test_a_stopped_rank_that_holds_nothing_stops_nobody(home: str, stopped: int) -> None:
    for rank, (found, _) in enumerate(run(_stops, WORLD, home, stopped, False, ten)):
        assert rank == stopped or sum(found) >= 10


@pytest.mark.parametrize("home", ["thread", "bf16"])
def test_a_stopped_host_of_a_thread_is_an_error_after_the_timeout(home: str) -> None:
    outcomes = attempt(_stops, WORLD, home, 1, False, until_error)
    for rank in (0, 2):
        assert outcomes[rank].value, outcomes[rank].trace
        message, seconds = outcomes[rank].value
        assert "lives with rank 1" in message
        assert seconds < SHORT + SLACK


def _late() -> tuple[str, float]:
    center = begun("turns", limit=timedelta(seconds=1))
    if dist.get_rank() == 0:
        time.sleep(3)
        return "", 0.0
    found = until_error(center)
    center.close()
    return found


def test_whoever_does_not_come_when_it_is_its_turn_is_named_by_the_host() -> None:
    _, (host, waited), (other, also) = run(_late, WORLD)
    assert "rank 0 was next, and did not come" in host
    assert "lives with rank 1" in other
    assert max(waited, also) < SHORT + SLACK


# -- ranks that are to agree on who remains --------------------------------------------------------------------


def waits_for_its_turn() -> tuple[str, float]:
    """The host has had its turn, and no other rank comes; another rank was lost meanwhile."""
    center = begun("turns", LEADERS)
    if dist.get_rank() != 1:
        time.sleep(3.0)
        return "", 0.0
    go(center)
    threading.Timer(0.5, abort_sockets).start()
    return until_error(center)


def test_a_host_that_waits_for_its_turn_hears_that_connections_are_aborted() -> None:
    text, seconds = run(waits_for_its_turn, WORLD)[1]
    assert "cannot keep the center any longer" in text
    assert seconds < 2.5  # before the others end
