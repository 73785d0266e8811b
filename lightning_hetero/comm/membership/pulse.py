"""What members tell each other all the time: that they live, and how far they have come."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_hetero.comm.membership.member import Member


class Pulse:
    """Sends heartbeats, and takes in what others say of themselves.

    How many steps a member has done is in its heartbeats, and in the first message on a connection and the last one.
    So what is known of it is up to a heartbeat old.

    Args:
        member: that lives.

    Attributes:
        steps: that each other member has done, as far as is known; fewer than it really has.
    """

    def __init__(self, member: "Member") -> None:
        self._member = member
        self._sent = float("-inf")
        self.steps: dict[int, int] = {}

    def tick(self, now: float) -> None:
        """Send a heartbeat, if it is time."""
        member = self._member
        if now - self._sent < member.hearing.beat:
            return
        self._sent = now
        beat = self.along({"k": "beat", "v": round(member.around.busy(), 2)})
        for channel in (*member.inbound.values(), *member.outbound.values()):
            channel.send(beat)

    def along(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message that says, too, how far this member has come."""
        return {**message, "steps": self._member.around.steps()}

    def take(self, peer: int, message: Mapping[str, Any]) -> None:
        """Another member has sent a message, of any kind."""
        if message["k"] == "beat":
            self._member.hearing.busy(peer, float(message.get("v", 1.0)))
        if "steps" in message:
            self.learn({peer: int(message["steps"])})

    def learn(self, steps: Mapping[int, int]) -> None:
        """Hear how far members have come, from themselves or from others; it may be old."""
        for peer, done in steps.items():
            self.steps[peer] = max(done, self.steps.get(peer, done))
