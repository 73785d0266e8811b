"""Membership: the ranks of a job know of each other's failures, and agree on a view if a fit goes on without lost ones.

====================  ==============================  ==========================================================
message               from, to                        means
====================  ==============================  ==========================================================
``state``             both ends, first of all         where I stand: coordinator, last view, what I acknowledged
``state``             member to coordinator           my training thread has come to ``agree()``
``beat``              both, several times per grace   I am alive, and have done so many steps
``report``            to the coordinator, to all      a rank has failed, or ended, or left the fit
``say``               to the coordinator, to all      a message of the wait watchdog
``news``              coordinator to all              who is lost or has left; come to ``agree()``
``propose``           coordinator to those to stay    the next view
``ack``               member to coordinator           from now on my quorum is of that view
``commit``            coordinator to those to stay    all have acknowledged: this is the view
``out``               anybody to one that must end    you have been left out, or too few remain
====================  ==============================  ==========================================================

A member is in one of five phases:

==============  =================================================================  ================================
phase           what it does                                                       ends with
==============  =================================================================  ================================
watching        exchanges reports; a lost member is a failure                      ``survive()``: *steady*
steady          judges silence, too                                                ``leave()``, an own failure:
                                                                                   *watching*; a loss, or somebody
                                                                                   asks for a new view: *changing*
changing        calls ``on_change`` until its training thread calls ``agree()``    ``agree()``: *agreeing*
agreeing        waits for the others; acknowledges what the coordinator proposes   ``commit``: *steady*; or *evicted*
evicted         must end: ``agree()`` raises                                       its process
==============  =================================================================  ================================
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_hetero.comm.failure_detector import LEFT
from lightning_hetero.comm.failure_reports import Failure, FailureReports, Kind
from lightning_hetero.comm.membership_protocol import Member, MembershipTerms, NextView
from lightning_hetero.comm.threads import close_at_exit
from lightning_hetero.comm.transport import HostPort, MessageLink, MessageTransport
from lightning_hetero.errors import MembershipLostError, not_none

_PATIENCE = 1.5  # seconds in which an error is on its way, before this process ends
_AGAIN = 1.0  # seconds after which a training thread that has not come is called again
_BUSY, _QUIET = 0.02, 0.25  # seconds between two turns of the thread
_TEXT = 300  # characters of an error's text that are sent

log = logging.getLogger("lightning_hetero")


class Membership:
    """A member's part in what all ranks know of each other.

    Every member keeps one connection to the coordinator: the lowest living member. A thread exchanges heartbeats, and
    reports of failures, which the coordinator brings in one order for all.

    After :meth:`survive`, members go on without those that are lost. The thread lets the training thread know that a
    new view is wanted: it calls ``on_change``, and :attr:`changing` becomes true. The training thread then calls
    :meth:`agree`.

    Args:
        me: id of this member.
        interface: address to listen on.
        token: the job's secret. Connections without it are closed.
        failed: called when another rank has told of its failure, or has ended. Called on the thread, as the next one.
        heard: called with each message of :meth:`tell` from another rank.
    """

    def __init__(
        self,
        me: int,
        interface: str,
        token: str,
        failed: Callable[[Failure], None] = lambda failure: None,
        heard: Callable[[dict[str, Any]], None] = lambda message: None,
    ) -> None:
        self.me, self.failed, self.heard = me, failed, heard
        self._on_change: Callable[[], None] = lambda: None
        self.offer: Callable[[int], Any] = lambda number: None
        self.steps: Callable[[], int] = int
        self._transport = MessageTransport(me, token, interface)
        self._member = Member(me, [me], self)
        self._members: tuple[int, ...] = ()
        self._thread: threading.Thread | None = None
        self._posted: deque[Callable[[], None]] = deque()
        self._turn = threading.Condition()  # notified after each turn of the thread
        self._closed = False
        self._pid = os.getpid()
        self._called = -_AGAIN
        self._last_turn = time.monotonic()
        close_at_exit(self)

    @property
    def address(self) -> HostPort:
        """Address at which this member listens."""
        return not_none(self._transport.address, "where this member listens")

    @property
    def reports(self) -> FailureReports:
        """Failures that this member knows of."""
        return self._member.reports

    @property
    def survives(self) -> bool:
        """Whether members go on without lost ones."""
        return self._member.survives

    @property
    def changing(self) -> bool:
        """Whether a new view is wanted, or this member must end."""
        return self._member.changing

    @property
    def grace(self) -> float:
        """Seconds of silence after which a member counts as lost, now."""
        return self._member.timeout.grace

    @property
    def longest(self) -> float | None:
        """The longest time between two messages of a member; ``None`` if too little was heard."""
        return self._member.timeout.longest

    def begin(self, addresses: Mapping[int, HostPort], seconds: float) -> bool:
        """Begin to take part.

        Args:
            addresses: where each member listens.
            seconds: longest wait for the coordinator.

        Returns:
            Whether it has answered.
        """
        self._transport.addresses = {
            member: (host, port) for member, (host, port) in addresses.items() if member != self.me
        }
        self._member = member = Member(self.me, sorted(addresses), self)
        self._last_turn = time.monotonic()
        self._thread = threading.Thread(target=self._serve, name="hetero-membership", daemon=True)
        self._thread.start()
        self.wait(lambda: member.met, seconds)
        return member.met

    # -- failures ----------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """A fit, a validation, a test or a prediction begins, on all members."""
        self.reports.run += 1
        self._post(self._member.begin_run)

    def announce(self, kind: Kind, how: str) -> None:
        """Let all ranks know what has happened to this one, before it ends.

        Args:
            kind: of failure.
            how: completes "rank 2 ...".
        """
        failure = Failure(self.me, kind, self.reports.run, how[:_TEXT])
        self._post(lambda: self._member.announce(failure))
        self.wait(lambda: self.reports.knows(failure), _PATIENCE)  # it comes back: all ranks have the same order
        if not self.reports.knows(failure):
            self.reports.add(failure)

    def tell(self, **message: object) -> None:
        """Send a message to all other members, or to one.

        Args:
            **message: can be written as JSON; ``to``: the member, if to one.
        """
        self._post(lambda: self._member.tell(message))

    def wait(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until a condition holds, which messages of others may bring about; not longer than this one takes part.

        Args:
            condition: is asked again and again.
            seconds: longest wait.
        """
        with self._turn:
            self._turn.wait_for(
                lambda: self._closed or self._member.evicted is not None or condition(), max(seconds, 0.0)
            )

    # -- views -------------------------------------------------------------------------------------

    def survive(
        self,
        terms: MembershipTerms,
        number: int,
        units: Sequence[Sequence[int]],
        longest: float | None = None,
        *,
        on_change: Callable[[], None],
        offer: Callable[[int], Any],
        steps: Callable[[], int],
    ) -> None:
        """Go on without lost members from now on; all members call this.

        Args:
            terms: what the user has asked for.
            number: of the view, if others came before that this membership does not know.
            units: ids of each unit's members. A unit is lost as a whole if one of its members is.
            longest: what :attr:`longest` was before, to learn from where the grace is learned.
            on_change: called by the thread when the training thread must come to :meth:`agree`; again each second
                until it has come.
            offer: called on the coordinator, by its thread, with the number of a new view; returns what its members
                need to meet, as JSON has it. It must return soon.
            steps: called by the thread, for how many steps this member has done; the others hear of it in its
                heartbeats.
        """
        member = self._member
        self._on_change, self.offer, self.steps = on_change, offer, steps
        self._members = member.view.members
        self._post(lambda: member.survive(terms, number, units, longest))
        self.wait(lambda: member.survives, _PATIENCE)

    def leave(self) -> None:
        """Go on without lost members no more: a lost one is a failure. Who still does must do without this one."""
        self.announce("left", LEFT)

    def agree(self, progress: tuple[int, ...]) -> NextView:
        """Agree with all living members on a new view; asks them to come, and waits until they have.

        Args:
            progress: how far this member has come; the others learn it.

        Raises:
            MembershipLostError: this member must end: it was left out, a member of its unit is lost, or too few
                remain.
        """
        member = self._member
        before, until = member.agreed, time.monotonic() + member.terms.timeout + 4 * member.timeout.grace + 10.0
        while (agreed := self._next(member, progress, before, until)) is not None:
            if not member.changing or time.monotonic() > until:
                return self._result(agreed)
            before = agreed  # somebody else has been lost meanwhile
        raise MembershipLostError(f"Rank {self.me} cannot go on: {member.evicted}")

    def _next(
        self, member: Member, progress: tuple[int, ...], before: NextView | None, until: float
    ) -> NextView | None:
        """The view after another one; ``None`` if this member must end."""
        self._post(lambda: member.arrive(progress))
        self.wait(lambda: member.agreed is not before, until - time.monotonic())
        if member.evicted is None and member.agreed is before:
            member.evict("it was closed." if self._closed else "the members have not agreed in time.")
        return None if member.evicted is not None else member.agreed

    def _result(self, agreed: NextView) -> NextView:
        """The view, with those that were lost since the one of which the training thread knows."""
        lost = sorted(set(self._members).difference(agreed.members))
        self._members = agreed.members
        return agreed._replace(lost={one: agreed.lost.get(one, "was not among those that went on") for one in lost})

    def close(self) -> None:
        """End the thread and close all connections; idempotent."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self._transport.wake()
        if self._thread is None:
            self._transport.close()
        elif self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)

    # -- what the member's part needs --------------------------------------------------------------

    def now(self) -> float:
        """Seconds, on a clock that never goes back."""
        return time.monotonic()

    def connect(self, peer: int) -> MessageLink:
        """Begin to connect to a member."""
        return self._transport.connect(peer)

    def busy(self) -> float:
        """Number of processes for each core of this machine, at least 1; in the last minute."""
        return max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0)

    # -- the thread --------------------------------------------------------------------------------

    def _post(self, action: Callable[[], None]) -> None:
        self._posted.append(action)
        self._transport.wake()

    def _serve(self) -> None:
        member = self._member
        try:
            while not self._closed:
                self._take_turn(member)
                with self._turn:
                    self._turn.notify_all()
        except Exception as error:
            member.evict(f"its membership thread has failed with {type(error).__name__}: {error}.")
            self._call(member)
            raise
        finally:
            self._transport.close()
            with self._turn:
                self._turn.notify_all()

    def _take_turn(self, member: Member) -> None:
        busy = member.changing or not member.connected
        pause = _BUSY if busy else min(member.timeout.beat / 4, _QUIET)
        happened = self._transport.poll(pause)
        before, self._last_turn = self._last_turn, time.monotonic()
        if self._last_turn - before - pause > member.timeout.lapse:
            member.restart()  # this process was stopped, or another thread held Python's lock
        while self._posted:
            self._posted.popleft()()
        for what, link, message in happened:
            if link.dropped:
                continue
            if what == "opened":
                member.opened(link)
            elif what == "message":
                try:
                    member.received(link, message)
                except (KeyError, TypeError, ValueError, AttributeError):
                    self._transport.end(link)
            else:
                member.closed(link, refused=what == "refused", unreachable=link.connecting)
        member.tick()
        self._call(member)

    def _call(self, member: Member) -> None:
        """Let the training thread know that it must come."""
        wanted = member.changing and member.progress is None
        if wanted and time.monotonic() - self._called > _AGAIN:
            self._called = time.monotonic()
            try:
                self._on_change()
            except Exception:
                log.exception("The training thread could not be called; that is tried again.")
        elif not member.changing:
            self._called = -_AGAIN
