"""Who takes part in a fit from its beginning to its end, also over the moments at which others join."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from lightning_hetero.callbacks.lineup import Change, Lineup, changes
from lightning_hetero.callbacks.record import View
from lightning_hetero.engine.view import View as Members
from lightning_hetero.strategies.survival import Loss


class Told(NamedTuple):
    """What a rank tells the others when the fit begins again with more ranks; ranks have their former numbers.

    Attributes:
        rank: which.
        lineup: who took part when the part of the fit that has ended began.
        losses: of that part, as this rank has seen them; times in seconds from now, so they are negative.
        earlier: changes before that part; times as well.
    """

    rank: int
    lineup: Lineup
    losses: list[Loss]
    earlier: list[Change]


class Attendance:
    """Who takes part in a fit, as one rank knows it. Its clock starts anew when others join, and ranks' numbers, too.

    Args:
        view: of the ranks that start together.
        start: what ``time.perf_counter()`` shows then.
        everyone: what each of them has told, if the fit begins again.

    Attributes:
        lineup: who takes part at the start.
    """

    def __init__(self, view: Members, start: float, everyone: Sequence[Told | None] = ()) -> None:
        self.lineup, self._rank, self._start = Lineup.of(view), view.ids[view.rank], start
        self._earlier: list[Change] = []
        if everyone and (first := everyone[0]) is not None:  # ranks that were there come first
            others = [(told.rank, told.losses) for told in everyone if told is not None]
            self._earlier = [*first.earlier, *changes(first.losses, first.rank, first.lineup, others)]

    def told(self, losses: Sequence[Loss], now: float) -> Told:
        """What to tell the others when the fit begins again.

        Args:
            losses: of the fit, as this rank has seen them.
            now: by ``time.perf_counter()``.
        """
        since = self._start - now
        own = [replace(loss, at=loss.at + since) for loss in self.since(losses)]
        earlier = [change._replace(at=change.at + since) for change in self._earlier]
        return Told(self._rank, self.lineup, own, earlier)

    def since(self, losses: Sequence[Loss]) -> list[Loss]:
        """Those since the start; times in seconds since then."""
        return [replace(loss, at=loss.at - self._start) for loss in losses if loss.at >= self._start]

    def changes(self, losses: Sequence[Loss], views: Sequence[View]) -> list[Change]:
        """All changes of the fit, in order; those before the start have negative times.

        Args:
            losses: of the fit, as this rank has seen them.
            views: what all ranks have seen since the start.
        """
        others = [(view.rank, view.losses) for view in views]
        return [*self._earlier, *changes(self.since(losses), self._rank, self.lineup, others)]
