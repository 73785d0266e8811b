"""Failure reports: which rank failed first, and which errors only follow from that."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

#: Of a rank that has said nothing.
GONE = (
    "has ended without an error message: killed, out of memory, its program is over, or gloo has aborted it at a "
    "collective of your own with unequal sizes or types on the ranks"
)

#: ``failed``: an error of its own. ``echo``: an error because of another rank. ``gone``: its process has ended.
#: ``told``: its error is on the terminal. ``left``: no failure: its part in a fit is over.
Kind = Literal["failed", "echo", "gone", "told", "left"]


class Failure(NamedTuple):
    """Failure of a rank.

    Attributes:
        rank: the rank, by the number that it had at first.
        kind: of failure.
        run: number of the fit, validation, test or prediction in which it happened.
        how: completes "rank 2 ...".
    """

    rank: int
    kind: Kind
    run: int
    how: str

    def __str__(self) -> str:
        return f"rank {self.rank} {self.how}"


class FailureReports:
    """Failures that a rank knows of, in the order of the coordinator. Threads may read while another one adds to them.

    Args:
        me: the rank.
        members: the ranks whose failures count.

    Attributes:
        run: number of the present run.
    """

    def __init__(self, me: int, members: tuple[int, ...]) -> None:
        self.me, self.members, self.run = me, members, 0
        self._known: dict[tuple[int, Kind], Failure] = {}  # in order; replaced as a whole

    def knows(self, failure: Failure) -> bool:
        """Whether a failure, or a later one of the same kind, is known."""
        known = self._known.get((failure.rank, failure.kind))
        return known is not None and known.run >= failure.run

    def add(self, failure: Failure) -> bool:
        """Put a failure last; whether it is new."""
        key, new = (failure.rank, failure.kind), not self.knows(failure)
        last = max(failure, self._known.get(key, failure), key=lambda one: one.run)  # of equal ones, this one
        self._known = {other: one for other, one in self._known.items() if other != key} | {key: last}
        return new

    def all(self) -> list[Failure]:
        """All of them, those of earlier runs included."""
        return list(self._known.values())

    def ended(self, rank: int) -> Failure:
        """The failure of a rank whose process has ended."""
        explained = any((rank, kind) in self._known for kind in ("failed", "echo"))
        return Failure(rank, "gone", self.run, "has ended" if explained else GONE)

    def first(self) -> Failure | None:
        """The failure of another rank that came first; ``None``: none is known."""
        return next((failure for failure in self._blamed() if failure.rank != self.me), None)

    def errors(self) -> list[Failure]:
        """The errors of ranks in this run, this one's among them, in the same order on all ranks; without echoes."""
        return [failure for failure in self._blamed() if failure.kind == "failed"]

    def told(self, rank: int) -> bool:
        """Whether a rank's error is on the terminal."""
        return (rank, "told") in self._known

    def silent(self, rank: int) -> bool:
        """Whether a rank's error may still come to the terminal."""
        return not any((rank, kind) in self._known for kind in ("told", "gone"))

    def _blamed(self) -> Iterator[Failure]:
        """The failures of this run that no other one explains, in order."""
        known = self._known
        for failure in known.values():
            echo = known.get((failure.rank, "echo"))
            blameless = failure.kind in ("echo", "told", "left") or (echo is not None and echo.run >= self.run)
            counts = failure.rank in self.members and (failure.kind == "gone" or failure.run >= self.run)
            if counts and not blameless:
                yield failure
