"""Deals of a global batch: which rank takes which samples, where samples differ in cost.

Rank ``i`` takes ``a_i + k_i * cost`` seconds for its part, and a batch as long as its slowest rank. The cost of a part
is the sum of its samples' costs, as of tokens in a packed batch (additive); or, where a part is padded to its longest
sample, the number of its samples times the longest.

All ranks compute the same deal. So results depend neither on an algorithm of NumPy that may differ between machines
(sorting that is not stable, sums in any order) nor on fused operations.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: A deal this near to the bound is not improved any more.
NEAR = 1e-3
#: Improvements of one deal, at most, for each rank.
ROUNDS = 8
#: A rank exchanges samples with so many others, those that are done first.
PARTNERS = 8
#: So few samples are dealt again by search, which looks at so many nodes in all.
FEW, NODES = 12, 2000
#: Padded batches are dealt optimally to so many ranks; among more, runs go by speed.
EXACT = 6


class Machines(NamedTuple):
    """Costs of the ranks, and how many samples each may take.

    Attributes:
        fixed: ``a`` of each rank, seconds.
        per_unit: ``k`` of each rank, seconds per unit of cost.
        low: least samples of each rank.
        high: most samples of each rank; with ``low`` they leave room for the batch.
    """

    fixed: Floats
    per_unit: Floats
    low: Ints
    high: Ints

    @classmethod
    def of(
        cls,
        fixed: Sequence[float],
        per_unit: Sequence[float],
        low: Sequence[int] | None = None,
        high: Sequence[int] | None = None,
    ) -> "Machines":
        """Machines from plain numbers.

        Args:
            fixed: ``a`` of each rank.
            per_unit: ``k`` of each rank.
            low: least samples; default 0.
            high: most samples; default: no limit.
        """
        world = len(fixed)
        return cls(
            np.asarray(fixed, np.float64),
            np.asarray(per_unit, np.float64),
            np.asarray([0] * world if low is None else low, np.int64),
            np.asarray([2**62] * world if high is None else high, np.int64),
        )


def deal_additive(costs: Any, machines: Machines) -> Ints:
    """Deal samples so that the slowest rank is done early, where the costs of a rank's samples add up.

    The longest sample first, to the rank that would be done with it first (LPT on related machines: Gonzalez, Ibarra,
    Sahni 1977); in the midst of a large batch, blocks of samples of nearly the same cost are dealt at once. Then the
    slowest rank gives a sample away, or exchanges one; few samples are dealt again by search; as long as that helps.

    Args:
        costs: of the samples.
        machines: the ranks.

    Returns:
        The rank of each sample.

    Example: the second rank is half as fast::

        >>> from lightning_hetero.batching.deal import Machines, deal_additive
        >>> deal_additive([4.0, 1.0, 2.0, 2.0], Machines.of([0.0, 0.0], [1.0, 2.0])).tolist()
        [0, 1, 0, 1]
    """
    costs = np.asarray(costs, np.float64)
    state = _Deal(costs, machines)
    state.longest_first()
    state.improve()
    return state.owner


class _Deal:
    """An additive deal under way."""

    def __init__(self, costs: Floats, machines: Machines) -> None:
        self.costs, self.machines = costs, machines
        self.world, self.nodes = len(machines.fixed), NODES
        self.owner = np.full(len(costs), -1, np.int64)
        self.loads: Floats = np.zeros(self.world)
        self.counts: Ints = np.zeros(self.world, np.int64)

    @property
    def seconds(self) -> Floats:
        return self.machines.fixed + self.machines.per_unit * self.loads

    def longest_first(self) -> None:
        """Deal the longest and the shortest samples one by one, and those between in blocks."""
        order = np.argsort(-self.costs, kind="stable")
        alone, block = 2 * self.world, max(4 * self.world, len(order) // 64)
        at = self._one_by_one(order[:alone], len(order))
        while len(order) - at - block >= max(alone, int(np.maximum(self.machines.low - self.counts, 0).sum())):
            at += self._block(order[at : at + block])
        self._one_by_one(order[at:], len(order) - at)

    def _one_by_one(self, samples: Ints, left: int) -> int:
        """Give each sample to the rank that is done with it first; ``left``: samples that are not dealt yet."""
        fixed, per_unit, low, high = self.machines
        missing = int(np.maximum(low - self.counts, 0).sum())
        ends = self.seconds
        for sample in samples.tolist():
            then = ends + per_unit * self.costs[sample]
            if left <= missing:  # just enough for those who have to take some yet
                then[self.counts >= low] = np.inf
            then[self.counts >= high] = np.inf
            rank = int(then.argmin())
            missing -= bool(self.counts[rank] < low[rank])
            self.owner[sample], left = rank, left - 1
            self.loads[rank] += self.costs[sample]
            self.counts[rank] += 1
            ends[rank] = fixed[rank] + per_unit[rank] * self.loads[rank]
        return len(samples)

    def _block(self, samples: Ints) -> int:
        """Deal samples of nearly the same cost to the ranks that would be done first with as many equal ones."""
        block, cost = len(samples), float(self.costs[samples[len(samples) // 2]])
        room = self.machines.high - self.counts
        for width in (min(4 * -(-block // self.world), block), block):  # most that one rank takes of the block
            then = self.seconds[:, None] + self.machines.per_unit[:, None] * (cost * np.arange(1, width + 1))
            if (room < width).any():
                then[np.arange(width) >= room[:, None]] = np.inf
            last = np.partition(then, block - 1, axis=None)[block - 1]
            if (then[:, -1] > last).all():  # nobody would take more
                break
        chosen = np.flatnonzero(then < last)
        chosen = np.concatenate([chosen, np.flatnonzero(then == last)[: block - len(chosen)]])
        order = np.argsort(then.ravel()[chosen], kind="stable")  # in which they are done
        ranks = (chosen // width)[order]
        self.owner[samples] = ranks
        np.add.at(self.loads, ranks, self.costs[samples])
        np.add.at(self.counts, ranks, 1)
        return block

    def improve(self) -> None:
        bound = _bound(self.costs, self.machines)
        for _ in range(ROUNDS * self.world):
            seconds = self.seconds
            worst = int(seconds.argmax())
            if seconds[worst] <= (1 + NEAR) * bound or not self.counts[worst]:
                return
            if not (self._exchange(worst, float(seconds[worst])) or self._deal_again(worst, seconds)):
                return

    def _exchange(self, worst: int, now: float) -> bool:
        """Let a rank give one sample away, for another one or none, so that both are done earlier than it now is."""
        fixed, per_unit, low, high = self.machines
        first = np.argsort(self.seconds, kind="stable")[:PARTNERS]
        first = first[first != worst]
        own, others = np.flatnonzero(self.owner == worst), np.flatnonzero(np.isin(self.owner, first))
        ranks = np.concatenate([self.owner[others], first])  # the last ones: none in exchange
        gets = np.concatenate([self.costs[others], np.zeros(len(first))])
        more = self.costs[own][:, None] - gets[None, :]
        then = np.maximum(
            fixed[worst] + per_unit[worst] * (self.loads[worst] - more),
            fixed[ranks] + per_unit[ranks] * (self.loads[ranks] + more),
        )
        alone = then[:, len(others) :]
        alone[:, self.counts[first] >= high[first]] = np.inf
        if self.counts[worst] <= low[worst]:
            alone[:] = np.inf
        if not then.size:
            return False
        best = int(then.argmin())
        if not then.flat[best] < now * (1 - 1e-12):
            return False
        give, take = divmod(best, len(ranks))
        self.owner[own[give]] = ranks[take]
        if take < len(others):
            self.owner[others[take]] = worst
        self._count()
        return True

    def _deal_again(self, worst: int, seconds: Floats) -> bool:
        """Deal the samples of this rank and of others again by search: of each other one, then of all, if few."""
        others = [rank for rank in np.argsort(seconds, kind="stable").tolist() if rank != worst]
        for ranks in [*([worst, other] for other in others), [worst, *others]]:
            some = np.flatnonzero(np.isin(self.owner, ranks))
            if len(some) <= FEW and self.nodes > 0 and self._search(some, ranks, float(seconds[worst])):
                self._count()
                return True
        return False

    def _search(self, samples: Ints, ranks: list[int], now: float) -> bool:
        """Find the best deal of a few samples, by depth first; whether it ends before ``now``."""
        order = samples[np.argsort(-self.costs[samples], kind="stable")].tolist()
        costs = [float(self.costs[sample]) for sample in order]
        rest = [0.0, *np.cumsum(costs[::-1]).tolist()][::-1]  # cost of those from one on
        fixed, per_unit, low, high = (column[ranks].tolist() for column in self.machines)
        loads, counts, chosen = [0.0] * len(ranks), [0] * len(ranks), [0] * len(order)
        best, found = now * (1 - 1e-12), list[int]()

        def go_on(at: int) -> None:
            nonlocal best, found
            self.nodes -= 1
            missing = sum(max(lo - n, 0) for lo, n in zip(low, counts, strict=True))
            if self.nodes < 0 or missing > len(order) - at:
                return
            if at == len(order):
                best, found = max(a + k * load for a, k, load in zip(fixed, per_unit, loads, strict=True)), list(chosen)
                return
            if sum((best - a) / k - load for a, k, load in zip(fixed, per_unit, loads, strict=True)) < rest[at]:
                return
            then = sorted((fixed[i] + per_unit[i] * (loads[i] + costs[at]), i) for i in range(len(ranks)))
            for seconds, i in then:
                if seconds >= best:
                    return
                if counts[i] < high[i]:
                    before, chosen[at] = loads[i], i
                    loads[i], counts[i] = before + costs[at], counts[i] + 1
                    go_on(at + 1)
                    loads[i], counts[i] = before, counts[i] - 1

        go_on(0)
        if found:
            self.owner[order] = [ranks[i] for i in found]
        return bool(found)

    def _count(self) -> None:
        self.loads = np.bincount(self.owner, self.costs, self.world).astype(np.float64)
        self.counts = np.bincount(self.owner, minlength=self.world)


def _bound(costs: Floats, machines: Machines) -> float:
    """Seconds that no additive deal can beat: samples are cut, and a rank may take any number of them."""
    fixed, per_unit = machines.fixed, machines.per_unit
    takes = machines.high > 0
    total, order = float(np.cumsum(costs)[-1]) if len(costs) else 0.0, np.argsort(fixed[takes], kind="stable")
    a, speed = fixed[takes][order], 1 / per_unit[takes][order]
    # With the first m ranks at work: sum (T - a_i) / k_i = total.
    ends = (total + np.cumsum(a * speed)) / np.cumsum(speed)
    return max(float(ends.min()), float(fixed.max()))


def deal_padded(lengths: Any, machines: Machines) -> Ints:
    """Deal samples so that the slowest rank is done early, where a part costs its samples times the longest one.

    Sorted by length, each rank takes a run. That loses nothing: among parts of given sizes, sort the ranks by their
    longest sample, and let them take runs of these sizes from the shortest sample on. The ``j`` first ranks together
    had so many samples that are no longer than the ``j``-th rank's longest, so no run's longest is longer. Fixed
    costs, limits and ranks without samples change nothing of this: sizes stay as they are.

    Within a time ``T``, a rank that begins at the sample of length ``m`` takes ``(T - a_i) / (k_i m)`` samples; who
    begins farther on gets farther. So the farthest sample that each set of ranks reaches from the longest on follows
    from those of smaller sets, and ``T`` from bisection. Up to 6 ranks that is the optimum; among more, only two orders
    of the ranks are tried: by speed, both ways.

    Args:
        lengths: of the samples.
        machines: the ranks.

    Returns:
        The rank of each sample.

    Example::

        >>> from lightning_hetero.batching.deal import Machines, deal_padded
        >>> deal_padded([9, 2, 2, 8, 2, 2], Machines.of([0.0, 0.0], [1.0, 1.0])).tolist()
        [0, 1, 1, 0, 1, 1]
    """
    lengths = np.asarray(lengths, np.float64)
    order = np.argsort(-lengths, kind="stable")
    owner, at = np.empty(len(lengths), np.int64), 0
    for rank, size in _Runs(lengths[order], machines).best():
        owner[order[at : at + size]] = rank
        at += size
    return owner


class _Runs:
    """Runs of lengths, the longest first."""

    def __init__(self, lengths: Floats, machines: Machines) -> None:
        self.lengths, self.samples = [*lengths.tolist(), 0.0], len(lengths)  # the last length is that of no sample
        self.fixed, self.per_unit = machines.fixed.tolist(), machines.per_unit.tolist()
        self.low, self.high = machines.low.tolist(), np.minimum(machines.high, self.samples).tolist()
        self.ranks = range(len(self.fixed))
        self.least = _bound(lengths, machines)

    def best(self) -> list[tuple[int, int]]:
        """The ranks in the order of their runs, each with the size of its run."""
        by_speed = sorted(self.ranks, key=lambda rank: (self.per_unit[rank], rank))
        early, late = self.least, 1.5 * self.least
        while (found := self.find(late, by_speed)) is None:
            early, late = late, 2 * late + 1e-300
        late = self.seconds(found)
        while late - early > 1e-9 * late:
            middle = 0.5 * (early + late)
            if (better := self.find(middle, by_speed)) is None:
                early = middle
            else:
                found, late = better, min(self.seconds(better), middle)
        return found

    def find(self, limit: float, by_speed: list[int]) -> list[tuple[int, int]] | None:
        """Runs with which all ranks are done within a time; ``None``: none are found."""
        budgets = [(limit - a) / k for a, k in zip(self.fixed, self.per_unit, strict=True)]
        if len(self.ranks) <= EXACT:
            return self._in_any_order(budgets)
        return self._in_order(budgets, by_speed) or self._in_order(budgets, by_speed[::-1])

    def seconds(self, runs: list[tuple[int, int]]) -> float:
        """Seconds until the slowest rank is done."""
        at, latest = 0, max(self.fixed)
        for rank, size in runs:
            latest = max(latest, self.fixed[rank] + self.per_unit[rank] * (size * self.lengths[at]))
            at += size
        return latest

    def _in_order(self, budgets: list[float], order: list[int]) -> list[tuple[int, int]] | None:
        at, room, runs = 0, self.samples - sum(self.low), []
        for rank in order:
            room += self.low[rank]
            end = min(self._end(rank, at, budgets[rank]), room)
            if end < at + self.low[rank]:
                return None
            runs.append((rank, end - at))
            at = end
        return runs if at == self.samples else None

    def _in_any_order(self, budgets: list[float]) -> list[tuple[int, int]] | None:
        sets = _sets(len(budgets))
        room = self.samples - sum(self.low)
        reached, last = [-1] * (len(sets) + 1), [-1] * (len(sets) + 1)  # by set of ranks; -1: it has no runs
        reached[0] = 0
        for members, without in sets:
            whole, most = without[0] | 1 << members[0], -1
            for rank, before in zip(members, without, strict=True):
                at = reached[before]
                end = self._end(rank, at, budgets[rank]) if at >= 0 else -1
                if end > most and end >= at + self.low[rank]:
                    most, last[whole] = end, rank
            reached[whole] = min(most, room + sum(self.low[rank] for rank in members))
        if reached[-1] < self.samples:
            return None
        runs, left = [], len(sets)
        while left:
            rank, end = last[left], reached[left]
            left ^= 1 << rank
            runs.append((rank, end - reached[left]))
        return runs[::-1]

    def _end(self, rank: int, at: int, budget: float) -> int:
        """The sample that a rank reaches from one on, which is not its own any more."""
        longest, most = self.lengths[at], self.high[rank]
        return at + (most if budget >= longest * most else math.floor(budget / longest))


@lru_cache(maxsize=EXACT)
def _sets(world: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All sets of ranks but the empty one: the ranks, and for each of them the set without it, as a number."""
    return [
        (members, tuple(number ^ 1 << rank for rank in members))
        for number in range(1, 2**world)
        if (members := tuple(rank for rank in range(world) if number >> rank & 1))
    ]
