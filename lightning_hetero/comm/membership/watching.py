"""Notices who is silent."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_hetero.comm.membership.member import Member


class Watching:
    """Judges the silence of others: the coordinator that of all members, a member that of the coordinator.

    If the coordinator is silent, members ask others whether they are alive before they give it up. So all that are on
    the other side of a broken network are known at once.

    Args:
        member: that watches.

    Attributes:
        asked: members that were asked and have not answered yet, and since when.
    """

    def __init__(self, member: "Member") -> None:
        self._member = member
        self.asked: dict[int, float] = {}

    def heard(self, other: int) -> None:
        """A member has answered, or is not waited for any more."""
        self.asked.pop(other, None)

    def tick(self) -> None:
        """Some time has passed."""
        member = self._member
        now, grace = member.around.now(), member.hearing.grace
        for other in member.others if member.leads else [member.leader]:
            silence = member.hearing.silence(other, now)
            if silence > grace:
                asked = {} if member.leads else dict(self.asked)
                member.lose(other, f"has not been heard of for {silence:.1f} s")
                for silent, since in asked.items():
                    if now - since > 0.4 * grace:
                        member.lose(silent, f"has not been heard of for {now - since:.1f} s")
            elif silence > grace / 2 and not member.leads:
                self._ask(now)

    def _ask(self, now: float) -> None:
        """Ask those that would be the coordinator before this member; and all, if it is the next one itself."""
        member = self._member
        others = [other for other in member.others if other != member.leader]
        next_in_line = all(other > member.me for other in others)
        for other in others:
            if next_in_line or other < member.me:
                self.asked.setdefault(other, now)
