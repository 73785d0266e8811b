"""Who the coordinator is."""

from typing import TYPE_CHECKING

from lightning_hetero.comm.membership.state import State

if TYPE_CHECKING:
    from lightning_hetero.comm.membership.member import Member


class Following:
    """Chooses the coordinator that a member follows: the lowest living one, unless others already follow another.

    Two members may take themselves for the coordinator for a while. That does no harm: a view needs the
    acknowledgement of all its members, and each of them follows one coordinator only.

    Args:
        member: that follows.

    Attributes:
        leader: the coordinator.
        term: how often it has changed, as far as is known. Members turn to the one with the highest term.
    """

    def __init__(self, member: "Member") -> None:
        self._member = member
        self.leader, self.term = min(member.view.members), 0

    def choose(self) -> bool:
        """Follow the lowest living member if the coordinator is lost; whether there is one."""
        member = self._member
        while self.leader in member.gone or self.leader not in member.view.members:
            living = [*member.others, *([member.me] if member.me not in member.gone else [])]
            if not living:
                return False
            self.follow(min(living), self.term + 1)
        return True

    def consider(self, peer: int, state: State) -> None:
        """Perhaps follow the coordinator that another member names."""
        member, leader = self._member, state.leader
        if leader == self.leader:
            self.term = max(self.term, state.term)
        elif leader in member.gone:
            return
        elif peer == self.leader:  # it is not the coordinator (any more)
            self.follow(leader, max(self.term, state.term) + (leader == member.me))
        elif leader != member.me and (state.term, -leader) > (self.term, -self.leader):
            silence = member.hearing.silence(self.leader, member.around.now())
            if member.leads or (peer == leader and silence > member.hearing.grace / 2):
                self.follow(leader, state.term)

    def follow(self, leader: int, term: int) -> None:
        """Follow another coordinator, or become it."""
        member = self._member
        member.gathering.spread()  # the last news of this member, if it was the coordinator
        if (old := member.outbound.pop(self.leader, None)) is not None:
            old.close()
        self.leader, self.term, member.watching.asked = leader, term, {}
        member.gathering.begin()
        member.hearing.expect([leader], member.around.now())
        member.hurry(leader)
