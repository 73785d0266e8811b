"""Quorum rule, by which members of a view may go on without the others; and election of their coordinator."""

from collections.abc import Collection
from typing import Any, NamedTuple, Protocol

from lightning_hetero.comm.failure_detector import (
    AdaptiveTimeout,
    LostMembers,
    MemberChannel,
    MemberEnvironment,
)

Key = tuple[int, int]  # of a view: its number, and the member that proposed it


class Roster(NamedTuple):
    """The members of a view, in units.

    Attributes:
        number: of the view.
        host: id of the member that proposed it.
        units: ids of each unit's members, ascending. A unit is lost as a whole if one of its members is.
    """

    number: int
    host: int
    units: tuple[tuple[int, ...], ...]

    @property
    def key(self) -> Key:
        """Key that tells this view from all others."""
        return self.number, self.host

    @property
    def members(self) -> tuple[int, ...]:
        """Ids of all members, ascending."""
        return tuple(sorted(member for unit in self.units for member in unit))

    @classmethod
    def read(cls, value: Any) -> "Roster":
        """The roster that was written as JSON."""
        number, host, units = value
        return cls(int(number), int(host), tuple(tuple(int(member) for member in unit) for unit in units))


class QuorumDecision(NamedTuple):
    """Decision on who may go on.

    Attributes:
        units: those of which all members are present.
        lacks: why they may not go on; empty if they may.
    """

    units: tuple[tuple[int, ...], ...]
    lacks: str


def decide(
    present: Collection[int], rosters: Collection[Roster], left: Collection[int], minimum: int, unit: str = "replica"
) -> QuorumDecision:
    """Whether the members that are present may go on without the others.

    They may if they hold more than half of the units of each view, or exactly half of them with the unit of the
    lowest id. Two sets of members that have none in common cannot both do that. A unit that has left counts for
    nobody: it is not one of those of which half is needed.

    Args:
        present: members that can go on.
        rosters: the last view that was committed, and all views that were acknowledged after it.
        left: members that have left because their run was over.
        minimum: units that must remain.
        unit: what people call a unit.

    Returns:
        The units that remain, and what they lack.

    Example::

        >>> halves = [Roster(0, 0, ((0,), (1,), (2,), (3,)))]
        >>> decide({0, 1}, halves, (), 1).lacks
        ''
        >>> decide({2, 3}, halves, (), 1).lacks
        'only 2 of 4 replicas remain without rank 0; it takes more than half, or half with rank 0'
    """
    kept = tuple(one for one in min(rosters).units if set(present).issuperset(one))
    for roster in sorted(rosters):
        voters = [one for one in roster.units if not set(left).intersection(one)]
        ours = [one for one in voters if one in kept]
        if 2 * len(ours) > len(voters):
            continue
        first = min(voters, default=())
        if 2 * len(ours) == len(voters) and first in ours:
            continue
        lowest = f"rank {min(first, default=0)}"
        missing = "" if first in ours else f" without {lowest}"
        rule = f"it takes more than half, or half with {lowest}"
        return QuorumDecision(kept, f"only {len(ours)} of {len(voters)} {unit}s remain{missing}; {rule}")
    if len(kept) < minimum:
        return QuorumDecision(kept, f"only {len(kept)} {unit}s remain, and at least {minimum} are required")
    return QuorumDecision(kept, "" if kept else f"no {unit} remains")


# -- the coordinator, which proposes views ----------------------------------------------------------


class MemberState(NamedTuple):
    """State of a member, as it tells the others.

    Attributes:
        coordinator: member that it follows.
        term: how often the coordinator has changed, as far as it knows. A higher one wins.
        view: the last one that was committed.
        acked: views that it has acknowledged since.
        progress: what its training thread gave to ``agree()``; ``None`` if it has not come.
        changing: whether it wants a new view.
    """

    coordinator: int
    term: int
    view: Roster
    acked: tuple[Roster, ...]
    progress: tuple[int, ...] | None
    changing: bool

    @classmethod
    def read(cls, value: Any) -> "MemberState":
        """The state that was written as JSON."""
        coordinator, term, view, acked, progress, changing = value
        come = None if progress is None else tuple(progress)
        return cls(int(coordinator), int(term), Roster.read(view), tuple(map(Roster.read, acked)), come, bool(changing))


class VotingMember(Protocol):
    """A member, as the election sees it.

    Attributes:
        me: its id.
        view: the last one that was committed.
        changing: whether a new view is wanted.
        outbound: connections that this member has made.
        timeout: knows how long others have been silent.
        environment: its clock.
        lost: members that are lost or have left.
    """

    me: int
    view: Roster
    changing: bool
    outbound: dict[int, MemberChannel]
    lost: LostMembers
    timeout: AdaptiveTimeout
    environment: MemberEnvironment

    @property
    def others(self) -> list[int]:
        """Other members that live, as far as is known."""

    @property
    def is_coordinator(self) -> bool:
        """Whether this member is the coordinator."""

    def leave_coordinator(self) -> None:
        """This member is about to follow another coordinator."""

    def coordinator_chosen(self) -> None:
        """This member follows another coordinator, or is it itself."""


class LeaderElection:
    """Election of the coordinator: the lowest living member, unless others already follow another.

    Two members may take themselves for the coordinator for a while. That does no harm: a view needs the
    acknowledgement of all its members, and each of them follows one coordinator only.

    Args:
        member: that follows.

    Attributes:
        coordinator: the member that leads, as far as this one knows.
        term: how often it has changed, as far as is known. Members turn to the one with the highest term.
    """

    def __init__(self, member: VotingMember) -> None:
        self._member = member
        self.coordinator, self.term = min(member.view.members), 0

    def choose(self) -> bool:
        """Follow the lowest living member if the coordinator is lost; whether there is one."""
        member = self._member
        while not self._leads():
            living = [*member.others, *([member.me] if member.me not in member.lost else [])]
            if not living:
                return False
            self.follow(min(living), self.term + 1)
        return True

    def _leads(self) -> bool:
        """Whether the coordinator does its part. One that has left does, unless it ends or there is a view to make."""
        member, coordinator = self._member, self.coordinator
        stays = coordinator in member.lost.left and not member.changing and coordinator in member.outbound
        return coordinator in member.view.members and (stays or coordinator not in member.lost)

    def consider(self, peer: int, state: MemberState) -> None:
        """Perhaps follow the coordinator that another member names."""
        member, coordinator = self._member, state.coordinator
        if coordinator == self.coordinator:
            self.term = max(self.term, state.term)
        elif coordinator in member.lost:
            return
        elif peer == self.coordinator:  # it is not the coordinator (any more)
            self.follow(coordinator, max(self.term, state.term) + (coordinator == member.me))
        elif coordinator != member.me and (state.term, -coordinator) > (self.term, -self.coordinator):
            silence = member.timeout.silence(self.coordinator, member.environment.now())
            if member.is_coordinator or (peer == coordinator and silence > member.timeout.grace / 2):
                self.follow(coordinator, state.term)

    def follow(self, coordinator: int, term: int) -> None:
        """Follow another coordinator, or become it."""
        self._member.leave_coordinator()
        self.coordinator, self.term = coordinator, term
        self._member.coordinator_chosen()
