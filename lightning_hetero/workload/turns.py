"""Shares that are right in the mean, for ranks that do not wait for each other at every step.

64 samples among 7 ranks are 10 for one of them and 9 for the others. If that is always the same rank, it falls behind
by a tenth of a step in every step. So what is left over goes to each rank in turn.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from lightning_hetero.workload.curve import Curve
from lightning_hetero.workload.shares import Cost, bound, check_limits

_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples, without their whole parts, lie evenly between 0 and 1
_TINY = 1e-9  # more than rounding errors of floats


def exact_shares(units: int, costs: Sequence[Cost | Curve], low: Sequence[int], high: Sequence[int]) -> list[float]:
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


def in_turn(exact: Sequence[float], turn: int) -> list[int]:
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

        >>> from lightning_hetero.workload.turns import in_turn
        >>> [in_turn([1 / 3] * 3, turn).index(1) for turn in range(6)]
        [1, 2, 0, 1, 2, 0]
    """
    shares = [math.floor(share + _TINY) for share in exact]
    ends = [0.0, *accumulate(max(x - n, 0.0) for x, n in zip(exact, shares, strict=True))]
    left, offset = round(sum(exact)) - sum(shares), (turn + 1) * _GOLDEN % 1.0
    if not left:
        return shares
    points = [math.floor(end * left / ends[-1] + offset + _TINY) for end in ends[:-1]] + [left]
    return [n + after - before for n, (before, after) in zip(shares, pairwise(points), strict=True)]
