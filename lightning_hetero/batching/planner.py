"""Planner: how many samples of which step each rank takes, the same on all ranks.

Every rank derives the same plans, from the same reports, or follows those of rank 0 where ranks go at their own pace. A
new plan starts at a step that no sampler has drawn yet.

64 samples among 7 ranks are 10 for one of them and 9 for the others. If that is always the same rank, it falls behind
by a tenth of a step in every step. So what is left over goes to each rank in turn.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from statistics import median
from typing import Any, Literal, NamedTuple

from lightning_hetero.batching.passes import even_sizes
from lightning_hetero.batching.shares import (
    MOST_BENDS,
    Cost,
    Curve,
    Stepwise,
    TooSlow,
    bends_of,
    bound,
    check_bounds,
    check_limits,
    cost_of,
    fixed_shares,
    makespan,
    passes,
    per_rank,
    row_of,
    split,
    stepwise,
    too_slow,
)
from lightning_hetero.errors import ShareError

_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples, without their whole parts, lie evenly between 0 and 1
_TINY = 1e-9  # more than rounding errors of floats


def exact_shares(
    units: int, costs: Sequence[Cost | Curve | Stepwise], low: Sequence[int], high: Sequence[int]
) -> list[float]:
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

        >>> from lightning_hetero.batching.planner import rotating_shares
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
_split, _exact = _remembered(split), _remembered(exact_shares)


@dataclass(frozen=True)
class Plan:
    """Split of the batches from step ``start`` on.

    Attributes:
        start: first step (batches since the start of the fit) of this plan.
        costs: cost per rank; for fixed shares, ``k`` is the inverse share.
        low: least samples per rank.
        high: most samples per rank, in one pass. A batch that is more than that of all ranks takes several.
        reach: largest part of a batch that each rank is trusted with, 0 to 1; beyond what it has been seen to manage
            its cost is an extrapolation.
        need: least samples per rank of a batch that is too small for ``low``; default: the same.
        by_samples: whether batches are split by samples although it is known what these cost: that does not explain
            how long steps take.
    """

    start: int
    costs: tuple[Cost | Curve, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    reach: tuple[float, ...] = ()
    need: tuple[int, ...] = ()
    by_samples: bool = False

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
        shares = _split(*task) if turn is None else rotating_shares(_exact(*task), turn)
        return [[share * (size // units) for share in shares] for size in sizes]

    def held_back(self, total: int) -> bool:
        """Whether a rank would take more of a batch if it were trusted with that."""
        return self.split([total]) != replace(self, reach=()).split([total])

    def passes(self, shares: Sequence[int]) -> list[int]:
        """The passes in which each rank runs its share of a batch."""
        return [passes(share, most) for share, most in zip(shares, self.high, strict=True)]

    def pass_sizes(self, shares: Sequence[int]) -> list[list[int]]:
        """Samples of each pass of each rank."""
        return [even_sizes(share, count) for share, count in zip(shares, self.passes(shares), strict=True)]


Task = tuple[int, tuple[Cost | Curve | Stepwise, ...], tuple[int, ...], tuple[int, ...]]  # as `split` takes it


@_remembered
def _task(plan: Plan, units: int, width: int) -> Task:
    """The task of a split: ``units`` units, each of ``width`` samples, and the limits."""
    low = [-(-n // width) for n in plan.low]
    costs: list[Cost | Curve | Stepwise] = [cost.in_units(width) for cost in plan.costs]
    most = [n // width for n in plan.high]
    if width == 1 and any(most) and sum(most) < units:  # not for several loaders
        costs = stepwise(units, plan.costs, most)
        most = [units if n else 0 for n in most]
    high = list(most)
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
        low, high = [0] * len(low), most
    return units, tuple(costs), tuple(low), tuple(high)


class Report(NamedTuple):
    """Report of a rank to the others. It fits in a row of floats of a fixed size, so one small tensor carries it.

    Attributes:
        fixed: ``a`` of its cost, seconds.
        per_sample: ``k`` of its cost, seconds per sample; of a curve, up to its first bend.
        error: how far its cost may be off by noise, as a fraction; infinite while nothing is known.
        drawn: first step that its samplers have not drawn yet.
        samples: samples per step that it processed since its last report, mean.
        compute: seconds per step of its own work since its last report, mean.
        wait: seconds per step that it waited for others since its last report, mean.
        steps: steps that these means are over.
        since: seconds of steps since the rank's speed has changed; infinite if it is not known to have.
        bump: samples of a batch that takes longer than the curve says, because the times bend down; 0 if none does.
        bump_seconds: how long it takes.
        ended: whether its replica has come to the end of its own data, and runs padding batches.
        off_by_cost: how far its times are from what the cost of its samples explains, as a fraction; 0 if unknown.
        off_by_samples: how far they are from what the number of its samples explains.
        settings: a number that stands for the hyperparameters of its optimizers.
        bends: of its cost, at most ``MOST_BENDS``; none if it is a straight line.
    """

    fixed: float
    per_sample: float
    error: float
    drawn: float
    samples: float
    compute: float
    wait: float
    steps: float = 0.0
    since: float = math.inf
    bump: float = 0.0
    bump_seconds: float = 0.0
    ended: float = 0.0
    off_by_cost: float = 0.0
    off_by_samples: float = 0.0
    settings: float = 0.0
    bends: tuple[tuple[float, float], ...] = ()

    @property
    def cost(self) -> Cost | Curve:
        """The rank's cost."""
        return Curve(self.fixed, self.per_sample, self.bends) if self.bends else Cost(self.fixed, self.per_sample)

    @property
    def row(self) -> list[float]:
        """The report as numbers, always as many."""
        bends = [number for bend in self.bends for number in bend]
        return [*self[:-1], *bends, *[0.0] * (2 * MOST_BENDS - len(bends))]

    @classmethod
    def of_row(cls, row: Sequence[float]) -> "Report":
        """The report that a row holds."""
        numbers = len(cls._fields) - 1
        return cls._make([*row[:numbers], bends_of(row[numbers:])])


class StepTimes(NamedTuple):
    """Times of steps in a row, of each rank.

    Attributes:
        steps: how many, by rank: the same number, unless ranks go at their own pace.
        seconds: that they took, by rank.
    """

    steps: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()

    def after(self, reports: Sequence[Report]) -> "StepTimes":
        """With the steps that the ranks report; those of ranks that report at different steps are not the same ones."""
        none = (0.0,) * len(reports)
        steps = [before + report.steps for before, report in zip(self.steps or none, reports, strict=True)]
        seconds = [
            before + report.steps * (report.compute + report.wait)
            for before, report in zip(self.seconds or none, reports, strict=True)
        ]
        return StepTimes(tuple(steps), tuple(seconds))

    @property
    def shortest(self) -> float:
        """Seconds of the rank with the fewest."""
        return min(self.seconds, default=0.0)

    @property
    def at_own_pace(self) -> bool:
        """Whether ranks go at their own pace."""
        return len(set(self.steps)) > 1


class SplitTrial(NamedTuple):
    """Trial of a new split, which has to prove itself.

    Attributes:
        before: the plan to return to.
        bar: seconds per step that it must stay below: halfway from what was to what was promised.
    """

    before: Plan
    bar: float


def step_seconds(looks: Sequence[StepTimes]) -> float:
    """Seconds that a step takes, on the rank on which it takes longest.

    Each rank counts by itself first. Where ranks go at their own pace, the longest of each look would be that of a rank
    on which an exchange, or a disturbance, happened to fall into it.
    """
    ranks = range(len(looks[0].steps))
    return max(median(look.seconds[rank] / look.steps[rank] for look in looks) for rank in ranks)


class Planner:
    """Turns reports into plans.

    Args:
        world: number of ranks that share a batch.
        balance: ``"auto"`` measures; ``"off"`` splits evenly; a list gives fixed relative shares.
        low: least samples per rank: one number for all, or one per rank. Default 1 (0 for a rank of share 0).
        high: most samples per rank and pass: one number for all, or one per rank. Default: no limit.
        min_gain: smallest predicted gain for which shares change, as a fraction of the step's time.

    Raises:
        ConfigurationError: a negative, NaN or all-zero share, a wrong number of shares or limits.

    Attributes:
        total: samples of a full step; 0 while nobody knows.
        infers_total: whether reports tell how large steps are.
        frozen: whether shares stay even, whatever is measured.
        high: most samples per rank, in one pass.
        one_pass: why no rank can run its part of a batch in several passes; empty: it can.
        limits_measured: whether these limits were found by trying training steps.
        whole: batches of the user's sampler in a step, each of which stays whole; 0: a step's batch can be cut.
        most: the largest part of a batch that each rank has been given so far.
        least: samples that a rank can train on, where the user has not said.
        before_draw: waits until it is sure which plan is in force at a step.
        in_force: the plan by which all ranks evaluate now.
        rotates: whether ranks get in turn what is left over when a batch is split, by its number in the epoch, ...
        origin: ... which is that of the step, and this.
        too_slow: the ranks without which the job would be faster, by the latest reports.
    """

    #: Noise that is expected before any has been seen, as a fraction of a rank's time: three steps tell no more.
    DOUBT = 0.3
    #: Observations over which doubt fades. Each re-split that has to be taken back doubles them.
    PATIENCE = 8
    #: Observations within which a re-split must have made steps shorter, or it is taken back.
    TRIAL = 4
    #: As many times that where ranks go at their own pace: they report different steps, some with an exchange.
    APART = 3
    #: Seconds of steps that a look takes in at least, as for a rank's own stretches.
    LOOK = 0.1
    #: Shares stay away from even ones as long as their gain exceeds this part of the noise; uneven ones are corrected
    #: if the gain exceeds that part.
    STAY, CORRECT = 0.5, 0.25
    #: Ranks that normalise over their batch (BatchNorm) get a quarter of an even share, or so many samples: with fewer,
    #: their statistics are too noisy to train well (Wu and He 2018, figure 1).
    USEFUL = 16
    #: No rank's share grows beyond this multiple of what it has been seen to manage.
    GROWTH = 2.0
    #: Costs of samples are left alone if they explain times so many times worse than numbers of samples do, and are
    #: off by this fraction.
    WORSE, OFF = 1.5, 0.05
    #: Plans that are remembered: ranks that are behind still draw by earlier ones, and what is lost is counted by them.
    KEPT = 16

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
        self.total, self.infers_total, self.frozen, self.least, self.rotates, self.origin = 0, False, False, 1, False, 0
        self._may_raise, self.one_pass = low is None, ""
        self.limits_measured, self.whole = False, 0
        self.too_slow: TooSlow | None = None
        shares = [1.0] * world if isinstance(balance, str) else fixed_shares(balance, world)
        self._low = per_rank("min_batch_size", [min(1, math.ceil(s)) for s in shares] if low is None else low, world)
        self.high = per_rank("max_batch_size", 2**62 if high is None else high, world)
        check_bounds(self._low, self.high)
        self._bars = tuple(share == 0 for share in shares)  # ranks that take nothing, whatever their limits
        barred = tuple(0 if bar else h for bar, h in zip(self._bars, self.high, strict=True))
        costs = tuple(Cost(0.0, 1.0 / s if s else 1.0) for s in shares)
        self._need = self._low
        self.plans = [Plan(0, costs, self._low, barred)]
        self.most = [0.0] * world
        self._updated = 0  # the step of the latest update
        self._look = StepTimes()  # since the latest one
        self._looks: list[StepTimes] = []  # under the plan in force
        self._doubt, self._patience = self.DOUBT, self.PATIENCE
        self._restored = False  # the plan in force is that of a checkpoint
        self._trial: SplitTrial | None = None
        self._before: tuple[SplitTrial | None, float, int] = (
            self._trial,
            self._doubt,
            self._patience,
        )  # the latest proposal
        self.before_draw: Callable[[int], None] = lambda step: None
        self.in_force: Callable[[], Plan] = lambda: self.plans[-1]

    def limit(self, high: Sequence[int]) -> bool:
        """Set the most samples that each rank may take, from the first step on; called before that.

        Args:
            high: one number per rank.

        Returns:
            Whether that changes anything.

        Raises:
            ShareError: the limits cannot be met.
        """
        changed, self.high, self.limits_measured = tuple(high) != self.high, tuple(high), True
        self._low = tuple(max(n, min(lo, h)) for n, lo, h in zip(self._need, self._low, self.high, strict=True))
        check_bounds(self._low, self.high)
        barred = tuple(0 if bar else h for bar, h in zip(self._bars, self.high, strict=True))
        self.plans = [replace(plan, low=self._low, high=barred) for plan in self.plans]
        if self.total:
            self.check_room(self.total)
            room = self.high if sum(self.high) >= self.total else [self.total] * self.world
            self.most = [min(most, h / self.total) for most, h in zip(self.most, room, strict=True)]
            self._note(self.plans[-1].split([self.total])[0])
        return changed

    def hold(self, held: bool) -> None:
        """Keep measured shares even from the first step on, as where every rank has data of its own, or let them move.

        Called before the first batch of a dataloader is drawn, which is when all plans may be forgotten.
        """
        self.frozen = held
        if held and self.auto:
            self.plans = [Plan(0, (Cost(0.0, 1.0),) * self.world, self._low, self.high, need=self._need)]

    def expect(self, total: int | None) -> None:
        """Say how many samples a full step holds (of all loaders together).

        Args:
            total: samples; ``None`` if steps differ in size, so that only reports can tell what is usual; 0 if no plan
                sizes them.

        Raises:
            ShareError: the limits per rank cannot be met with ``total`` samples.
        """
        if total != self.total:
            self._trial, self._looks = None, []
        self.total, self.infers_total = total or 0, total is None
        if total == 0:
            return
        if self._may_raise and (total is None or self.least * self.world <= total):
            useful = min(self.total // self.world // 4 if self.auto and self.least > 1 else 0, self.USEFUL)
            self._need = tuple(self.least if n else 0 for n in self._need)
            self._low = tuple(max(n, min(useful, h)) if n else 0 for n, h in zip(self._need, self.high, strict=True))
            self.plans = [replace(plan, low=self._low, need=self._need) for plan in self.plans]
        if total is None:
            return
        if any(self._low) and sum(self._low) > total:
            raise ShareError(
                f"a global batch of {total} samples is too small for {self.world} ranks that take at least "
                f"{list(self._low)}. Raise the batch size, lower `min_batch_size`, or use fewer ranks."
            )
        self.check_room(total)
        self._note(self.plans[-1].split([total])[0])

    def in_passes(self, samples: int) -> bool:
        """Whether a batch of so many samples is more than all ranks together take in one pass."""
        return sum(self.plans[-1].high) < samples

    def cost_of_part(self, rank: int, cost: Cost | Curve) -> Cost | Curve | Stepwise:
        """Cost of a rank's part of a full batch, however many passes it takes.

        Args:
            rank: which.
            cost: of one pass, or of one whole batch.
        """
        if self.whole and self.total:
            size = self.total / self.whole
            return Cost(0.0, cost.seconds(size) / size)
        return Stepwise(cost, high) if self.in_passes(self.total) and (high := self.plans[-1].high[rank]) else cost

    def check_room(self, samples: int) -> None:
        """See that the ranks can take a batch of so many samples.

        Raises:
            ShareError: it is more than they take in one pass, and they cannot run several.
        """
        high = self.plans[-1].high
        if self.one_pass and self.in_passes(samples):
            raise ShareError(
                f"the ranks take at most {list(high)} samples ({sum(high)} together), less than a global batch of "
                f"{samples}, and cannot take it in several passes: {self.one_pass} Raise max_batch_size, or use a "
                "smaller batch with accumulate_grad_batches."
            )

    def at(self, step: int) -> Plan:
        """The plan in force at ``step``, if that is one of the latest :attr:`KEPT` ones."""
        for plan in reversed(self.plans):
            if plan.start <= step:
                return plan
        raise LookupError(f"the plan of step {step} is no longer known; there are those from {self.plans[0].start} on")

    def ready(self, step: int) -> Plan:
        """The plan by which a step is drawn now, once it is sure that it is that of all ranks."""
        self.before_draw(step)
        return self.at(step)

    def shares(self, step: int) -> list[int]:
        """Shares of a full batch at ``step``, in samples, whoever's turn it is."""
        return self.at(step).split([self.total])[0]  # zeros where streams decide the sizes of batches

    def turn(self, step: int) -> int | None:
        """Number of the turn at a step; ``None``: what is left over always goes to the same ranks."""
        return step + self.origin if self.rotates else None

    def update(self, step: int, reports: Sequence[Report]) -> Plan | None:
        """Solve the split again; deterministic in its arguments, so that all ranks agree.

        Args:
            step: the present step, the same on every rank.
            reports: one per rank, all taken at the same earlier step.

        Returns:
            The new plan if it pays, else ``None``.
        """
        if (plan := self.propose(step, reports)) is not None:
            plan = replace(plan, start=max(int(r.drawn) for r in reports))
            self.adopt(plan)
        return plan

    def propose(self, step: int, reports: Sequence[Report]) -> Plan | None:
        """The new plan if it pays, without a start yet; followed by :meth:`adopt` or :meth:`drop`.

        Args:
            step: the present step, of the rank that has come least far.
            reports: one per rank.
        """
        latest, mixed, self._updated = self.plans[-1], self._updated < self.plans[-1].start, step
        if self.infers_total and (total := round(sum(report.samples for report in reports))):
            self.total = total
            if not any(self.most):
                self._note(latest.split([total])[0])
        if self.whole:
            costs = [self.cost_of_part(rank, report.cost) for rank, report in enumerate(reports)]
            reports = [
                report._replace(fixed=cost.fixed, per_sample=cost.per_sample, bends=cost.bends)
                for report, cost in zip(reports, costs, strict=True)
            ]
        moves = self.auto and self.total and not self.frozen
        if not moves or any(math.isinf(r.error) for r in reports):
            return None
        self.too_slow = self._too_slow(reports)
        self._see(reports, mixed)
        if latest.start > step:
            return None
        self._before = self._trial, self._doubt, self._patience
        if not latest.by_samples and self._misled(reports):
            self._trial = None
            even = (Cost(0.0, 1.0),) * self.world  # what was measured by cost says little of samples
            return replace(latest, costs=even, by_samples=True)
        return self._judged() or self._better(latest, reports)

    def _misled(self, reports: Sequence[Report]) -> bool:
        """Whether numbers of samples explain the ranks' times better than costs do, if most ranks know."""
        known = [report for report in reports if report.off_by_samples]
        by_cost, by_samples = (
            math.sqrt(sum(off**2 for off in column) / max(len(known), 1))
            for column in ([r.off_by_cost for r in known], [r.off_by_samples for r in known])
        )
        return 2 * len(known) > len(reports) and by_cost > max(self.WORSE * by_samples, self.OFF)

    def _too_slow(self, reports: Sequence[Report]) -> TooSlow | None:
        """Ranks that make the job slower, if that was measured: at the least share, not by times for larger ones."""
        if self.whole:  # it may have no batches
            return None
        costs, noise = [r.cost for r in reports], [r.error for r in reports]
        high = [self.total if h else 0 for h in self.high] if self.in_passes(self.total) else self.high
        found = too_slow(self.total, stepwise(self.total, costs, self.high), self._low, high, noise)
        measured = found and all(reports[rank].samples < max(self._low[rank], 1) + 1 for rank in found.ranks)
        return found if measured else None

    def drop(self) -> None:
        """Forget the latest proposal: not all ranks have agreed."""
        self._trial, self._doubt, self._patience = self._before

    def adopt(self, plan: Plan) -> None:
        """Follow a plan from its start on. All ranks have agreed on it; it starts at a step that none has drawn."""
        self._look, self._looks = StepTimes(), []
        self._note(plan.split([self.total])[0])
        self.plans = [*self.plans, plan][-self.KEPT :]

    def _see(self, reports: Sequence[Report], mixed: bool) -> None:
        """Look at how long steps take now; not if they are ``mixed`` ones, of the plan in force and of that before."""
        if mixed:
            return
        self._look = self._look.after(reports)
        if self._look.shortest >= self.LOOK:
            self._looks.append(self._look)
            self._look = StepTimes()
            self._doubt *= 1 - 1 / self._patience

    def _judged(self) -> Plan | None:
        """The plan to return to if the latest re-split did not make steps shorter."""
        if self._trial is None or not self._looks:
            return None
        if step_seconds(self._looks) < self._trial.bar:
            self._trial, self._doubt, self._patience = None, 0.0, self.PATIENCE
        elif len(self._looks) >= self.TRIAL * (self.APART if any(look.at_own_pace for look in self._looks) else 1):
            plan, self._trial = self._trial.before, None
            self._doubt, self._patience = max(self.DOUBT, 2 * self._doubt), 2 * self._patience
            return plan
        return None

    def _better(self, latest: Plan, reports: Sequence[Report]) -> Plan | None:
        """The best split if it surely beats the latest; the even one if nothing surely beats that."""
        costs, noise = tuple(r.cost for r in reports), [r.error for r in reports]
        reach = tuple(min(1.0, self.GROWTH * part) for part in self.most)
        best, even = (
            Plan(0, c, self._low, self.high, reach, self._need, latest.by_samples)
            for c in (costs, (Cost(0.0, 1.0),) * self.world)
        )
        present, wanted, level = (plan.split([self.total])[0] for plan in (latest, best, even))
        paid = stepwise(self.total, costs, latest.high)
        if not self._pays(level, wanted, paid, [self.STAY * x for x in noise]):
            if self._restored and len(self._looks) < 2:
                return None  # one stretch of time says too little against it
            self._trial = None
            return None if present == level else even
        looks, since = list(self._looks), min(r.since for r in reports)
        while looks and sum(look.shortest for look in looks) > since:
            del looks[0]  # it began before the latest change of a rank's speed
        part = self.CORRECT if looks and present != level else 1.0  # that ranks differ is sure, and a trial follows
        rest = looks and present != level and self._trial is None and latest.held_back(self.total)
        if not self._pays(present, wanted, paid, [0.0 if rest else max(self._doubt, part * x) for x in noise]):
            return None
        if rest:
            return best  # of a split that has proved itself, as far as ranks were trusted
        if looks:
            gain = makespan(present, paid) - makespan(wanted, paid)
            self._trial = SplitTrial(latest, step_seconds(looks) - gain / 2)
        elif self._looks:
            self._trial = None  # nobody knows how long steps would take now without the re-split
        elif self._trial is None and self._patience == self.PATIENCE:
            self._doubt = 0.0  # it is sure in spite of all the doubt that there was, and no trial has failed
        return best

    def _pays(
        self, old: Sequence[int], new: Sequence[int], costs: Sequence[Cost | Curve | Stepwise], noise: Sequence[float]
    ) -> bool:
        """Whether ``new`` is faster, even if who gives was measured at its slowest, and who takes at its fastest."""
        factors = [1 + x if n > o else 1 / (1 + x) if n < o else 1.0 for o, n, x in zip(old, new, noise, strict=True)]
        likely = [c.times(f) for f, c in zip(factors, costs, strict=True)]
        return makespan(new, likely) < (1 - self.min_gain) * makespan(old, likely)

    def copy_trust(self, former: "Planner") -> None:
        """Doubt measurements no more than another planner of such ranks, which has seen how far they are noise."""
        self._doubt, self._patience = former._doubt, former._patience

    def state_dict(self) -> dict[str, Any]:
        """The latest plan and what it rests on; builtins only."""
        plan = self.plans[-1]
        costs = [row_of(cost) for cost in plan.costs]
        by_samples = {"by_samples": True} if plan.by_samples else {}
        return {"costs": costs, "reach": list(plan.reach), "most": list(self.most), **by_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the plan of :meth:`state_dict` from the first step on, within this planner's limits."""
        costs = tuple(cost_of(*cost) for cost in state["costs"])
        by_samples = state.get("by_samples", False)
        self.plans = [Plan(0, costs, self._low, self.high, tuple(state["reach"]), self._need, by_samples)]
        self._restored = True
        self.most = list(state["most"])

    def _note(self, shares: Sequence[int]) -> None:
        self.most = [max(most, n / self.total) for most, n in zip(self.most, shares, strict=True)]


_MOST = 8  # changes of who takes part that are remembered; steps of all ranks lie closer together


class _SharedSpan(NamedTuple):
    """From a step on, these ranks shared the batches.

    Attributes:
        start: that step.
        ids: of the ranks, in the order of the shares.
        plans: that were in force.
        total: samples of a full batch.
        origin: what makes a step the number of a turn; ``None``: there are no turns.
    """

    start: int
    ids: tuple[int, ...]
    plans: tuple[Plan, ...]
    total: int
    origin: int | None

    def share(self, id: int, step: int) -> int:
        """A rank's samples of a full batch."""
        if id not in self.ids:
            return 0
        plan = next((plan for plan in reversed(self.plans) if plan.start <= step), self.plans[0])
        turn = None if self.origin is None else step + self.origin
        return plan.split([self.total], turn)[0][self.ids.index(id)]


class ShareHistory:
    """Plans by which batches were shared before ranks were lost. Ranks are known by their ids."""

    def __init__(self) -> None:
        self._stretches: list[_SharedSpan] = []
        self._start = 0  # the first step that those who remain share

    def end(self, ids: Sequence[int], planner: Planner, start: int) -> None:
        """Others share the batches from a step on.

        Args:
            ids: of the ranks that have shared them, in the order of the shares.
            planner: of these ranks.
            start: the first step that others share.
        """
        ended = _SharedSpan(self._start, tuple(ids), tuple(planner.plans), planner.total, planner.turn(0))
        self._stretches, self._start = [*self._stretches, ended][-_MOST:], start

    def samples(self, id: int, step: int) -> int:
        """Samples that a lost rank was to take from a step on, until others took its share.

        A batch that is smaller than others, at the end of an epoch, counts as a full one. Where plans are so old that
        they are not remembered, the oldest one counts.

        Args:
            id: of the rank.
            step: the first one that it has not done.
        """
        return sum(self._at(each).share(id, each) for each in range(step, self._start))

    def _at(self, step: int) -> _SharedSpan:
        return next((one for one in reversed(self._stretches) if one.start <= step), self._stretches[0])


class Repartition(NamedTuple):
    """Change of the ranks that share the batches, from a step on: some were lost.

    Attributes:
        former_ranks: of each rank, its number before.
        start: the first step that they share; no rank has drawn it yet.
        reports: how many times all ranks have acted on their reports, on the rank that has done so most often.
    """

    former_ranks: tuple[int, ...]
    start: int
    reports: int


class PlanningState(NamedTuple):
    """Plans and measurements of a planner; the same on ranks that have acted on the same reports.

    Attributes:
        plans: in force, and to come.
        most: the largest part of a batch that each rank has been given so far.
    """

    plans: list[Plan]
    most: list[float]

    @classmethod
    def of(cls, planner: Planner) -> "PlanningState":
        """The state of a planner."""
        return cls(list(planner.plans), list(planner.most))

    def apply_to(self, planner: Planner) -> None:
        """Let another planner of the same ranks know it, which may have missed the latest reports."""
        planner.plans, planner.most = list(self.plans), list(self.most)


def plan_for_survivors(former: Planner, kept: Sequence[int], planner: Planner) -> Planner:
    """Let a planner go on for the ranks that remain, with what an earlier one knows of them.

    Args:
        former: of all ranks.
        kept: of each rank that remains, its number there.
        planner: a new one for these ranks, with the user's options for them.

    Returns:
        The new planner. It splits again at once, by the costs of the latest plan.

    Raises:
        ShareError: the ranks that remain cannot take a whole batch, in passes neither.
    """
    planner.least, planner.frozen, planner.one_pass = former.least, former.frozen, former.one_pass
    planner.rotates, planner.origin, planner.whole = former.rotates, former.origin, former.whole
    if former.limits_measured:
        planner.limit([former.high[rank] for rank in kept])
    planner.copy_trust(former)
    state = former.state_dict()
    own = {name: [state[name][rank] for rank in kept] for name in ("costs", "reach", "most") if state[name]}
    planner.load_state_dict({**state, **own})
    if former.total:
        planner.expect(former.total)
        planner.infers_total = former.infers_total
    return planner
