"""The agreed plan: which rank takes how many samples of which step.

Every rank derives the same plans, from the same reports. A new one starts at a step that no sampler has drawn yet.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from lightning_hetero.errors import ShareError
from lightning_hetero.workload.curve import Curve
from lightning_hetero.workload.limits import check_limits, fixed_shares, per_rank
from lightning_hetero.workload.plan import Plan
from lightning_hetero.workload.report import Report
from lightning_hetero.workload.shares import Cost, TooSlow, cost_of, makespan, row_of, too_slow
from lightning_hetero.workload.trial import Look, Trial, seconds_of


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

    Attributes:
        total: samples of a full step; 0 while nobody knows.
        learns: whether reports tell how large steps are.
        held: whether shares stay even, whatever is measured.
        high: most samples per rank.
        found: whether these limits were found by trying training steps.
        most: the largest part of a batch that each rank has been given so far.
        least: samples that a rank can train on, where the user has not said.
        before_draw: waits until it is sure which plan is in force at a step.
        in_force: the plan by which all ranks evaluate now.
        turns: whether ranks get in turn what is left over when a batch is split, by its number in the epoch, ...
        origin: ... which is that of the step, and this.
        too_slow: the ranks without which the job would be faster, by the latest reports.
    """

    #: Noise that is expected before any has been seen, as a fraction of a rank's time.
    DOUBT = 0.25
    #: Looks at the steps over which doubt fades. Each re-split that has to be taken back doubles them.
    PATIENCE = 8
    #: Looks after which a re-split must have made steps shorter.
    TRIAL = 4
    #: As many times that where ranks go at their own pace: they report different steps, some with an exchange.
    APART = 3
    #: Seconds of steps that a look takes in at least, as for a rank's own stretches.
    LOOK = 0.1
    #: Shares stay away from even ones as long as their gain exceeds this part of the noise.
    STAY = 0.5
    #: Ranks that normalise over their batch (BatchNorm) get a quarter of an even share, or so many samples: with fewer,
    #: their statistics are too noisy to train well (Wu and He 2018, figure 1).
    USEFUL = 16
    #: No rank's share grows beyond this multiple of what it has been seen to manage.
    GROWTH = 2.0
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
        self.total, self.learns, self.held, self.least, self.turns, self.origin = 0, False, False, 1, False, 0
        self._may_raise = low is None
        self.found = False
        self.too_slow: TooSlow | None = None
        shares = [1.0] * world if isinstance(balance, str) else fixed_shares(balance, world)
        self._low = per_rank("min_batch_size", [min(1, math.ceil(s)) for s in shares] if low is None else low, world)
        self.high = per_rank("max_batch_size", 2**62 if high is None else high, world)
        check_limits(self._low, self.high)
        self._bars = tuple(share == 0 for share in shares)  # ranks that take nothing, whatever their limits
        barred = tuple(0 if bar else h for bar, h in zip(self._bars, self.high, strict=True))
        costs = tuple(Cost(0.0, 1.0 / s if s else 1.0) for s in shares)
        self._need = self._low
        self.plans = [Plan(0, costs, self._low, barred)]
        self.most = [0.0] * world
        self._updated = 0  # the step of the latest update
        self._look = Look()  # since the latest one
        self._looks: list[Look] = []  # under the plan in force
        self._doubt, self._patience = self.DOUBT, self.PATIENCE
        self._trial: Trial | None = None
        self._before: tuple[Trial | None, float, int] = self._trial, self._doubt, self._patience  # the latest proposal
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
        changed, self.high, self.found = tuple(high) != self.high, tuple(high), True
        self._low = tuple(max(n, min(lo, h)) for n, lo, h in zip(self._need, self._low, self.high, strict=True))
        check_limits(self._low, self.high)
        barred = tuple(0 if bar else h for bar, h in zip(self._bars, self.high, strict=True))
        self.plans = [replace(plan, low=self._low, high=barred) for plan in self.plans]
        if self.total:
            self.most = [min(most, h / self.total) for most, h in zip(self.most, self.high, strict=True)]
            self._note(self.plans[-1].split([self.total])[0])
        return changed

    def hold(self, held: bool) -> None:
        """Keep measured shares even from the first step on, as where every rank has data of its own, or let them move.

        Called before the first batch of a dataloader is drawn, which is when all plans may be forgotten.
        """
        self.held = held
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
        self.total, self.learns = total or 0, total is None
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
        self._note(self.plans[-1].split([total])[0])

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
        """Whose turn it is at a step, as a number; ``None``: what is left over always goes to the same ranks."""
        return step + self.origin if self.turns else None

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
        if self.learns and (total := round(sum(report.samples for report in reports))):
            self.total = total
            if not any(self.most):
                self._note(latest.split([total])[0])
        moves = self.auto and self.total and not self.held
        if not moves or any(math.isinf(r.error) for r in reports):
            return None
        self.too_slow = self._too_slow(reports)
        self._see(reports, mixed)
        if latest.start > step:
            return None
        self._before = self._trial, self._doubt, self._patience
        return self._judged() or self._better(latest, reports)

    def _too_slow(self, reports: Sequence[Report]) -> TooSlow | None:
        """Who makes the job slower, if that was measured: at the least share, not by its times for larger ones."""
        costs, noise = [r.cost for r in reports], [r.error for r in reports]
        found = too_slow(self.total, costs, self._low, self.high, noise)
        measured = found and all(reports[rank].samples < max(self._low[rank], 1) + 1 for rank in found.ranks)
        return found if measured else None

    def drop(self) -> None:
        """Forget the latest proposal: not all ranks have agreed."""
        self._trial, self._doubt, self._patience = self._before

    def adopt(self, plan: Plan) -> None:
        """Follow a plan from its start on. All ranks have agreed on it; it starts at a step that none has drawn."""
        self._look, self._looks = Look(), []
        self._note(plan.split([self.total])[0])
        self.plans = [*self.plans, plan][-self.KEPT :]

    def _see(self, reports: Sequence[Report], mixed: bool) -> None:
        """Look at how long steps take now; not if they are ``mixed`` ones, of the plan in force and of that before."""
        if mixed:
            return
        self._look = self._look.after(reports)
        if self._look.shortest >= self.LOOK:
            self._looks.append(self._look)
            self._look = Look()
            self._doubt *= 1 - 1 / self._patience

    def _judged(self) -> Plan | None:
        """The plan to return to if the latest re-split did not make steps shorter."""
        if self._trial is None or not self._looks:
            return None
        if seconds_of(self._looks) < self._trial.bar:
            self._trial, self._doubt, self._patience = None, 0.0, self.PATIENCE
        elif len(self._looks) >= self.TRIAL * (self.APART if any(look.apart for look in self._looks) else 1):
            plan, self._trial = self._trial.before, None
            self._doubt, self._patience = max(self.DOUBT, 2 * self._doubt), 2 * self._patience
            return plan
        return None

    def _better(self, latest: Plan, reports: Sequence[Report]) -> Plan | None:
        """The best split if it surely beats the latest; the even one if nothing surely beats that."""
        costs, noise = tuple(r.cost for r in reports), [r.error for r in reports]
        reach = tuple(min(1.0, self.GROWTH * part) for part in self.most)
        best, even = (
            Plan(0, c, self._low, self.high, reach, self._need) for c in (costs, (Cost(0.0, 1.0),) * self.world)
        )
        present, wanted, level = (plan.split([self.total])[0] for plan in (latest, best, even))
        if not self._pays(level, wanted, costs, [self.STAY * x for x in noise]):
            self._trial = None
            return None if present == level else even
        if not self._pays(present, wanted, costs, [max(self._doubt, x) for x in noise]):
            return None
        looks, since = list(self._looks), min(r.since for r in reports)
        while looks and sum(look.shortest for look in looks) > since:
            del looks[0]  # it began before the latest change of a rank's speed
        if looks:
            gain = makespan(present, costs) - makespan(wanted, costs)
            self._trial = Trial(latest, seconds_of(looks) - gain / 2)
        elif self._looks:
            self._trial = None  # nobody knows how long steps would take now without the re-split
        return best

    def _pays(
        self, old: Sequence[int], new: Sequence[int], costs: Sequence[Cost | Curve], noise: Sequence[float]
    ) -> bool:
        """Whether ``new`` is faster, even if who gives was measured at its slowest, and who takes at its fastest."""
        factors = [1 + x if n > o else 1 / (1 + x) if n < o else 1.0 for o, n, x in zip(old, new, noise, strict=True)]
        likely = [c.times(f) for f, c in zip(factors, costs, strict=True)]
        return makespan(new, likely) < (1 - self.min_gain) * makespan(old, likely)

    def trust_as(self, former: "Planner") -> None:
        """Doubt measurements no more than another planner of such ranks, which has seen how far they are noise."""
        self._doubt, self._patience = former._doubt, former._patience

    def state_dict(self) -> dict[str, Any]:
        """The latest plan and what it rests on; builtins only."""
        plan = self.plans[-1]
        costs = [row_of(cost) for cost in plan.costs]
        return {"costs": costs, "reach": list(plan.reach), "most": list(self.most)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the plan of :meth:`state_dict` from the first step on, within this planner's limits."""
        costs = tuple(cost_of(*cost) for cost in state["costs"])
        self.plans = [Plan(0, costs, self._low, self.high, tuple(state["reach"]), self._need)]
        self.most = list(state["most"])

    def _note(self, shares: Sequence[int]) -> None:
        self.most = [max(most, n / self.total) for most, n in zip(self.most, shares, strict=True)]
