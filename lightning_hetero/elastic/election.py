"""Election of the coordinator, which proposes views: the lowest living member."""

from typing import Any, NamedTuple, Protocol

from lightning_hetero.elastic.failure_detector import AdaptiveTimeout, LostMembers, MemberEnvironment
from lightning_hetero.elastic.quorum import Roster


class MemberState(NamedTuple):
    """State of a member, as it tells the others.

    Attributes:
        leader: member that it follows.
        term: how often the leader has changed, as far as it knows. A higher one wins.
        view: the last one that was committed.
        acked: views that it has acknowledged since.
        progress: what its training thread gave to ``agree()``; ``None`` if it has not come.
        changing: whether it wants a new view.
    """

    leader: int
    term: int
    view: Roster
    acked: tuple[Roster, ...]
    progress: tuple[int, ...] | None
    changing: bool

    @classmethod
    def read(cls, value: Any) -> "MemberState":
        """The state that was written as JSON."""
        leader, term, view, acked, progress, changing = value
        come = None if progress is None else tuple(progress)
        return cls(int(leader), int(term), Roster.read(view), tuple(map(Roster.read, acked)), come, bool(changing))


class VotingMember(Protocol):
    """A member, as the election sees it.

    Attributes:
        me: its id.
        view: the last one that was committed.
        timeout: knows how long others have been silent.
        environment: its clock.
        lost: members that are lost or have left.
    """

    me: int
    view: Roster
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
        leader: the coordinator.
        term: how often it has changed, as far as is known. Members turn to the one with the highest term.
    """

    def __init__(self, member: VotingMember) -> None:
        self._member = member
        self.leader, self.term = min(member.view.members), 0

    def choose(self) -> bool:
        """Follow the lowest living member if the coordinator is lost; whether there is one."""
        member = self._member
        while self.leader in member.lost or self.leader not in member.view.members:
            living = [*member.others, *([member.me] if member.me not in member.lost else [])]
            if not living:
                return False
            self.follow(min(living), self.term + 1)
        return True

    def consider(self, peer: int, state: MemberState) -> None:
        """Perhaps follow the coordinator that another member names."""
        member, leader = self._member, state.leader
        if leader == self.leader:
            self.term = max(self.term, state.term)
        elif leader in member.lost:
            return
        elif peer == self.leader:  # it is not the coordinator (any more)
            self.follow(leader, max(self.term, state.term) + (leader == member.me))
        elif leader != member.me and (state.term, -leader) > (self.term, -self.leader):
            silence = member.timeout.silence(self.leader, member.environment.now())
            if member.is_coordinator or (peer == leader and silence > member.timeout.grace / 2):
                self.follow(leader, state.term)

    def follow(self, leader: int, term: int) -> None:
        """Follow another coordinator, or become it."""
        self._member.leave_coordinator()
        self.leader, self.term = leader, term
        self._member.coordinator_chosen()
