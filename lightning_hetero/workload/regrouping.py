"""Other ranks share the batches, in the midst of a fit: some were lost."""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_hetero.errors import ShareError
from lightning_hetero.workload.planner import Planner


class Regrouping(NamedTuple):
    """From a step on other ranks share the batches: some were lost.

    Attributes:
        kept: of each rank, its number before.
        start: the first step that they share; no rank has drawn it yet.
    """

    kept: tuple[int, ...]
    start: int


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
    if former.found:
        planner.limit([former.high[rank] for rank in kept])
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
