"""Other ranks share the batches, in the midst of a fit: some were lost."""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_hetero.errors import ShareError
from lightning_hetero.workload.plan import Plan
from lightning_hetero.workload.planner import Planner


class Regrouping(NamedTuple):
    """From a step on other ranks share the batches: some were lost.

    Attributes:
        kept: of each rank, its number before.
        start: the first step that they share; no rank has drawn it yet.
        reports: how many times all ranks have acted on their reports, on the rank that has done so most often.
    """

    kept: tuple[int, ...]
    start: int
    reports: int


class Knowledge(NamedTuple):
    """What a rank knows of the plans; ranks that have acted on the same reports know the same.

    Attributes:
        plans: in force, and to come.
        most: the largest part of a batch that each rank has been given so far.
    """

    plans: list[Plan]
    most: list[float]

    @classmethod
    def of(cls, planner: Planner) -> "Knowledge":
        """What a planner knows."""
        return cls(list(planner.plans), list(planner.most))

    def teach(self, planner: Planner) -> None:
        """Let another planner of the same ranks know it, which may have missed the latest reports."""
        planner.plans, planner.most = list(self.plans), list(self.most)


def plan_among(former: Planner, kept: Sequence[int], planner: Planner) -> Planner:
    """Let a planner go on for the ranks that remain, with what an earlier one knows of them.

    Args:
        former: of all ranks.
        kept: of each rank that remains, its number there.
        planner: a new one for these ranks, with the user's options for them.

    Returns:
        The new planner. It splits anew at once, by the costs of the latest plan.

    Raises:
        ShareError: the ranks that remain cannot take a whole batch.
    """
    planner.least, planner.held = former.least, former.held
    planner.turns, planner.origin = former.turns, former.origin
    if former.found:
        planner.limit([former.high[rank] for rank in kept])
    planner.trust_as(former)
    state = {name: [rows[rank] for rank in kept] if rows else [] for name, rows in former.state_dict().items()}
    planner.load_state_dict(state)
    if former.total:
        planner.expect(former.total)
        planner.learns = former.learns
        if sum(planner.high) < former.total:
            raise ShareError(
                f"the ranks that remain take at most {list(planner.high)} samples, less than the global batch of "
                f"{former.total}. Raise max_batch_size, or start again with a smaller batch."
            )
    return planner
