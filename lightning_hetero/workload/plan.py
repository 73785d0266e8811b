"""How the batches of a step are split, under a plan that all ranks hold."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lightning_hetero.workload.curve import Curve
from lightning_hetero.workload.shares import Cost, split
from lightning_hetero.workload.turns import exact_shares, in_turn

#: Asked at every step, with one answer for all but the tails.
_remembered = lru_cache(maxsize=256)
_split, _exact = _remembered(split), _remembered(exact_shares)


@dataclass(frozen=True)
class Plan:
    """How batches are split from step ``start`` on.

    Attributes:
        start: first step (batches since the start of the fit) of this plan.
        costs: cost per rank; for fixed shares, ``k`` is the inverse share.
        low: least samples per rank.
        high: most samples per rank.
        reach: largest part of a batch that each rank is trusted with, 0 to 1; beyond what it has been seen to manage
            its cost is an extrapolation.
        need: least samples per rank of a batch that is too small for ``low``; default: the same.
    """

    start: int
    costs: tuple[Cost | Curve, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    reach: tuple[float, ...] = ()
    need: tuple[int, ...] = ()

    def split(self, sizes: Sequence[int], turn: int | None = None) -> list[list[int]]:
        """Split the batches of one step (one per loader) in equal proportions, as their weights must be equal.

        The unit is the greatest part that divides all batches: with one loader a sample, with batches of 64 and 32
        two samples and one. Where a tail is too small for all to have their least, the slowest ranks have nothing.

        Args:
            sizes: samples in the global batch of each loader; 0 for a loader that has run out.
            turn: the number of the batch, if ranks get what is left over in turn; else the same ones always get it.

        Returns:
            For each loader the shares per rank, in samples.

        Raises:
            ShareError: the upper limits leave no room.
        """
        units = math.gcd(*sizes)
        if units == 0:
            return [[0] * len(self.costs) for _ in sizes]
        task = _task(self, units, sum(sizes) // units)
        shares = _split(*task) if turn is None else in_turn(_exact(*task), turn)
        return [[share * (size // units) for share in shares] for size in sizes]


Task = tuple[int, tuple[Cost | Curve, ...], tuple[int, ...], tuple[int, ...]]  # as `split` takes it


@_remembered
def _task(plan: Plan, units: int, width: int) -> Task:
    """What is to be split into ``units`` units, each of ``width`` samples, and within which limits."""
    low = [-(-n // width) for n in plan.low]
    high = [n // width for n in plan.high]
    if plan.reach:
        high = [min(h, max(lo, math.ceil(part * units))) for h, lo, part in zip(high, low, plan.reach, strict=True)]
    order = sorted(range(len(low)), key=lambda rank: (plan.costs[rank].per_sample, rank))
    if sum(low) > units and plan.need:
        low = [-(-n // width) for n in plan.need]
    if sum(low) > units:  # a tail too small for all to have their least
        low = [n if n > 1 else 0 for n in low]
    while sum(low) > units:  # the slowest sit this one out
        rank = order.pop()
        low[rank] = high[rank] = 0
    if sum(high) < units:  # too small even for one
        low, high = [0] * len(low), [n // width for n in plan.high]
    return units, tuple(cost.in_units(width) for cost in plan.costs), tuple(low), tuple(high)
