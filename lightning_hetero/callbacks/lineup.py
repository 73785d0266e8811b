"""Who took part in a fit, who was lost, and what that cost: as the monitor's report tells it."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightning_hetero.engine.view import View as Members
from lightning_hetero.strategies.lost_samples import sentence
from lightning_hetero.strategies.survival import Loss


class Lineup(NamedTuple):
    """Who took part when a fit began, or began again with others; ranks keep the numbers that they have then.

    Attributes:
        replicas: the ranks of each.
        places: host and device of each rank.
        view: the number of the view.
    """

    replicas: tuple[tuple[int, ...], ...]
    places: list[tuple[str, str]]
    view: int = 0

    @classmethod
    def of(cls, view: Members) -> "Lineup":
        """Who takes part in a view."""
        replicas = tuple(tuple(view.ids[rank] for rank in ranks) for ranks in view.ranks)
        places = {id: (at.host, at.device) for id, at in zip(view.ids, view.places, strict=True)}
        # A rank that an earlier fit has lost keeps its place in the list.
        return cls(replicas, [places.get(id, ("", "")) for id in range(max(places) + 1)], view.number)

    @property
    def ranks(self) -> list[int]:
        """Their numbers."""
        return sorted(rank for ranks in self.replicas for rank in ranks)


class Change(NamedTuple):
    """A change of who takes part. Ranks have the numbers that they kept until others joined.

    Attributes:
        view: its number; the first view of a job has number 0.
        at: when the ranks went on, in seconds since they started together; negative if others have joined since then.
        step: optimizer steps done by then.
        lost: of each lost rank, how it was lost; empty if only connections broke, or others have joined.
        joined: ranks that have joined.
        ranks: that went on.
        replicas: that went on.
        stalls: seconds for which each rank stood still, as far as known.
        samples: drawn for the lost ranks, and not trained on.
        writer: the rank that writes checkpoints and logs from then on.
        bound: what ``samples`` is: ``""`` (exactly so many), ``"up to "`` or ``"at least "``.
    """

    view: int
    at: float
    step: int
    lost: dict[int, str]
    joined: tuple[int, ...]
    ranks: int
    replicas: int
    stalls: dict[int, float]
    samples: int
    writer: int
    bound: str = ""

    @property
    def stall(self) -> float:
        """The longest time for which a rank stood still."""
        return max(self.stalls.values())

    @property
    def amount(self) -> str:
        """How many samples are lost."""
        return f"{self.bound}{self.samples}"

    @property
    def who(self) -> str:
        """The lost ranks, or those that have joined, in few words."""
        if self.joined:
            return f"rank{'s' if len(self.joined) > 1 else ''} {', '.join(map(str, self.joined))} joined"
        return f"rank{'s' if len(self.lost) > 1 else ''} {', '.join(map(str, self.lost))}" if self.lost else "nobody"

    @property
    def how(self) -> str:
        """How each lost rank was lost."""
        if self.joined:
            return self.who
        told = "; ".join(f"rank {id} {why}" for id, why in sorted(self.lost.items()))
        return told or "connections broke, and all came again"


def changes(
    own: Sequence[Loss], rank: int, lineup: Lineup, everyone: Iterable[tuple[int, Iterable[Loss]]]
) -> list[Change]:
    """The changes of who took part, between two moments at which a fit began.

    Args:
        own: as one rank has seen them.
        rank: that rank.
        lineup: who took part at the first of these moments.
        everyone: ranks, each with the changes that it has seen.
    """
    stalls: dict[int, dict[int, float]] = {loss.view: {rank: loss.seconds} for loss in own}
    for other, losses in everyone:
        for loss in losses:
            stalls.setdefault(loss.view, {})[other] = loss.seconds
    living, found = set(lineup.ranks), []
    for loss in own:
        if loss.view > lineup.view:  # else the lineup is what has come of it
            living -= set(loss.lost)
        amounts = loss.ranks, loss.replicas, dict(sorted(stalls[loss.view].items())), loss.samples
        what = loss.view, loss.at, loss.step, loss.lost, loss.joined
        found.append(Change(*what, *amounts, min(living), loss.bound))
    return found


def sentence_of(change: Change) -> str:
    """A change in words."""
    rest = f"{change.ranks} rank{'' if change.ranks == 1 else 's'}"
    left = sentence(change.samples, change.bound, f"that were drawn for {change.who}")
    how = change.how[0].upper() + change.how[1:]
    when = "after its start" if change.at >= 0 else "before others joined, when the time lines begin"
    return (
        f"{how}. Training went on with {rest} after step {change.step}, {abs(change.at):.1f} s {when}; ranks stood "
        f"still for at most {change.stall:.2f} s.{left} Since then rank {change.writer} writes checkpoints and logs."
    )
