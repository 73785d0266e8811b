"""Integer shares of a batch that let all ranks finish together.

The time of rank ``i`` on ``n`` samples is modelled as ``a_i + k_i * n``. A global batch takes as long as its slowest
rank, so the best shares minimise ``max_i (a_i + k_i * n_i)``.
"""

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from lightning_hetero.errors import ShareError


class Cost(NamedTuple):
    """Affine cost of one rank's part of a batch.

    Attributes:
        fixed: ``a``, seconds per batch whatever its size.
        per_sample: ``k > 0``, seconds per sample.
    """

    fixed: float
    per_sample: float

    def seconds(self, samples: float) -> float:
        """Predicted seconds for ``samples`` samples."""
        return self.fixed + self.per_sample * samples


def split(
    total: int,
    costs: Sequence[Cost],
    low: Sequence[int] | None = None,
    high: Sequence[int] | None = None,
) -> list[int]:
    """Shares ``n_i`` that minimise ``max_i (a_i + k_i * n_i)``, exactly.

    Give one sample at a time to the rank that would finish it first. The finishing times of each rank's samples
    increase, so this picks the ``total`` earliest of them all, and no other choice has an earlier last one. All but
    the last few samples are given at once, by the continuous solution, so the cost does not grow with ``total``.

    Args:
        total: samples to split, at least 0.
        costs: one cost per rank.
        low: least samples per rank; default 0.
        high: most samples per rank; default ``total``.

    Returns:
        One share per rank, in samples, with ``sum(shares) == total``. Ties go to the lower rank.

    Raises:
        ShareError: a cost is not finite, ``k <= 0``, or the limits admit no split.
    """
    world = len(costs)
    low = [0] * world if low is None else list(low)
    high = [total] * world if high is None else [min(h, total) for h in high]
    _check(total, costs, low, high)

    # Every sample that finishes before the continuous optimum is surely given; one less per rank, for rounding.
    deadline = bound(total, costs, low, high)
    shares = [
        min(h, max(lo, math.floor((deadline - cost.fixed) / cost.per_sample) - 1))
        for cost, lo, h in zip(costs, low, high, strict=True)
    ]
    queue = [(costs[i].seconds(shares[i] + 1), i) for i in range(world) if shares[i] < high[i]]
    heapq.heapify(queue)
    for _ in range(total - sum(shares)):
        _, i = heapq.heappop(queue)
        shares[i] += 1
        if shares[i] < high[i]:
            heapq.heappush(queue, (costs[i].seconds(shares[i] + 1), i))
    return shares


def bound(
    total: int, costs: Sequence[Cost], low: Sequence[int] | None = None, high: Sequence[int] | None = None
) -> float:
    """Earliest time at which ``total`` samples could be done if a sample could be cut, in seconds.

    No integer split is faster. With no limits it solves ``sum_i max(0, (T - a_i) / k_i) = total``.
    """
    low = [0] * len(costs) if low is None else low
    high = [total] * len(costs) if high is None else high

    def done_by(deadline: float) -> float:
        return sum(
            min(h, max(lo, (deadline - c.fixed) / c.per_sample)) for c, lo, h in zip(costs, low, high, strict=True)
        )

    early, late = min(c.fixed for c in costs), max(c.seconds(h) for c, h in zip(costs, high, strict=True))
    for _ in range(100):  # bisection down to the last bit of a float
        middle = 0.5 * (early + late)
        if not early < middle < late:
            break
        early, late = (middle, late) if done_by(middle) < total else (early, middle)
    return late


def makespan(shares: Sequence[int], costs: Sequence[Cost]) -> float:
    """Seconds until the slowest rank has done its share."""
    return max(cost.seconds(n) for n, cost in zip(shares, costs, strict=True))


def _check(total: int, costs: Sequence[Cost], low: Sequence[int], high: Sequence[int]) -> None:
    for rank, cost in enumerate(costs):
        if not (math.isfinite(cost.fixed) and math.isfinite(cost.per_sample) and cost.per_sample > 0):
            raise ShareError(f"rank {rank} has cost {tuple(cost)}: a must be finite, and k finite and above 0.")
    if not len(costs) == len(low) == len(high):
        raise ShareError(
            f"{len(costs)} costs, {len(low)} lower and {len(high)} upper limits: give one of each per rank."
        )
    for rank, (lo, h) in enumerate(zip(low, high, strict=True)):
        if not 0 <= lo <= h:
            raise ShareError(f"rank {rank} must take between {lo} and {h} of {total} samples, which is impossible.")
    if not sum(low) <= total <= sum(high):
        raise ShareError(
            f"{total} samples cannot be split: the ranks must take at least {list(low)} (sum {sum(low)}) and may take "
            f"at most {list(high)} (sum {sum(high)}). Change the batch size or the limits per rank."
        )
