"""Who does not take part any more, and why."""

from collections.abc import Iterable
from typing import Any

from lightning_hetero.comm.membership.state import Loss

LEFT = "has left: its run was over"


class Casualties:
    """Members that are lost, and those that have left because their run was over.

    Args:
        me: this member.
    """

    def __init__(self, me: int) -> None:
        self._me = me
        self._lost: dict[int, Loss] = {}
        self.left: set[int] = set()

    def __contains__(self, member: int) -> bool:
        return member in self._lost or member in self.left

    @property
    def reasons(self) -> dict[int, str]:
        """Why members do not take part any more."""
        return {**{member: loss.why for member, loss in self._lost.items()}, **dict.fromkeys(self.left, LEFT)}

    def lose(self, member: int, why: str, final: bool) -> bool:
        """Count a member as lost; whether that is new."""
        if member in self.left or (member in self._lost and (self._lost[member].final or not final)):
            return False
        self._lost[member] = Loss(why, final)
        return True

    def leaves(self, member: int) -> bool:
        """Count a member as one that has left; whether that is new."""
        if member in self.left or member == self._me:
            return False
        self.left.add(member)
        self._lost.pop(member, None)
        return True

    def returns(self, member: int) -> bool:
        """A member has been heard; whether it counted as lost and does not any more."""
        return member in self._lost and not self._lost[member].final and bool(self._lost.pop(member))

    def take_back(self, members: Iterable[int]) -> None:
        """Members take part in a new view, whatever was decided before."""
        for member in members:
            if member in self._lost and self._lost[member].final:
                del self._lost[member]

    def written(self) -> list[Any]:
        """As JSON has it, for the others."""
        return [list(self._lost.items()), sorted(self.left)]

    def read(self, value: Any) -> None:
        """Take over what the coordinator knows. It may have heard members that seemed to be lost here."""
        lost, left = value
        for member in left:
            self.leaves(member)
        final = {member: loss for member, loss in self._lost.items() if loss.final}
        told = {member: Loss(*loss) for member, loss in lost if member != self._me and member not in self.left}
        self._lost = {**told, **final}
