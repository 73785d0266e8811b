"""What each rank was to take of past steps, while others were lost one after the other."""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_hetero.workload.plan import Plan
from lightning_hetero.workload.planner import Planner

_MOST = 8  # changes of who takes part that are remembered; steps of all ranks lie closer together


class _Stretch(NamedTuple):
    """From a step on, these ranks shared the batches.

    Attributes:
        start: that step.
        ids: of the ranks, in the order of the shares.
        plans: that were in force.
        total: samples of a full batch.
        origin: what makes a step the number of a turn; ``None``: there are no turns.
    """

    start: int
    ids: tuple[int, ...]
    plans: tuple[Plan, ...]
    total: int
    origin: int | None

    def share(self, id: int, step: int) -> int:
        """A rank's samples of a full batch."""
        if id not in self.ids:
            return 0
        plan = next((plan for plan in reversed(self.plans) if plan.start <= step), self.plans[0])
        turn = None if self.origin is None else step + self.origin
        return plan.split([self.total], turn)[0][self.ids.index(id)]


class PastShares:
    """Remembers by which plans batches were shared before ranks were lost. Ranks are known by their ids."""

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []
        self._start = 0  # the first step that those who remain share

    def end(self, ids: Sequence[int], planner: Planner, start: int) -> None:
        """Others share the batches from a step on.

        Args:
            ids: of the ranks that have shared them, in the order of the shares.
            planner: of these ranks.
            start: the first step that others share.
        """
        ended = _Stretch(self._start, tuple(ids), tuple(planner.plans), planner.total, planner.turn(0))
        self._stretches, self._start = [*self._stretches, ended][-_MOST:], start

    def samples(self, id: int, step: int) -> int:
        """What a rank that is lost was to take from a step on, until others took its share.

        A batch that is smaller than others, at the end of an epoch, counts as a full one. Where plans are so old that
        they are not remembered, the oldest one counts.

        Args:
            id: of the rank.
            step: the first one that it has not done.
        """
        return sum(self._at(each).share(id, each) for each in range(step, self._start))

    def _at(self, step: int) -> _Stretch:
        return next((one for one in reversed(self._stretches) if one.start <= step), self._stretches[0])
