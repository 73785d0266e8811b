"""Quorum rule, by which members of a view may go on without the others."""

from collections.abc import Collection
from typing import Any, NamedTuple

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


# -- what members tell each other of themselves ----------------------------------------------------


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
