"""What members tell each other of where they stand."""

from typing import Any, NamedTuple

from lightning_hetero.comm.membership.majority import Key, Roster


class Loss(NamedTuple):
    """Why a member counts as lost.

    Attributes:
        why: completes "rank 3 ...".
        final: whether it stays lost even if it is heard again.
    """

    why: str
    final: bool


class State(NamedTuple):
    """Where a member stands.

    Attributes:
        leader: member that it follows.
        term: how often the leader has changed, as far as it knows. A higher one wins.
        view: the last one that was committed.
        acked: views that it has acknowledged since.
        standing: what its training thread gave to ``agree()``; ``None`` if it has not come.
        changing: whether it wants a new view.
    """

    leader: int
    term: int
    view: Roster
    acked: tuple[Roster, ...]
    standing: tuple[int, ...] | None
    changing: bool

    @classmethod
    def read(cls, value: Any) -> "State":
        """The state that was written as JSON."""
        leader, term, view, acked, standing, changing = value
        come = None if standing is None else tuple(standing)
        return cls(int(leader), int(term), Roster.read(view), tuple(map(Roster.read, acked)), come, bool(changing))


class Proposal(NamedTuple):
    """A view that the coordinator proposes.

    Attributes:
        roster: who would take part.
        standings: of each member.
        lost: all that are lost, with the reasons.
        offer: what the coordinator's ``offer`` returned.
        steps: that members which would not take part have done, as far as the coordinator knows.
    """

    roster: Roster
    standings: dict[int, tuple[int, ...]]
    lost: dict[int, str]
    offer: Any
    steps: dict[int, int]

    @property
    def key(self) -> Key:
        """What tells the view from all others."""
        return self.roster.key

    def written(self) -> list[Any]:
        """For JSON, which has no numbers as keys."""
        by_member = [list(one.items()) for one in (self.standings, self.lost, self.steps)]
        return [self.roster, *by_member, self.offer]

    @classmethod
    def read(cls, value: Any) -> "Proposal":
        """The proposal that was written as JSON."""
        roster, standings, lost, steps, offer = value
        come = {member: tuple(one) for member, one in standings}
        return cls(Roster.read(roster), come, dict(lost), offer, dict(steps))
