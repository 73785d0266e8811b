"""Failure detection: how long a member may be silent before it counts as lost, and which ones are.

Who judges whom is in :class:`~lightning_hetero.comm.membership_protocol.FailureDetector`.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

BEAT = 2.0  # seconds between heartbeats, unless a smaller grace needs them more often
_OFTEN, _MANY = 1.0, 64  # seconds between heartbeats while the grace is learned; of so many members, more for more
_FIRST, _LEAST, _MOST = 10.0, 1.5, 60.0  # seconds: grace before it is learned, what it adds to a beat, and its limit
_TIMES = 5  # so often the longest delay of a heartbeat counts, to be on the safe side
_ENOUGH, _LISTENED = 8, 8.0  # gaps to learn from, and seconds in which they were heard
_PERIODS, _PERIOD = 10, 60.0  # for how many periods a long gap is remembered, and the seconds of one


class AdaptiveTimeout:
    """Timeout that adapts to the gaps between a member's messages.

    What is learned is how late a heartbeat of the last ten minutes was at most, over all members: what keeps one of
    them busy may well happen to another one. Where processes wait for a core, a silence means less; members tell each
    other of that.

    Args:
        grace: seconds of silence after which a member counts as lost; ``None``: learned.
        members: how many there are.
        before: the longest gap that was heard earlier, in another view, in seconds; ``None``: nothing is known.
    """

    def __init__(self, grace: float | None, members: int = 2, before: float | None = None) -> None:
        self._given, self._members = grace, members
        self._last: dict[int, float] = {}
        self._periods: deque[tuple[float, float]] = deque(maxlen=_PERIODS)  # when they began, and their longest gaps
        self.before = before
        self._gaps, self._since = 0, float("inf")
        self._latest = -float("inf")
        self._busy: dict[int, float] = {}

    @property
    def beat(self) -> float:
        """Seconds between heartbeats."""
        if self._given is None:
            return min(BEAT, _OFTEN * max(1.0, self._members / _MANY))
        return min(BEAT, self._given / 4)

    @property
    def lapse(self) -> float:
        """Seconds for which this process may stand still itself before it judges nobody by them."""
        return self.beat if self._given is not None else self.grace / 4

    @property
    def longest(self) -> float | None:
        """The longest gap that is remembered; ``None`` if there were too few."""
        if self._gaps < _ENOUGH or self._latest - self._since < _LISTENED:
            return self.before
        gaps = [gap for _, gap in list(self._periods)]  # a copy: other threads ask, too
        return max(gaps if self.before is None else [*gaps, self.before])

    @property
    def grace(self) -> float:
        """Seconds of silence after which a member counts as lost."""
        if self._given is not None:
            return self._given
        if (longest := self.longest) is None:
            return _FIRST
        patience = max(_TIMES * (longest - self.beat), _LEAST)
        return min((self.beat + patience) * max([1.0, *self._busy.values()]), _MOST)

    def busy(self, member: int, processes: float) -> None:
        """A member tells how many processes there are for each core of its machine; two are nothing special."""
        self._busy[member] = processes / 2

    def connected(self, member: int, now: float) -> None:
        """A member is heard on a new connection: it need not have said anything before."""
        self._last[member] = now

    def message_came(self, member: int, now: float) -> None:
        """A message has come from a member."""
        if member in self._last and self._last[member] < now:
            self._learn(now - self._last[member], now)
        self._last[member] = now

    def _learn(self, gap: float, now: float) -> None:
        self._gaps, self._since, self._latest = self._gaps + 1, min(self._since, now), now
        if not self._periods or now - self._periods[-1][0] >= _PERIOD:
            if len(self._periods) == _PERIODS:
                self.before = None  # it is long ago
            self._periods.append((now, gap))
        elif gap > self._periods[-1][1]:
            self._periods[-1] = self._periods[-1][0], gap

    def expect(self, members: Iterable[int], at: float) -> None:
        """Judge the silence of members from a time on, unless they have been heard later."""
        for member in members:
            self._last[member] = max(self._last.get(member, at), at)

    def silence(self, member: int, now: float) -> float:
        """Seconds since a member was last heard."""
        return now - self._last.setdefault(member, now)

    def restart(self, now: float) -> None:
        """Begin again for all: this process itself did not run for a while."""
        self._last = {member: max(now, last) for member, last in self._last.items()}


class LossReason(NamedTuple):
    """Reason why a member counts as lost.

    Attributes:
        why: completes "rank 3 ...".
        final: whether it stays lost even if it is heard again.
    """

    why: str
    final: bool


LEFT = "has left: its run was over"


class LostMembers:
    """Lost members, and those that have left because their run was over.

    Args:
        me: this member.
    """

    def __init__(self, me: int) -> None:
        self._me = me
        self._lost: dict[int, LossReason] = {}
        self.left: set[int] = set()

    def __contains__(self, member: int) -> bool:
        return member in self._lost or member in self.left

    @property
    def reasons(self) -> dict[int, str]:
        """Reasons why members do not take part any more."""
        return {**{member: loss.why for member, loss in self._lost.items()}, **dict.fromkeys(self.left, LEFT)}

    def lose(self, member: int, why: str, final: bool) -> bool:
        """Count a member as lost; whether that is new."""
        if member in self.left or (member in self._lost and (self._lost[member].final or not final)):
            return False
        self._lost[member] = LossReason(why, final)
        return True

    def mark_left(self, member: int) -> bool:
        """Count a member as one that has left; whether that is new."""
        if member in self.left or member == self._me:
            return False
        self.left.add(member)
        self._lost.pop(member, None)
        return True

    def mark_alive(self, member: int) -> bool:
        """A member has been heard; whether it counted as lost and does not any more."""
        return member in self._lost and not self._lost[member].final and bool(self._lost.pop(member))

    def begin_again(self) -> None:
        """A fit has ended, on this member: those whose processes live are not lost any more."""
        self.left = set()
        self._lost = {member: loss for member, loss in self._lost.items() if not loss.final}

    def readmit(self, members: Iterable[int]) -> None:
        """Members take part in a new view: final losses are forgotten; a silent member counts until it is heard."""
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
            self.mark_left(member)
        final = {member: loss for member, loss in self._lost.items() if loss.final}
        told = {member: LossReason(*loss) for member, loss in lost if member != self._me and member not in self.left}
        self._lost = {**told, **final}
