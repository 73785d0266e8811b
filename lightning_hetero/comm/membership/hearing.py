"""When other members were last heard, and how long a silence is normal."""

from collections import defaultdict, deque
from collections.abc import Iterable

BEAT = 2.0  # seconds between heartbeats, unless a smaller grace needs them more often
_FIRST, _LEAST, _MOST = 10.0, 3.0, 60.0  # seconds: grace before it is learned, and its limits
_TIMES = 5  # the longest gap between two messages, to be on the safe side
_ENOUGH = 8  # gaps to learn from


class Hearing:
    """Judges how long a member has been silent.

    Args:
        grace: seconds of silence after which a member counts as lost; ``None``: learned.
    """

    def __init__(self, grace: float | None) -> None:
        self._given = grace
        self._last: dict[int, float] = {}
        self._gaps: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=32))

    @property
    def beat(self) -> float:
        """Seconds between heartbeats."""
        return BEAT if self._given is None else min(BEAT, self._given / 4)

    @property
    def grace(self) -> float:
        """Seconds of silence after which a member counts as lost."""
        if self._given is not None:
            return self._given
        gaps = [gap for of_member in self._gaps.values() for gap in of_member]
        return min(max(_TIMES * max(gaps), _LEAST), _MOST) if len(gaps) >= _ENOUGH else _FIRST

    def hear(self, member: int, now: float) -> None:
        """A message has come from a member."""
        if member in self._last and self._last[member] < now:
            self._gaps[member].append(now - self._last[member])
        self._last[member] = now

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
