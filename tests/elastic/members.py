"""Members of a job for tests: in threads of this process, or in processes of their own."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from lightning_hetero.comm.membership import Membership
from lightning_hetero.comm.membership_protocol import MembershipTerms, NextView
from lightning_hetero.errors import MembershipLostError

LONG = 30.0  # seconds for what takes no time on a machine that is not busy
TOKEN = "0123456789abcdef"
TERMS = MembershipTerms(grace=2.0, minimum=1, timeout=LONG)

_context = multiprocessing.get_context("fork")


def offer(number: int) -> list[Any]:
    return [os.getpid(), number]


class Threads:
    """All members in this process. ``called`` counts the calls of ``on_change``; ``done`` are steps of each.

    ``called_at`` says when each was first called.
    """

    def __init__(self, units: Sequence[Sequence[int]], terms: MembershipTerms = TERMS) -> None:
        ids = [member for unit in units for member in unit]
        self.called, self.done, self.called_at = dict.fromkeys(ids, 0), dict.fromkeys(ids, 0), dict[int, float]()
        self.all = {one: Membership(one, "127.0.0.1", TOKEN) for one in ids}
        addresses = {one: membership.address for one, membership in self.all.items()}
        for membership in self.all.values():
            membership.begin(addresses, LONG)
        for one, membership in self.all.items():
            hooks: dict[str, Any] = {"on_change": self._count(one), "offer": offer, "steps": self._done(one)}
            membership.begin_run()
            membership.survive(terms, 0, units, **hooks)

    def _count(self, member: int) -> Callable[[], None]:
        def count() -> None:
            self.called[member] += 1
            self.called_at.setdefault(member, time.monotonic())

        return count

    def _done(self, member: int) -> Callable[[], int]:
        return lambda: self.done[member]

    def connected(self) -> None:
        """Wait until all are connected with the coordinator."""
        first = min(self.all)
        until(lambda: len(self.all[first]._member.inbound) == len(self.all) - 1)

    def agree(self, members: Sequence[int]) -> dict[int, NextView | MembershipLostError]:
        """Results or errors of ``agree`` in some members, all at once."""
        return self.agree_later(members).results()

    def agree_later(self, members: Sequence[int], also: "Calls | None" = None) -> "Calls":
        """Like :meth:`agree`, without waiting; ``also`` are calls that were made before."""
        calls = also or Calls()
        for member in members:
            calls.make(member, lambda member=member: self.all[member].agree((member, 10 * member)))
        return calls

    def at_once(self, action: Callable[[Membership], Any]) -> None:
        """Do something in all members at the same time."""
        calls = Calls()
        for member, membership in self.all.items():
            calls.make(member, lambda membership=membership: action(membership))
        calls.results()


class Calls:
    """Calls in threads, and their results or errors."""

    def __init__(self) -> None:
        self._results: dict[int, Any] = {}
        self._threads: list[threading.Thread] = []

    def make(self, member: int, call: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                self._results[member] = call()
            except MembershipLostError as error:
                self._results[member] = error

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def results(self) -> dict[int, Any]:
        for thread in self._threads:
            thread.join(2 * LONG)
            assert not thread.is_alive()
        return self._results


@contextlib.contextmanager
def in_threads(units: Sequence[Sequence[int]], terms: MembershipTerms = TERMS) -> Iterator[Threads]:
    threads = Threads(units, terms)
    try:
        threads.connected()
        yield threads
    finally:
        for membership in threads.all.values():
            membership.close()


def until(condition: Callable[[], Any], seconds: float = LONG) -> None:
    """Wait until a condition holds; fails if it never does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come in time"
        time.sleep(0.01)


class Process:
    """A member in a process of its own, which runs ``life``."""

    def __init__(self, member: int, life: Callable, terms: MembershipTerms) -> None:
        self.member = member
        self.end, theirs = _context.Pipe()
        self.process = _context.Process(target=_live, args=(member, life, terms, theirs))
        self.process.start()
        theirs.close()

    def receive(self, seconds: float = LONG) -> Any:
        """The next message of the process."""
        assert self.end.poll(seconds), f"member {self.member} says nothing"
        return self.end.recv()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


def _live(member: int, life: Callable, terms: MembershipTerms, end: Connection) -> None:
    os.setpgid(0, 0)
    changed = threading.Event()
    hooks: dict[str, Callable[[int], Any]] = {"offer": offer}
    hooked = {"on_change": changed.set, "offer": lambda number: hooks["offer"](number), "steps": lambda: 0}
    membership = Membership(member, "127.0.0.1", TOKEN)
    end.send(membership.address)
    units, addresses = end.recv()
    membership.begin(addresses, LONG)
    membership.begin_run()
    membership.survive(terms, 0, units, **hooked)
    known = membership._member
    until(
        lambda: len(known.inbound) == len(known.others) if known.is_coordinator else known.coordinator in known.outbound
    )
    end.send("ready")
    life(membership, changed, end, hooks)
    membership.close()


def work(membership: Membership, changed: threading.Event, end: Connection, hooks: dict) -> None:
    """Wait for changes, agree, and send the result; until this member must end, or is told to."""
    views = 0
    while True:
        while not changed.wait(0.01):
            if end.poll() and end.recv() == "leave":
                membership.leave()
                end.send("left")
                return
        try:
            agreed = membership.agree((membership.me, views))
        except MembershipLostError as error:
            end.send((time.time(), error))
            return
        views += 1
        changed.clear()
        end.send((time.time(), agreed))


@contextlib.contextmanager
def in_processes(
    units: Sequence[Sequence[int]], terms: MembershipTerms = TERMS, lives: dict[int, Callable] | None = None
) -> Iterator[dict[int, Process]]:
    processes = {one: Process(one, (lives or {}).get(one, work), terms) for unit in units for one in unit}
    try:
        addresses = {one: process.receive() for one, process in processes.items()}
        for process in processes.values():
            process.end.send((units, addresses))
        assert all(process.receive() == "ready" for process in processes.values())
        yield processes
    finally:
        for process in processes.values():
            if process.process.exitcode is None:
                process.signal(signal.SIGKILL)
            process.process.join()
            process.end.close()
