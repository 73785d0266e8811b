"""Cost curves of a batch, affine or convex, and the split by which all ranks finish together.

The time ``t_i(n)`` of rank ``i`` on ``n`` samples is modelled as ``a_i + k_i * n``, or as a convex curve where the
measured times show one. A global batch takes as long as its slowest rank, so the best shares minimise
``max_i t_i(n_i)``.
"""

import heapq
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from lightning_hetero.errors import ConfigurationError, ShareError

#: Bends that a curve has at most, so that a report has a fixed size.
MOST_BENDS = 6
#: The part of a batch's time that is taken for its fixed cost where nothing says how large that is.
GUESSED_FIXED = 0.2
#: More samples never take less time. The least slope, as a fraction of a batch's time per sample.
LEAST_SLOPE = 1e-6


class Cost(NamedTuple):
    """Cost of one rank's part of a batch: a straight line, or a convex, piecewise-linear curve.

    Attributes:
        fixed: ``a``, seconds per batch whatever its size.
        per_sample: ``k > 0``, seconds per sample, of a curve up to its first bend.
        bends: of a curve, pairs ``(samples, more)`` with ``more > 0``: each further sample takes ``more`` seconds
            longer than before. Adding up only increases keeps the curve convex.
    """

    fixed: float
    per_sample: float
    bends: tuple[tuple[float, float], ...] = ()

    def seconds(self, samples: float) -> float:
        """Predicted seconds for ``samples`` samples."""
        line = self.fixed + self.per_sample * samples
        return line + sum(more * (samples - at) for at, more in self.bends if samples > at) if self.bends else line

    def samples(self, deadline: float) -> float:
        """Number of samples done by a deadline in seconds, with fractions; below 0 if it is before ``a``."""
        fixed, per_sample = self.fixed, self.per_sample
        for at, more in self.bends:
            if deadline <= fixed + per_sample * at:
                break
            fixed, per_sample = fixed - more * at, per_sample + more
        return (deadline - fixed) / per_sample

    def times(self, factor: float) -> "Cost":
        """The cost of a device that takes ``factor`` times as long."""
        bends = tuple((at, factor * more) for at, more in self.bends)
        return Cost(factor * self.fixed, factor * self.per_sample, bends)

    def in_units(self, width: int) -> "Cost":
        """The same cost for samples that are counted in units of ``width``."""
        bends = tuple((at / width, more * width) for at, more in self.bends)
        return Cost(self.fixed, self.per_sample * width, bends)

    def is_valid(self) -> bool:
        """Whether time is finite, increases with the samples, and bends only upwards."""
        places = [at for at, _ in self.bends]
        upwards = places == sorted(places) and all(more >= 0 for _, more in self.bends)
        return all(map(math.isfinite, row_of(self))) and self.per_sample > 0 and upwards


def curve_below(points: Sequence[tuple[float, float]]) -> Cost:
    """The greatest convex curve that is nowhere above the given points and never decreases.

    Between points it is straight, and beyond the last one it goes on as before it. It does so before the first one,
    too, unless no samples would take less than no time; then the guess is a fixed cost of a fifth of the first time.
    Of more than ``MOST_BENDS`` bends those that matter least are left out; the curve rises there.

    Args:
        points: pairs of samples and seconds, at least two, sorted by samples without repetition.
    """
    times, hull = [math.inf], list[tuple[float, float]]()
    for _, seconds in reversed(points):
        times.append(min(seconds, times[-1]))  # a time that a larger batch does not reach is above the curve
    for (samples, _), seconds in zip(points, reversed(times), strict=False):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], (samples, seconds)):
            hull.pop()
        hull.append((samples, seconds))
    # Without its inner points a convex curve is convex. One bend is for the guess.
    while len(hull) > MOST_BENDS + 1:
        del hull[min(range(1, len(hull) - 1), key=lambda i: _above(hull[i - 1 : i + 2]))]
    least = LEAST_SLOPE * hull[-1][1] / hull[-1][0]
    slopes = [max(_slope(*pair), least) for pair in pairwise(hull)]
    (first, seconds), fixed = hull[0], hull[0][1] - slopes[0] * hull[0][0]
    starts = [0.0, *(samples for samples, _ in hull[1:-1])]
    if fixed < 0:
        fixed = GUESSED_FIXED * seconds
        starts, slopes = [0.0, first, *starts[1:]], [(seconds - fixed) / first, *slopes]
    increases = (later - earlier for earlier, later in pairwise(slopes))
    bends = tuple((at, more) for at, more in zip(starts[1:], increases, strict=True) if more > 0)
    return Cost(fixed, slopes[0], bends)


def _slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


def _above(three: Sequence[tuple[float, float]]) -> float:
    """Height of the curve at the middle one of three points without it, as a fraction above it."""
    left, middle, right = three
    return (left[1] + _slope(left, right) * (middle[0] - left[0])) / middle[1] - 1


class Stepwise(NamedTuple):
    """Cost of a rank's part of a batch that it takes in passes, each of at most ``limit`` samples.

    Each pass pays the fixed cost again: ``p`` of them take ``p * a + k * n`` seconds. Of a curve it is an upper bound,
    as if all passes but the last were full.

    Attributes:
        cost: of one pass.
        limit: most samples in one, at least 1.

    Example::

        >>> from lightning_hetero.batching.shares import Cost, Stepwise
        >>> cost = Stepwise(Cost(fixed=10.0, per_sample=1.0), limit=4)
        >>> [cost.seconds(n) for n in (4, 5, 8, 9)]
        [14.0, 25.0, 28.0, 39.0]
    """

    cost: Cost
    limit: int

    @property
    def fixed(self) -> float:
        """``a``, seconds per pass whatever its size."""
        return self.cost.fixed

    @property
    def per_sample(self) -> float:
        """``k``, seconds per sample; of a curve, up to its first bend."""
        return self.cost.per_sample

    @property
    def bends(self) -> tuple[tuple[float, float], ...]:
        """Of the cost of one pass."""
        return self.cost.bends

    def seconds(self, samples: float) -> float:
        """Predicted seconds for ``samples`` samples."""
        full = passes(samples, self.limit) - 1
        return full * self.cost.seconds(self.limit) + self.cost.seconds(samples - full * self.limit)

    def samples(self, deadline: float) -> float:
        """Number of samples done by a deadline in seconds, with fractions; below 0 if it is before ``a``."""
        full = max(math.floor(deadline / self.cost.seconds(self.limit)), 0)
        more = self.cost.samples(deadline - full * self.cost.seconds(self.limit))
        return full * self.limit + (max(more, 0.0) if full else more)

    def times(self, factor: float) -> "Stepwise":
        """The cost of a device that takes ``factor`` times as long."""
        return Stepwise(self.cost.times(factor), self.limit)

    def is_valid(self) -> bool:
        """Whether time is finite and increases with the samples."""
        return self.cost.is_valid() and self.limit > 0


def passes(samples: float, limit: int) -> int:
    """Passes of at most ``limit`` samples that a part of a batch takes; one also where it has no samples."""
    return max(math.ceil(samples / limit), 1) if limit else 1


def stepwise(total: int, costs: Sequence[Cost], high: Sequence[int]) -> list[Cost | Stepwise]:
    """Costs as they count for a batch: by passes where it is more than all ranks together take in one.

    Args:
        total: samples of the batch.
        costs: of one pass, one per rank.
        high: most samples of each rank in one pass.
    """
    if sum(high) >= total:
        return list(costs)
    return [Stepwise(cost, h) if h else cost for cost, h in zip(costs, high, strict=True)]


def bends_of(numbers: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Bends from a flat row of numbers, two for each; rows may be padded with zeros."""
    return tuple((at, more) for at, more in zip(numbers[::2], numbers[1::2], strict=True) if more > 0)


def cost_of(fixed: float, per_sample: float, *bends: float) -> Cost:
    """A cost from a flat row of numbers, such as :func:`row_of` makes: ``a``, ``k``, then two for each bend."""
    return Cost(fixed, per_sample, bends_of(bends))


def row_of(cost: Cost | Stepwise) -> list[float]:
    """A cost as a flat list of numbers, which checkpoints and reports hold."""
    return [cost.fixed, cost.per_sample, *(number for bend in cost.bends for number in bend)]


def split(
    total: int,
    costs: Sequence[Cost | Stepwise],
    low: Sequence[int] | None = None,
    high: Sequence[int] | None = None,
) -> list[int]:
    """Shares ``n_i`` that minimise ``max_i t_i(n_i)``, exactly.

    Give one sample at a time to the rank that would finish it first. Proof that nothing is faster: write each rank's
    finishing times ``t_i(l_i + 1), ..., t_i(h_i)`` in a list. Each list increases, as costs do, so the greedy choice
    takes them in the order of the merged lists: the earliest ones of all. A split is a choice of as many entries, the
    first ones of each list, and ends with the latest of them. No choice of as many entries has an earlier latest one.

    All but the last few samples are given at once, by the continuous solution, so the effort does not grow with
    ``total``.

    Args:
        total: samples to split, at least 0.
        costs: one per rank: a straight line, or a convex curve; or either of them in passes.
        low: least samples per rank; default 0.
        high: most samples per rank; default ``total``.

    Returns:
        One share per rank, in samples, with ``sum(shares) == total``. Ties go to the lower rank.

    Raises:
        ShareError: a cost is not finite, ``k <= 0``, a curve bends down, or the limits admit no split.
    """
    world = len(costs)
    low = [0] * world if low is None else list(low)
    high = [total] * world if high is None else [min(h, total) for h in high]
    check_limits(total, costs, low, high)

    # Every sample that finishes before the continuous optimum is surely given; one less per rank, for rounding.
    deadline = bound(total, costs, low, high)
    shares = [
        min(h, max(lo, math.floor(cost.samples(deadline)) - 1)) for cost, lo, h in zip(costs, low, high, strict=True)
    ]
    queue = [(costs[i].seconds(shares[i] + 1), i) for i in range(world) if shares[i] < high[i]]
    heapq.heapify(queue)
    for _ in range(total - sum(shares)):
        _, i = heapq.heappop(queue)
        shares[i] += 1
        if shares[i] < high[i]:
            heapq.heappush(queue, (costs[i].seconds(shares[i] + 1), i))
    return shares


#: Multiples, each with the share from which on it counts; the largest first.
Grid = tuple[tuple[int, int], ...]


def multiples(shares: Sequence[float], grid: Grid, low: Sequence[int]) -> list[int]:
    """The multiple of which each share is to be; 1 where it is small, or the next one below is less than the least."""
    found = [next((m for m, least in grid if share >= least), 1) for share in shares]
    return [m if share // m * m >= lo else 1 for m, share, lo in zip(found, shares, low, strict=True)]


def on_grid(
    shares: Sequence[int],
    grid: Grid,
    costs: Sequence[Cost | Stepwise],
    low: Sequence[int],
    high: Sequence[int],
) -> list[int]:
    """Shares of which the large ones are multiples, with the same sum.

    They are rounded down, and what is left goes, one multiple at a time, to whoever would finish first with it. What
    is left in the end is less than a multiple, and goes to one rank.

    Args:
        shares: of :func:`split`.
        grid: the multiples.
        costs: one per rank.
        low: least samples per rank.
        high: most samples per rank. If they leave no room for multiples, shares stay as they are.

    Example::

        >>> from lightning_hetero.batching.shares import Cost, on_grid
        >>> on_grid([150, 75, 31], ((8, 64),), [Cost(0, 1), Cost(0, 2), Cost(0, 5)], [1] * 3, [256] * 3)
        [152, 72, 32]
    """
    each = multiples(shares, grid, low)
    rounded = [share - share % m for share, m in zip(shares, each, strict=True)]
    while left := sum(shares) - sum(rounded):
        parts = [min(m, left) for m in each]
        full, _, rank = min(
            (n + part > h, cost.seconds(n + part), rank)
            for rank, (n, part, h, cost) in enumerate(zip(rounded, parts, high, costs, strict=True))
        )
        if full:
            return list(shares)
        rounded[rank] += parts[rank]
    return rounded


def bound(
    total: int,
    costs: Sequence[Cost | Stepwise],
    low: Sequence[int] | None = None,
    high: Sequence[int] | None = None,
) -> float:
    """Earliest time at which ``total`` samples could be done if a sample could be cut, in seconds.

    No integer split is faster. With no limits it solves ``sum_i max(0, (T - a_i) / k_i) = total`` for straight
    lines; for curves it takes their inverses.
    """
    low = [0] * len(costs) if low is None else low
    high = [total] * len(costs) if high is None else high

    early, late = min(c.fixed for c in costs), max(c.seconds(h) for c, h in zip(costs, high, strict=True))
    for _ in range(100):  # bisection down to the last bit of a float
        middle = 0.5 * (early + late)
        if not early < middle < late:
            break
        early, late = (middle, late) if _done_by(middle, costs, low, high) < total else (early, middle)
    return late


def _done_by(deadline: float, costs: Sequence[Cost | Stepwise], low: Sequence[int], high: Sequence[int]) -> float:
    """Samples, with fractions, that all ranks within their limits have done by a deadline in seconds."""
    return sum(min(h, max(lo, c.samples(deadline))) for c, lo, h in zip(costs, low, high, strict=True))


def makespan(shares: Sequence[int], costs: Sequence[Cost | Stepwise]) -> float:
    """Seconds until the slowest rank has done its share."""
    return max(cost.seconds(n) for n, cost in zip(shares, costs, strict=True))


class TooSlow(NamedTuple):
    """Ranks without which the job is faster, though the batch is split by speed.

    Attributes:
        ranks: which.
        samples: of all ranks in a step.
        step: seconds of the work of a step with all ranks.
        without: seconds of the work of a step without these.
        idle: whether they get no samples.
        keeps: why they keep their least share, in words; empty if nothing is in the way.
    """

    ranks: tuple[int, ...]
    samples: int
    step: float
    without: float
    idle: bool = False
    keeps: str = ""

    def __str__(self) -> str:
        first = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        one = len(self.ranks) == 1
        who = f"rank {first}" if one else f"{len(self.ranks)} ranks: {first}"
        it, its, they, s = ("it", "its", "it", "s") if one else ("them", "their", "they", "")
        speeds = [self.samples / seconds for seconds in (self.step, self.without)]
        speed, faster = (f"{x:.0f}" if x >= 100 else f"{x:.3g}" for x in speeds)
        text = (
            f"Without {who} the job is {self.step / self.without:.2f} times as fast ({faster} samples/s against "
            f"{speed}): even {its} least share of a batch takes longer than the whole batch would without {it}. "
        )
        if self.idle:
            return f"{text}So {they} get{s} no samples until that has changed."
        start = f"tart the job without {it}, with global_batch_size={self.samples} to keep the batch."
        if self.keeps:
            return f"{text}{they.capitalize()} keep{s} {its} least share: {self.keeps}. S{start}"
        if 0 in self.ranks or self.step < WORTH_IDLING * self.without:
            return f"{text}S{start}"
        return f"{text}Under hetero_ddp {they} get{s} no samples once that is sure. Otherwise s{start}"


#: A gain of the job without some ranks is worth a word from this fraction of a step on.
WORTH_LEAVING = 0.05
#: Under hetero_ddp such ranks get no samples if their least share takes so many times as long as a step of the others.
WORTH_IDLING = 1.1


def too_slow(
    total: int,
    costs: Sequence[Cost | Stepwise],
    low: Sequence[int] | None = None,
    high: Sequence[int] | None = None,
    noise: Sequence[float] | None = None,
) -> TooSlow | None:
    """The ranks without which the same batch takes less time, if there are some and the gain is beyond noise.

    A rank can only make a step longer if its least share takes as long as the step. Such ranks are left out, until
    none is left or the others take longer than that. Proof that nothing is faster: whoever is done with the least
    share before the others are done with the batch can take a part of it, and makes no step longer. This takes for
    granted that the least shares of all fit in the batch.

    Args:
        total: samples of a step.
        costs: one per rank.
        low: least samples per rank. Default, and at least where a rank takes any: 1, as a rank that takes part gets
            something to do.
        high: most samples per rank; default ``total``.
        noise: how far each cost may be off, as a fraction; default 0. Ranks that are left out may be so much faster,
            and the others so much slower.
    """
    world = len(costs)
    high = [total] * world if high is None else [min(h, total) for h in high]
    low = [min(max(lo, 1), h) for lo, h in zip([1] * world if low is None else low, high, strict=True)]
    if total < 1 or not sum(low) <= total <= sum(high):
        return None
    longest = max(cost.seconds(lo) for cost, lo in zip(costs, low, strict=True))
    if _done_by(longest, costs, low, high) < total:  # the batch takes longer than anybody's least share
        return None

    def seconds(ranks: Sequence[int], costs: Sequence[Cost | Stepwise]) -> float:
        own = [costs[rank] for rank in ranks]
        return makespan(split(total, own, [low[rank] for rank in ranks], [high[rank] for rank in ranks]), own)

    kept = list(range(world))
    step = without = seconds(kept, costs)
    while fewer := [rank for rank in kept if costs[rank].seconds(low[rank]) < without]:
        if len(fewer) == len(kept) or sum(high[rank] for rank in fewer) < total:
            break
        then = seconds(fewer, costs)
        if then >= without:
            break
        kept, without = fewer, then
    left_out = tuple(sorted(set(range(world)) - set(kept)))
    factors = [1 + x for x in (noise or [0.0] * world)]
    likely = [c.times(1 / f if rank in left_out else f) for rank, (c, f) in enumerate(zip(costs, factors, strict=True))]
    if not left_out or seconds(kept, likely) > (1 - WORTH_LEAVING) * seconds(range(world), likely):
        return None
    return TooSlow(left_out, total, step, without)


def check_limits(total: int, costs: Sequence[Cost | Stepwise], low: Sequence[int], high: Sequence[int]) -> None:
    """See that there are such shares.

    Raises:
        ShareError: there are none.
    """
    for rank, cost in enumerate(costs):
        if not cost.is_valid():
            raise ShareError(
                f"rank {rank} has cost {row_of(cost)}: a must be finite, k finite and above 0, and a curve must bend "
                "upwards only, at increasing numbers of samples."
            )
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


def fixed_shares(balance: Sequence[float], world: int) -> list[float]:
    """Check relative shares given by the user.

    Raises:
        ConfigurationError: not one per rank, or a value that is negative, NaN, infinite, or all zero.
    """
    if not all(isinstance(share, int | float) and not isinstance(share, bool) for share in balance):
        raise ConfigurationError(f"balance={list(balance)}: shares are numbers, one per rank.")
    shares = [float(share) for share in balance]
    if len(shares) != world:
        raise ConfigurationError(
            f"balance={list(balance)} gives {len(shares)} shares for {world} ranks: give one each."
        )
    if not all(math.isfinite(s) and s >= 0 for s in shares) or not any(shares):
        raise ConfigurationError(
            f"balance={list(balance)}: shares are relative speeds, finite, at least 0, and not all 0."
        )
    return shares


def per_rank(name: str, value: int | Sequence[int], world: int) -> tuple[int, ...]:
    """Check limits given by the user: one number for all ranks, or one each.

    Raises:
        ConfigurationError: not whole numbers of at least 0, or not one per rank.
    """
    if not isinstance(value, int | list | tuple):
        raise ConfigurationError(f"{name}={value!r}: give a whole number of samples, or a list with one per rank.")
    limits = (value,) * world if isinstance(value, int) else tuple(value)
    if len(limits) != world:
        raise ConfigurationError(
            f"{name}={list(limits)} gives {len(limits)} limits for {world} ranks: one, or one each."
        )
    if any(type(n) is not int or n < 0 for n in limits):
        raise ConfigurationError(f"{name}={list(limits)}: limits are whole numbers of samples, at least 0.")
    return limits


def check_bounds(low: Sequence[int], high: Sequence[int]) -> None:
    """See that no rank must take more than it may.

    Raises:
        ShareError: one must.
    """
    if any(least > most for least, most in zip(low, high, strict=True)):
        raise ShareError(f"min_batch_size={list(low)} exceeds max_batch_size={list(high)} on some rank.")
