"""How a member ends so that others know why."""

from typing import TYPE_CHECKING, Any

from lightning_hetero.comm.membership.surroundings import Channel

if TYPE_CHECKING:
    from lightning_hetero.comm.membership.member import Member

_LINGER = 0.5  # seconds in which the coordinator waits for others to leave as well


class Farewell:
    """Says that a member ends, until those that must know it have confirmed it.

    A member tells the coordinator, which tells the others. All often leave at the same moment; so a coordinator that
    leaves waits for the others a little. Then it tells those that remain, and they follow the next one.

    Args:
        member: that ends, or hears that others do.
    """

    def __init__(self, member: "Member") -> None:
        self._member = member
        self._due = float("inf")
        self._message: dict[str, Any] = {}
        self._said = False
        self._heard: set[int] = set()  # members that have confirmed it
        self._confirmed = False  # by the coordinator

    def begin(self, how: str | None) -> None:
        """The member ends: with an error, or because its run is over."""
        waits = how is None and self._member.leads
        self._due = self._member.around.now() + (_LINGER if waits else 0.0)
        self._message = self._member.pulse.along({"k": "bye", "how": how})
        self._member.advance()

    @property
    def done(self) -> bool:
        """Whether the member may go."""
        member = self._member
        return self._confirmed or (self._said and member.leads and self._heard.issuperset(member.others))

    def advance(self) -> None:
        """Say it, if it is time."""
        member = self._member
        if self._message and not self._said and (member.around.now() >= self._due or not member.others):
            self._said = True
            member.gathering.spread()
            for channel in (*member.inbound.values(), *member.outbound.values()):
                channel.send(self._message)

    def opened(self, channel: Channel) -> None:
        """Say it on a new connection."""
        if self._said:
            channel.send(self._message)

    def heard(self, peer: int) -> None:
        """Another member has confirmed it."""
        self._heard.add(peer)
        self._confirmed = self._confirmed or peer == self._member.leader

    def received(self, channel: Channel, how: str | None) -> None:
        """Another member says that it ends."""
        member = self._member
        if not (self._said and member.leads):  # otherwise it must tell the next coordinator
            channel.send({"k": "heard"})
        if how is not None:
            member.lose(channel.peer, how, final=True)
        elif member.gone.leaves(channel.peer):
            member.around.note("left", channel.peer)
            member.gathering.tell()
