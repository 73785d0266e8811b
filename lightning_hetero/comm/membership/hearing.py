"""When other members were last heard, and how long a silence is normal."""

from collections import deque
from collections.abc import Iterable

BEAT = 2.0  # seconds between heartbeats, unless a smaller grace needs them more often
_OFTEN, _MANY = 1.0, 64  # seconds between heartbeats while the grace is learned; of so many members, more for more
_FIRST, _LEAST, _MOST = 10.0, 1.5, 60.0  # seconds: grace before it is learned, what it adds to a beat, and its limit
_TIMES = 5  # so often the longest delay of a heartbeat counts, to be on the safe side
_ENOUGH, _LISTENED = 8, 8.0  # gaps to learn from, and seconds in which they were heard
_PERIODS, _PERIOD = 10, 60.0  # for how many periods a long gap is remembered, and the seconds of one


class Hearing:
    """Judges how long a member has been silent.

    What is learned is how late a heartbeat of the last ten minutes was at most, over all members: what keeps one of
    them busy may well happen to another one. Where processes wait for a core, a silence means less; members tell each
    other of that.

    Args:
        grace: seconds of silence after which a member counts as lost; ``None``: learned.
        members: how many there are.

    Attributes:
        before: the longest gap that was heard earlier, in another view, in seconds; ``None``: nothing is known.
    """

    def __init__(self, grace: float | None, members: int = 2) -> None:
        self._given, self._members = grace, members
        self._last: dict[int, float] = {}
        self._periods: deque[tuple[float, float]] = deque(maxlen=_PERIODS)  # when they began, and their longest gaps
        self.before: float | None = None
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
        gaps = [gap for _, gap in self._periods]
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

    def meet(self, member: int, now: float) -> None:
        """A member is heard on a new connection: it need not have said anything before."""
        self._last[member] = now

    def hear(self, member: int, now: float) -> None:
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
        """Begin anew for all: this process itself did not run for a while."""
        self._last = {member: max(now, last) for member, last in self._last.items()}
