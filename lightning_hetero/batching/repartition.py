"""Repartition: how batches are shared once ranks were lost, and what the lost ones were to take."""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_hetero.batching.plan import Plan
from lightning_hetero.batching.planner import Planner

_MOST = 8  # changes of who takes part that are remembered; steps of all ranks lie closer together


class _SharedSpan(NamedTuple):
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


class ShareHistory:
    """Plans by which batches were shared before ranks were lost. Ranks are known by their ids."""

    def __init__(self) -> None:
        self._stretches: list[_SharedSpan] = []
        self._start = 0  # the first step that those who remain share

    def end(self, ids: Sequence[int], planner: Planner, start: int) -> None:
        """Others share the batches from a step on.

        Args:
            ids: of the ranks that have shared them, in the order of the shares.
            planner: of these ranks.
            start: the first step that others share.
        """
        ended = _SharedSpan(
            self._start, tuple(ids), tuple(planner.plans), planner.total, planner.origin if planner.rotates else None
        )
        self._stretches, self._start = [*self._stretches, ended][-_MOST:], start

    def samples(self, id: int, step: int) -> int:
        """Samples that a lost rank was to take from a step on, until others took its share.

        A batch that is smaller than others, at the end of an epoch, counts as a full one. Where plans are so old that
        they are not remembered, the oldest one counts.

        Args:
            id: of the rank.
            step: the first one that it has not done.
        """
        return sum(self._at(each).share(id, each) for each in range(step, self._start))

    def _at(self, step: int) -> _SharedSpan:
        return next((one for one in reversed(self._stretches) if one.start <= step), self._stretches[0])


class Repartition(NamedTuple):
    """Change of the ranks that share the batches, from a step on: some were lost.

    Attributes:
        former_ranks: of each rank, its number before.
        start: the first step that they share; no rank has drawn it yet.
        reports: how many times all ranks have acted on their reports, on the rank that has done so most often.
    """

    former_ranks: tuple[int, ...]
    start: int
    reports: int


def plan_for_survivors(former: Planner, kept: Sequence[int], planner: Planner) -> Planner:
    """Let a planner go on for the ranks that remain, with what an earlier one knows of them.

    Args:
        former: of all ranks.
        kept: of each rank that remains, its number there.
        planner: a new one for these ranks, with the user's options for them.

    Returns:
        The new planner. It splits again at once, by the costs of the latest plan.

    Raises:
        ShareError: the ranks that remain cannot take a whole batch, in passes neither.
    """
    planner.least, planner.frozen, planner.one_pass = former.least, former.frozen, former.one_pass
    planner.rotates, planner.origin, planner.whole = former.rotates, former.origin, former.whole
    if former.limits_measured:
        planner.limit([former.high[rank] for rank in kept])
    planner.copy_trust(former)
    state = former.state_dict()
    own = {name: [state[name][rank] for rank in kept] for name in ("costs", "reach", "most") if state[name]}
    planner.load_state_dict({**state, **own})
    if former.total:
        planner.expect(former.total)
        planner.infers_total = former.infers_total
    return planner
