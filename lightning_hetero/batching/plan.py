"""Plan: a split of batches among ranks, from a step on; a value.

64 samples among 7 ranks are 10 for one of them and 9 for the others. If that is always the same rank, it falls behind
by a tenth of a step in every step. So what is left over goes to each rank in turn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from lightning_hetero.batching.passes import even_sizes
from lightning_hetero.batching.shares import (
    Cost,
    Grid,
    Stepwise,
    bound,
    check_limits,
    makespan,
    multiples,
    on_grid,
    passes,
    split,
    stepwise,
)

_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples, without their whole parts, lie evenly between 0 and 1
_TINY = 1e-9  # more than rounding errors of floats


def exact_shares(units: int, costs: Sequence[Cost | Stepwise], low: Sequence[int], high: Sequence[int]) -> list[float]:
    """Shares with fractions, which let all ranks finish together.

    Args:
        units: to split.
        costs: one per rank.
        low: least units per rank.
        high: most units per rank.

    Raises:
        ShareError: the limits leave no such shares.
    """
    check_limits(units, costs, low, high)
    deadline = bound(units, costs, low, high)
    return [min(h, max(lo, cost.samples(deadline))) for cost, lo, h in zip(costs, low, high, strict=True)]


def rotating_shares(exact: Sequence[float], turn: int) -> list[int]:
    """Whole shares of a batch, which are the exact ones in the mean over turns.

    Each rank gets its share rounded down. What is left goes to ranks by systematic sampling (Madow 1949): their
    fractions stand in a row, and who has one of the points ``offset, offset + 1, ...`` gets one more. The offset moves
    on from turn to turn, so that each rank gets it as often as its fraction says.

    Args:
        exact: of :func:`exact_shares`; their sum is a whole number.
        turn: number of the batch.

    Returns:
        One share per rank, next to its exact one above or below; with the same sum.

    Example: one unit for three ranks that are equally fast::

        >>> from lightning_hetero.batching.plan import rotating_shares
        >>> [rotating_shares([1 / 3] * 3, turn).index(1) for turn in range(6)]
        [1, 2, 0, 1, 2, 0]
    """
    shares = [math.floor(share + _TINY) for share in exact]
    ends = [0.0, *accumulate(max(x - n, 0.0) for x, n in zip(exact, shares, strict=True))]
    left, offset = round(sum(exact)) - sum(shares), (turn + 1) * _GOLDEN % 1.0
    if not left:
        return shares
    points = [math.floor(end * left / ends[-1] + offset + _TINY) for end in ends[:-1]] + [left]
    return [n + after - before for n, (before, after) in zip(shares, pairwise(points), strict=True)]


#: Asked at every step, with one answer for all but the tails.
_remembered = lru_cache(maxsize=256)
_exact = _remembered(exact_shares)


@_remembered
def _split(
    grid: Grid, units: int, costs: Sequence[Cost | Stepwise], low: Sequence[int], high: Sequence[int]
) -> list[int]:
    shares = split(units, costs, low, high)
    return on_grid(shares, grid, costs, low, high) if grid else shares


def _in_turn(grid: Grid, turn: int, task: "Task") -> list[int]:
    """Shares of a batch; a multiple of the grid is left over at a time, if that is one of all shares."""
    units, _, low, high = task
    exact = _exact(*task)
    m = min(multiples(exact, grid, low))
    shares = [] if units % m else [m * n for n in rotating_shares([share / m for share in exact], turn)]
    fits = shares and all(lo <= n <= h for lo, n, h in zip(low, shares, high, strict=True))
    return shares if fits else rotating_shares(exact, turn)


@dataclass(frozen=True)
class Plan:
    """Split of the batches from step ``start`` on.

    Attributes:
        start: first step (batches since the start of the fit) of this plan.
        costs: cost per rank, by which :func:`~lightning_hetero.batching.shares.split` lets all end a step at once; for
            fixed shares, the cost per sample is the inverse share.
        low: least samples per rank.
        high: most samples per rank, in one pass. A batch that is more than that of all ranks takes several.
        reach: largest part of a batch that each rank is trusted with, 0 to 1; beyond what it has been seen to manage
            its cost is an extrapolation.
        need: least samples per rank of a batch that is too small for ``low``; default: the same.
        by_samples: whether batches are split by samples although it is known what these cost: that does not explain
            how long steps take.
        idle: ranks that get no samples, because even their least share would make every step longer.
        probe: they get it all the same in one of so many steps, to see whether that has changed.
        grid: of which multiples large shares are, where samples are counted.
    """

    start: int
    costs: tuple[Cost, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    reach: tuple[float, ...] = ()
    need: tuple[int, ...] = ()
    by_samples: bool = False
    grid: Grid = ()
    idle: tuple[int, ...] = ()
    probe: int = 1

    def of_step(self, step: int) -> "Plan":
        """The plan as it holds at a step: in some, idle ranks get their least share."""
        if not self.idle or step % self.probe:
            return self
        low, high = list(self.low), list(self.high)
        for rank in self.idle:
            low[rank] = high[rank] = min(max(low[rank], 1), high[rank])
        return replace(self, low=tuple(low), high=tuple(high), idle=())

    def task(self, samples: int, trusted: bool = True) -> "Task":
        """The task of splitting one batch, as :func:`~lightning_hetero.batching.shares.split` takes it.

        Args:
            samples: of the batch.
            trusted: whether ranks take no more than they are trusted with.
        """
        return _task(self if trusted else replace(self, reach=()), samples, 1)

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
        shares = _split(self.grid, *task) if turn is None else _in_turn(self.grid, turn, task)
        return [[share * (size // units) for share in shares] for size in sizes]

    def held_back(self, total: int) -> bool:
        """Whether a rank would take more of a batch if it were trusted with that."""
        return self.split([total]) != replace(self, reach=()).split([total])

    def paid(self, total: int, costs: Sequence[Cost]) -> list[Cost | Stepwise]:
        """Costs as they count under this plan: nothing for ranks that it leaves without samples.

        Args:
            total: samples of a batch.
            costs: one per rank.
        """
        high = [0 if rank in self.idle else most for rank, most in enumerate(self.high)]
        paid = stepwise(total, costs, high)
        return [Cost(0.0, cost.per_sample) if rank in self.idle else cost for rank, cost in enumerate(paid)]

    def seconds(self, total: int, costs: Sequence[Cost]) -> float:
        """Seconds of a step with a batch of ``total`` samples, by these costs."""
        return makespan(self.split([total])[0], self.paid(total, costs))

    def passes(self, shares: Sequence[int]) -> list[int]:
        """The passes in which each rank runs its share of a batch."""
        return [passes(share, most) for share, most in zip(shares, self.high, strict=True)]

    def pass_sizes(self, shares: Sequence[int]) -> list[list[int]]:
        """Samples of each pass of each rank."""
        return [even_sizes(share, count) for share, count in zip(shares, self.passes(shares), strict=True)]


Task = tuple[int, tuple[Cost | Stepwise, ...], tuple[int, ...], tuple[int, ...]]  # as `split` takes it


@_remembered
def _task(plan: Plan, units: int, width: int) -> Task:
    """The task of a split: ``units`` units, each of ``width`` samples, and the limits."""
    low, most, need = (
        [0 if rank in plan.idle else n for rank, n in enumerate(limits)] for limits in (plan.low, plan.high, plan.need)
    )
    own = [Cost(0.0, cost.per_sample) if rank in plan.idle else cost for rank, cost in enumerate(plan.costs)]
    low, most = [-(-n // width) for n in low], [n // width for n in most]
    costs: list[Cost | Stepwise] = [cost.in_units(width) for cost in own]
    if width == 1 and any(most) and sum(most) < units:  # not for several loaders
        costs = stepwise(units, own, most)
        most = [units if n else 0 for n in most]
    high = list(most)
    if plan.reach:
        high = [min(h, max(lo, math.ceil(part * units))) for h, lo, part in zip(high, low, plan.reach, strict=True)]
    order = sorted(range(len(low)), key=lambda rank: (plan.costs[rank].per_sample, rank))
    if sum(low) > units and need:
        low = [-(-n // width) for n in need]
    if sum(low) > units:  # a tail too small for all to have their least
        low = [n if n > 1 else 0 for n in low]
    while sum(low) > units:  # the slowest sit this one out
        rank = order.pop()
        low[rank] = high[rank] = 0
    if sum(high) < units:  # too small even for one
        low, high = [0] * len(low), most
    return units, tuple(costs), tuple(low), tuple(high)
