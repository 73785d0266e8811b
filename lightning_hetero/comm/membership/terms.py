"""What a user asks for, what members agree on, and what a monitor shows of it."""

from typing import Any, NamedTuple


class Terms(NamedTuple):
    """What the user has asked for.

    Attributes:
        grace: seconds of silence after which a member counts as lost; ``None``: learned from how often members are
            heard.
        minimum: units that must remain.
        timeout: longest wait, in seconds, for a living member to come to the agreement.
        unit: what people call a unit.
    """

    grace: float | None
    minimum: int
    timeout: float
    unit: str = "replica"


class Agreed(NamedTuple):
    """A view that its members have agreed on.

    Attributes:
        number: of the view.
        members: ids of those that take part, ascending.
        standings: what each of them gave to :meth:`Membership.agree`.
        lost: members of the view before that do not take part any more, each with the reason, which completes
            "rank 3 ...".
        offer: what the coordinator's ``offer`` returned.
        host: id of the member that made the offer.
        steps: that each of those that do not take part any more has done, as far as is known; what is not known is not
            there. A member tells it with its heartbeats, so it may have done more.
    """

    number: int
    members: tuple[int, ...]
    standings: dict[int, tuple[int, ...]]
    lost: dict[int, str]
    offer: Any
    host: int
    steps: dict[int, int]


class Event(NamedTuple):
    """Something that a monitor may show.

    Attributes:
        time: when, by ``time.time()``.
        what: ``lost``, ``returned`` (it was lost, and is heard again), ``left`` (its run was over), ``changing``,
            ``agreed``, ``over`` (this member must end) or ``error`` (of a callback).
        member: which member, or, for ``agreed``, the number of the view.
        why: the reason, if there is one.
    """

    time: float
    what: str
    member: int
    why: str = ""
