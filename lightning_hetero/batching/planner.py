"""Planner: how many samples of which step each rank takes, the same on all ranks.

Every rank derives the same plans, from the same reports, or follows those of rank 0 where ranks go at their own pace. A
new plan starts at a step that no sampler has drawn yet.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from lightning_hetero.batching.idle_ranks import IdleRanks, ShareLimits
from lightning_hetero.batching.plan import Plan
from lightning_hetero.batching.reports import Report, StepTimes, step_seconds
from lightning_hetero.batching.shares import (
    Cost,
    Grid,
    Stepwise,
    TooSlow,
    check_bounds,
    cost_of,
    fixed_shares,
    makespan,
    per_rank,
    row_of,
)
from lightning_hetero.errors import ShareError


class SplitTrial(NamedTuple):
    """Trial of a new split, which has to prove itself.

    Attributes:
        before: the plan to return to.
        bar: seconds per step that it must stay below: halfway from what was to what was promised.
    """

    before: Plan
    bar: float


class Planner:
    """Turns reports into plans.

    Args:
        world: number of ranks that share a batch.
        balance: ``"auto"`` measures; ``"off"`` splits evenly; a list gives fixed relative shares.
        low: least samples per rank: one number for all, or one per rank. Default 1 (0 for a rank of share 0).
        high: most samples per rank and pass: one number for all, or one per rank. Default: no limit.
        multiple: of which shares are that are not smaller; ``"auto"``: see :attr:`COMPILED`.

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
        most: the largest fraction of a batch that each rank has been given so far.
        least: samples that a rank can train on, where the user has not said.
        before_draw: waits until it is sure which plan is in force at a step.
        in_force: the plan by which all ranks evaluate now.
        rotates: whether ranks get in turn what is left over when a batch is split, by the number of the batch in its
            epoch.
        origin: plus the number of a step, the number of its batch in the epoch.
        too_slow: the ranks without which the job would be faster, by the latest reports.
    """

    #: Smallest predicted gain for which shares change, as a fraction of the step's time.
    MIN_GAIN = 0.03
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
    #: Shares stay uneven as long as the gain exceeds ``STAY`` of the noise, and uneven ones are corrected if the gain
    #: exceeds ``CORRECT`` of it.
    STAY, CORRECT = 0.5, 0.25
    #: Ranks that normalise over their batch (BatchNorm) get a quarter of an even share, or so many samples: with fewer,
    #: their statistics are too noisy to train well (Wu and He 2018, figure 1).
    USEFUL = 16
    #: No rank's share grows beyond this multiple of what it has been seen to manage.
    GROWTH = 2.0
    #: Costs of samples are left alone if they explain times so many times worse than numbers of samples do, and are
    #: off by this fraction.
    WORSE, OFF = 1.5, 0.05
    #: Multiples of which measured shares are once a rank uses ``torch.compile``: kernels suit such sizes, and there are
    #: fewer of them. A step is up to 2.5% longer for it, 1% in the mean.
    COMPILED: Grid = ((8, 128), (4, 64))
    #: Plans that are remembered: ranks that are behind still draw by earlier ones, and what is lost is counted by them.
    KEPT = 16

    def __init__(
        self,
        world: int,
        balance: Literal["auto", "off"] | Sequence[float] = "auto",
        low: int | Sequence[int] | None = None,
        high: int | Sequence[int] | None = None,
        multiple: Literal["auto"] | int = "auto",
    ) -> None:
        self.world = world
        self.auto = balance == "auto"
        self.total, self.infers_total, self.frozen, self.least, self.rotates, self.origin = 0, False, False, 1, False, 0
        self._may_raise, self.one_pass = low is None, ""
        self._idle_ranks = IdleRanks(least_given=low is not None)
        self.limits_measured, self.whole = False, 0
        self.too_slow: TooSlow | None = None
        shares = [1.0] * world if isinstance(balance, str) else fixed_shares(balance, world)
        self._low = per_rank("min_batch_size", [min(1, math.ceil(s)) for s in shares] if low is None else low, world)
        self.high = per_rank("max_batch_size", 2**62 if high is None else high, world)
        check_bounds(self._low, self.high)
        self._bars = tuple(share == 0 for share in shares)  # ranks that take nothing, whatever their limits
        costs = tuple(Cost(0.0, 1.0 / s if s else 1.0) for s in shares)
        self._need = self._low
        self._grid: Grid | None = None if multiple == "auto" else ((multiple, multiple),)
        self.plans = [Plan(0, costs, self._low, self._barred_high, grid=self._grid or ())]
        self.most = [0.0] * world
        self._updated = 0  # the step of the latest update
        self._look = StepTimes()  # since the latest one
        self._looks: list[StepTimes] = []  # under the plan in force
        self._doubt, self._patience = self.DOUBT, self.PATIENCE
        self._restored = False  # the plan in force is that of a checkpoint
        self._trial: SplitTrial | None = None
        self._before: tuple[SplitTrial | None, float, int] = None, self._doubt, self._patience  # the latest proposal
        self.before_draw: Callable[[int], None] = lambda step: None
        self.in_force: Callable[[], Plan] = lambda: self.plans[-1]

    @property
    def _barred_high(self) -> tuple[int, ...]:
        return tuple(0 if bar else h for bar, h in zip(self._bars, self.high, strict=True))

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
        self.plans = [replace(plan, low=self._low, high=self._barred_high) for plan in self.plans]
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

    def cost_of_part(self, rank: int, cost: Cost) -> Cost | Stepwise:
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
                return plan.of_step(step)
        raise LookupError(f"the plan of step {step} is no longer known; there are those from {self.plans[0].start} on")

    def ready(self, step: int) -> Plan:
        """The plan by which a step is drawn now, once it is sure that it is that of all ranks."""
        self.before_draw(step)
        return self.at(step)

    def shares(self, step: int) -> list[int]:
        """Shares of a full batch at ``step``, in samples, whoever's turn it is."""
        return self.at(step).split([self.total])[0]  # zeros where streams decide the sizes of batches

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
        if not self.whole:  # else a rank may have no batches
            self.too_slow = self._idle_ranks.too_slow(self._limits, reports, latest.idle)
        self._see(reports, mixed)
        if latest.start > step:
            return None
        self._before = self._trial, self._doubt, self._patience
        if not latest.by_samples and self._misled(reports):
            self._trial = None
            even = (Cost(0.0, 1.0),) * self.world  # what was measured by cost says little of samples
            return replace(latest, costs=even, by_samples=True, idle=())
        return self._judged() or self._idle_others(latest, reports) or self._better(latest, reports)

    def _misled(self, reports: Sequence[Report]) -> bool:
        """Whether numbers of samples explain the ranks' times better than costs do, if most ranks know."""
        known = [report for report in reports if report.off_by_samples]
        by_cost, by_samples = (
            math.sqrt(sum(off**2 for off in column) / max(len(known), 1))
            for column in ([r.off_by_cost for r in known], [r.off_by_samples for r in known])
        )
        return 2 * len(known) > len(reports) and by_cost > max(self.WORSE * by_samples, self.OFF)

    @property
    def _limits(self) -> ShareLimits:
        return ShareLimits(self.total, self._low, self.high, self.in_passes(self.total))

    def _idle_others(self, latest: Plan, reports: Sequence[Report]) -> Plan | None:
        """The plan by which other ranks get no samples than before, since these would make steps longer.

        Ranks that get none from now on are on trial: steps must become shorter.
        """
        if self._trial is not None:
            return None
        costs, looks = tuple(r.cost for r in reports), self._looks

        def plan_without(idle: tuple[int, ...]) -> Plan:
            return self._plan(latest, costs, idle, latest.grid)

        plan = self._idle_ranks.choose(latest, reports, self.too_slow, looks, self._limits, plan_without)
        if plan is not None and len(plan.idle) > len(latest.idle):
            self._trial = SplitTrial(latest, (step_seconds(looks) + plan.seconds(self.total, costs)) / 2)
        return plan

    def _plan(self, latest: Plan, costs: tuple[Cost, ...], idle: tuple[int, ...] = (), grid: Grid = ()) -> Plan:
        """A plan for what is known now, without a start; its :meth:`Plan.split` lets all ranks end a step at once."""
        reach = tuple(min(1.0, self.GROWTH * part) for part in self.most)
        plan = Plan(0, costs, self._low, self.high, reach, self._need, latest.by_samples, grid, idle)
        return self._idle_ranks.with_probes(plan, self._limits)

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
            if plan.idle != self.plans[-1].idle:
                self._idle_ranks.taken_back()
            self._doubt, self._patience = max(self.DOUBT, 2 * self._doubt), 2 * self._patience
            return plan
        return None

    def _better(self, latest: Plan, reports: Sequence[Report]) -> Plan | None:
        """The best split if it surely beats the latest; the even one if nothing surely beats that."""
        if self._trial is not None and self._trial.before.idle != latest.idle:
            return None
        costs, noise = tuple(r.cost for r in reports), [r.error for r in reports]
        compiled = self.COMPILED if any(report.compiles for report in reports) else ()
        best = self._plan(latest, costs, latest.idle, compiled if self._grid is None else self._grid)
        even = replace(best, costs=(Cost(0.0, 1.0),) * self.world, grid=self._grid or ())
        current, wanted, equal = (plan.split([self.total])[0] for plan in (latest, best, even))
        paid = latest.paid(self.total, costs)
        if not self._pays(equal, wanted, paid, [self.STAY * x for x in noise]):
            if self._restored and len(self._looks) < 2:
                return None  # one stretch of time says too little against it
            self._trial = None
            return None if current == equal else even
        looks, since = list(self._looks), min(r.since for r in reports)
        while looks and sum(look.shortest for look in looks) > since:
            del looks[0]  # it began before the latest change of a rank's speed
        part = self.CORRECT if looks and current != equal else 1.0  # that ranks differ is sure, and a trial follows
        trusts = looks and current != equal and self._trial is None and latest.held_back(self.total)
        if not self._pays(current, wanted, paid, [0.0 if trusts else max(self._doubt, part * x) for x in noise]):
            return None
        if trusts:
            return best  # of a split that has proved itself, as far as ranks were trusted
        if looks:
            gain = makespan(current, paid) - makespan(wanted, paid)
            self._trial = SplitTrial(latest, step_seconds(looks) - gain / 2)
        elif self._looks:
            self._trial = None  # nobody knows how long steps would take now without the re-split
        elif self._trial is None and self._patience == self.PATIENCE:
            self._doubt = 0.0  # it is sure in spite of all the doubt that there was, and no trial has failed
        return best

    def _pays(
        self, old: Sequence[int], new: Sequence[int], costs: Sequence[Cost | Stepwise], noise: Sequence[float]
    ) -> bool:
        """Whether ``new`` is faster, even if who gives was measured at its slowest, and who takes at its fastest."""
        factors = [1 + x if n > o else 1 / (1 + x) if n < o else 1.0 for o, n, x in zip(old, new, noise, strict=True)]
        likely = [c.times(f) for f, c in zip(factors, costs, strict=True)]
        return makespan(new, likely) < (1 - self.MIN_GAIN) * makespan(old, likely)

    def copy_trust(self, former: "Planner") -> None:
        """Doubt measurements no more than another planner of such ranks, which has seen how far they are noise."""
        self._doubt, self._patience = former._doubt, former._patience

    def state_dict(self) -> dict[str, Any]:
        """The latest plan and what it rests on; builtins only."""
        plan = self.plans[-1]
        costs = [row_of(cost) for cost in plan.costs]
        told = ({"by_samples": True} if plan.by_samples else {}) | ({"grid": list(plan.grid)} if plan.grid else {})
        return {"costs": costs, "reach": list(plan.reach), "most": list(self.most), **told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the plan of :meth:`state_dict` from the first step on, within this planner's limits."""
        costs = tuple(cost_of(*cost) for cost in state["costs"])
        by_samples, grid = state.get("by_samples", False), tuple(map(tuple, state.get("grid", ())))
        grid = grid if self._grid is None else self._grid
        reach = tuple(state["reach"])
        self.plans = [Plan(0, costs, self._low, self._barred_high, reach, self._need, by_samples, grid)]
        self._restored = True
        self.most = list(state["most"])

    def _note(self, shares: Sequence[int]) -> None:
        self.most = [max(most, n / self.total) for most, n in zip(self.most, shares, strict=True)]
