"""The agreed plan: which rank takes how many samples of which step.

Every rank holds the same plans, because every rank derives them from the same gathered reports by the same
arithmetic. A new plan starts at a step that no rank's sampler has drawn yet.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from lightning_hetero.errors import ConfigurationError, ShareError
from lightning_hetero.workload.shares import Cost, makespan, split


class Report(NamedTuple):
    """What a rank tells the others at a pulse; all floats, so that one small tensor carries it.

    Attributes:
        fixed: ``a`` of its cost model, seconds.
        per_sample: ``k`` of its cost model, seconds per sample.
        error: relative standard error of the model at the present share; infinite while it is not ready.
        drawn: first step that its samplers have not drawn yet.
        samples: samples per step that it processed since the last pulse, mean.
        compute: seconds per step of its own work since the last pulse, mean.
        wait: seconds per step that it waited for others since the last pulse, mean.
        stop: above 0 if it was asked to stop (SIGTERM).
    """

    fixed: float
    per_sample: float
    error: float
    drawn: float
    samples: float
    compute: float
    wait: float
    stop: float


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
    """

    start: int
    costs: tuple[Cost, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    reach: tuple[float, ...] = ()

    def split(self, sizes: Sequence[int]) -> list[list[int]]:
        """Split the batches of one step (one per loader) in equal proportions, as their weights must be equal.

        The unit is the greatest part that divides all batches: with one loader a sample, with batches of 64 and 32
        two samples and one. Where a tail is too small for all to have their least, the slowest ranks have nothing.

        Args:
            sizes: samples in the global batch of each loader; 0 for a loader that has run out.

        Returns:
            For each loader the shares per rank, in samples.

        Raises:
            ShareError: the upper limits leave no room.
        """
        units = math.gcd(*sizes)
        if units == 0:
            return [[0] * len(self.costs) for _ in sizes]
        shares = _split_units(self, units, sum(sizes) // units)
        return [[share * (size // units) for share in shares] for size in sizes]


@lru_cache(maxsize=256)  # asked at every step, with one answer for all but the tails
def _split_units(plan: Plan, units: int, width: int) -> list[int]:
    """Shares of ``units`` units, each of ``width`` samples."""
    low = [-(-n // width) for n in plan.low]
    high = [n // width for n in plan.high]
    if plan.reach:
        high = [min(h, max(lo, math.ceil(part * units))) for h, lo, part in zip(high, low, plan.reach, strict=True)]
    order = sorted(range(len(low)), key=lambda rank: (plan.costs[rank].per_sample, rank))
    if sum(low) > units:  # a tail too small for all to have their least
        low = [n if n > 1 else 0 for n in low]
    while sum(low) > units:  # the slowest sit this one out
        rank = order.pop()
        low[rank] = high[rank] = 0
    if sum(high) < units:  # too small even for one
        low, high = [0] * len(low), [n // width for n in plan.high]
    return split(units, [Cost(c.fixed, c.per_sample * width) for c in plan.costs], low, high)


class Planner:
    """Turns reports into plans.

    Args:
        world: number of ranks that share a batch.
        balance: ``"auto"`` measures; ``"off"`` splits evenly; a list gives fixed relative shares.
        low: least samples per rank: one number for all, or one per rank. Default 1 (0 for a rank of share 0).
        high: most samples per rank: one number for all, or one per rank. Default: no limit.
        min_gain: smallest predicted gain for which shares change, as a fraction of the step's time.

    Raises:
        ConfigurationError: a negative, NaN or all-zero share, a wrong number of shares or limits.
    """

    #: A predicted gain must also exceed this many standard errors of the worst-known rank, or noise moves the shares.
    CAUTION = 1.5
    #: No rank's share grows beyond this multiple of what it has been seen to manage.
    GROWTH = 2.0

    def __init__(
        self,
        world: int,
        balance: Literal["auto", "off"] | Sequence[float] = "auto",
        low: int | Sequence[int] | None = None,
        high: int | Sequence[int] | None = None,
        min_gain: float = 0.03,
    ) -> None:
        self.world = world
        self.auto = balance == "auto"
        self.min_gain = min_gain
        self.total = 0  # samples of a full step; 0 while nobody knows
        self._learns = False  # whether reports tell how large steps are
        self._held = False  # whether shares stay even, whatever is measured
        self.least = 1  # of each rank, where the user has not said and the batch allows it
        self._may_raise = low is None
        shares = [1.0] * world if isinstance(balance, str) else fixed_shares(balance, world)
        self._low = _per_rank("min_batch_size", [min(1, math.ceil(s)) for s in shares] if low is None else low, world)
        self._high = _per_rank("max_batch_size", 2**62 if high is None else high, world)
        if any(lo > hi for lo, hi in zip(self._low, self._high, strict=True)):
            raise ShareError(
                f"min_batch_size={list(self._low)} exceeds max_batch_size={list(self._high)} on some rank."
            )
        barred = tuple(0 if s == 0 else h for s, h in zip(shares, self._high, strict=True))
        costs = tuple(Cost(0.0, 1.0 / s if s else 1.0) for s in shares)
        self.plans = [Plan(0, costs, self._low, barred)]
        self._most = [0.0] * world  # the largest part of a batch that each rank has been given so far

    def hold(self, held: bool) -> None:
        """Keep measured shares even from the first step on, as where every rank has data of its own, or let them move.

        Called before the first batch of a dataloader is drawn, which is when all plans may be forgotten.
        """
        self._held = held
        if held and self.auto:
            self.plans = [Plan(0, (Cost(0.0, 1.0),) * self.world, self._low, self._high)]

    def expect(self, total: int | None) -> None:
        """Say how many samples a full step holds (of all loaders together).

        Args:
            total: samples; ``None`` if steps differ in size, so that only reports can tell what is usual; 0 if no plan
                sizes them.

        Raises:
            ShareError: the limits per rank cannot be met with ``total`` samples.
        """
        self.total, self._learns = total or 0, total is None
        if total == 0:
            return
        if self._may_raise and (total is None or self.least * self.world <= total):
            self._low = tuple(max(low, self.least) if low else 0 for low in self._low)
            self.plans = [replace(plan, low=self._low) for plan in self.plans]
        if total is None:
            return
        plan = self.plans[-1]
        if any(self._low) and sum(self._low) > total:
            raise ShareError(
                f"a global batch of {total} samples is too small for {self.world} ranks that take at least "
                f"{list(self._low)}. Raise the batch size, lower `min_batch_size`, or use fewer ranks."
            )
        self._note(plan.split([total])[0])

    def at(self, step: int) -> Plan:
        """The plan in force at ``step``, which may be as old as the step before the latest update."""
        for plan in reversed(self.plans):
            if plan.start <= step:
                return plan
        raise LookupError(f"the plan of step {step} is no longer known; there are those from {self.plans[0].start} on")

    def shares(self, step: int) -> list[int]:
        """Shares of a full batch at ``step``, in samples."""
        return self.at(step).split([self.total])[0]  # zeros where streams decide, whose batches no plan sizes

    def update(self, step: int, reports: Sequence[Report]) -> Plan | None:
        """Solve the split again; deterministic in its arguments, so that all ranks agree.

        Args:
            step: the present step, the same on every rank.
            reports: one per rank, all taken at the same earlier step.

        Returns:
            The new plan if it pays, else ``None``.
        """
        latest = self.plans[-1]
        if self._learns and (total := round(sum(report.samples for report in reports))):
            self.total = total
            if not any(self._most):
                self._note(latest.split([total])[0])
        moves = self.auto and self.total and not self._held
        if not moves or latest.start > step or any(math.isinf(r.error) for r in reports):
            return None
        costs = tuple(Cost(r.fixed, r.per_sample) for r in reports)
        reach = tuple(min(1.0, self.GROWTH * part) for part in self._most)
        start = max(int(r.drawn) for r in reports)
        best, even = (Plan(start, c, self._low, self._high, reach) for c in (costs, (Cost(0.0, 1.0),) * self.world))
        now, then, same = (makespan(plan.split([self.total])[0], costs) for plan in (latest, best, even))
        least = max(self.min_gain, self.CAUTION * max(r.error for r in reports))
        if same <= now and then >= (1 - least) * same:
            plan = even  # nothing to gain, as where a batch costs the same whatever its size: do not wander
        elif then < (1 - least) * now:
            plan = best
        else:
            return None
        shares = plan.split([self.total])[0]
        if shares == latest.split([self.total])[0]:
            return None
        self._note(shares)
        before = self.at(max(step - 1, 0))  # what has just been done may still be asked for
        self.plans = [p for p in self.plans if p is before or p.start >= step] + [plan]
        return plan

    def state_dict(self) -> dict[str, Any]:
        """The latest plan and what it rests on; builtins only."""
        plan = self.plans[-1]
        return {
            "costs": [list(cost) for cost in plan.costs],
            "reach": list(plan.reach),
            "most": list(self._most),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the plan of :meth:`state_dict` from the first step on, within this planner's limits."""
        costs = tuple(Cost(*cost) for cost in state["costs"])
        self.plans = [Plan(0, costs, self._low, self._high, tuple(state["reach"]))]
        self._most = list(state["most"])

    def _note(self, shares: Sequence[int]) -> None:
        self._most = [max(most, n / self.total) for most, n in zip(self._most, shares, strict=True)]


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


def _per_rank(name: str, value: int | Sequence[int], world: int) -> tuple[int, ...]:
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
