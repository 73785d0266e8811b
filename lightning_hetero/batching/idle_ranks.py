"""Ranks without samples: which, since when, and how often they are tried again."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from lightning_hetero.batching.plan import Plan
from lightning_hetero.batching.reports import Idling, Report, StepTimes
from lightning_hetero.batching.shares import WORTH_IDLING, Cost, TooSlow, stepwise, too_slow


class ShareLimits(NamedTuple):
    """Limits of the shares of a step.

    Attributes:
        total: samples of a full step.
        low: least samples per rank.
        high: most samples per rank, in one pass.
        in_passes: whether some rank needs several.
    """

    total: int
    low: Sequence[int]
    high: Sequence[int]
    in_passes: bool

    def least_seconds(self, costs: Sequence[Cost], ranks: Sequence[int]) -> float:
        """Seconds of the least share of any of these ranks, of which each gets a sample at least."""
        return max(costs[rank].seconds(min(max(self.low[rank], 1), self.high[rank])) for rank in ranks)

    def too_slow(self, costs: Sequence[Cost], noise: Sequence[float] | None = None) -> TooSlow | None:
        """The ranks without which a step takes less time; see :func:`~lightning_hetero.batching.shares.too_slow`."""
        high = [self.total if h else 0 for h in self.high] if self.in_passes else self.high
        return too_slow(self.total, stepwise(self.total, costs, self.high), self.low, high, noise)


class IdleRanks:
    """Choice of the ranks that get no samples, because even their least share would make every step longer.

    Args:
        least_given: whether the user has given the least shares, which ranks keep then.
    """

    #: A rank gets no samples only if its own work on its least share has taken so many times as long as a whole step of
    #: the others would, and as any of their least shares, in each of so many looks in a row, of so many seconds.
    GAIN, SLOW, LOOKS, SPAN = WORTH_IDLING, 2.0, 4, 3.0
    #: If steps then do not become shorter, so many looks are needed to try it again, and each time twice as many.
    AGAIN = 64
    #: The part of the time that probes of ranks without samples take, and the least steps from one to the next.
    PROBE_PART, PROBE_STEPS = 0.008, 64

    def __init__(self, least_given: bool) -> None:
        self._least_given = least_given
        self._sure = self.LOOKS  # looks that leave a rank without samples

    def too_slow(self, limits: ShareLimits, reports: Sequence[Report], idle: Sequence[int]) -> TooSlow | None:
        """Ranks that make the job slower, if that was measured: at the least share, not by times for larger ones.

        Args:
            limits: of the shares.
            reports: one per rank.
            idle: ranks without samples now.
        """
        found = limits.too_slow([r.cost for r in reports], [r.error for r in reports])
        if found is None or any(reports[rank].samples >= max(limits.low[rank], 1) + 1 for rank in found.ranks):
            return None
        return found._replace(idle=set(found.ranks) <= set(idle), keeps=self._keeps(found.ranks, reports, limits))

    def _keeps(self, ranks: Sequence[int], reports: Sequence[Report], limits: ShareLimits) -> str:
        """The reason why these ranks keep their least shares, if there is one."""
        if self._least_given and any(limits.low[rank] for rank in ranks):
            return "min_batch_size is given"
        reasons = (Idling(int(reports[rank].idling)).reason for rank in ranks)
        return next(filter(None, reasons), "")

    def choose(
        self,
        latest: Plan,
        reports: Sequence[Report],
        slow: TooSlow | None,
        looks: Sequence[StepTimes],
        limits: ShareLimits,
        plan_without: Callable[[tuple[int, ...]], Plan],
    ) -> Plan | None:
        """The plan by which other ranks get no samples than before, or at other times some; ``None``: all stays.

        Args:
            latest: the plan in force.
            reports: one per rank.
            slow: of :meth:`too_slow`.
            looks: times of steps by that plan.
            limits: of the shares.
            plan_without: makes a plan for what is known now, by which these ranks get no samples.
        """
        costs, idle = [r.cost for r in reports], latest.idle
        if idle:  # known by probes alone
            found = limits.too_slow(costs)
            stay = tuple(rank for rank in idle if found is not None and rank in found.ranks)
            if stay != idle:
                # So that it does not come and go again and again.
                self._sure = max(self._sure, min(2 * self._sure, self.AGAIN))
                return plan_without(stay)
        ranks = () if slow is None else slow.ranks
        new = [rank for rank in ranks if rank not in idle and not self._keeps([rank], reports, limits)]
        new.sort(key=lambda rank: -limits.least_seconds(costs, [rank]))
        for count in range(len(new), 0, -1):
            plan = plan_without(tuple(sorted({*idle, *new[:count]})))
            if self._surely_shortens(latest, plan, looks, limits):
                return plan
        plan = replace(latest, probe=plan_without(idle).probe)
        return plan if idle and not 0.8 < plan.probe / latest.probe < 1.25 else None

    def _surely_shortens(self, latest: Plan, plan: Plan, looks: Sequence[StepTimes], limits: ShareLimits) -> bool:
        """Whether it was so in many looks in a row that ranks took longer than a step would without them."""
        latest_looks, costs = list[StepTimes](), plan.costs
        while len(latest_looks) < self._sure or sum(look.shortest for look in latest_looks) < self.SPAN:
            if len(latest_looks) == len(looks):
                return False
            latest_looks.append(looks[-1 - len(latest_looks)])
        kept = [rank for rank in range(len(costs)) if rank not in plan.idle]
        out = [rank for rank in plan.idle if rank not in latest.idle]
        bar = max(self.GAIN * plan.seconds(limits.total, costs), self.SLOW * limits.least_seconds(costs, kept))
        usual = [cost.seconds(n) for cost, n in zip(costs, latest.split([limits.total])[0], strict=True)]
        for look in latest_looks:
            own = [work / steps for work, steps in zip(look.work, look.steps, strict=True)]
            slowdown = max(own[rank] / max(usual[rank], 1e-9) for rank in kept)  # of the others, at the same time
            if min(own[rank] for rank in out) < bar * max(slowdown, 1.0):
                return False
        return True

    def with_probes(self, plan: Plan, limits: ShareLimits) -> Plan:
        """A plan with the number of steps from one to the next in which ranks without samples get their least share."""
        if not plan.idle:
            return plan
        longer = limits.least_seconds(plan.costs, plan.idle) / plan.seconds(limits.total, plan.costs) - 1
        return replace(plan, probe=max(self.PROBE_STEPS, math.ceil(longer / self.PROBE_PART)))

    def taken_back(self) -> None:
        """Steps have not become shorter without some ranks: be surer the next time."""
        self._sure = max(self.AGAIN, 2 * self._sure)
