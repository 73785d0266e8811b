"""What a member needs of the outside: connections, a clock, callbacks."""

from typing import Any, Protocol


class Channel(Protocol):
    """A connection to another member."""

    peer: Any
    mine: bool

    def send(self, message: dict[str, Any]) -> None:
        """Send a message."""

    def close(self) -> None:
        """Close the connection; nothing is heard of it any more."""


class Surroundings(Protocol):
    """What a member needs of the outside."""

    def now(self) -> float:
        """Seconds, on a clock that never goes back."""

    def connect(self, peer: int) -> Channel:
        """Begin to connect to a member."""

    def offer(self, number: int) -> Any:
        """What the members of a view need to work together."""

    def busy(self) -> float:
        """How many processes there are for each core of this machine, at least 1."""

    def steps(self) -> int:
        """How many steps this member has done."""

    def note(self, what: str, member: int, why: str = "") -> None:
        """Take note of an event."""
