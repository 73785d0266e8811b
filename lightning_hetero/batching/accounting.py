"""Sample accounting: the samples, weight and time of this rank's batches, and the reports that ranks exchange."""

import math
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_hetero.batching.cost import CostEvidence, CostModel, SpeedEstimator
from lightning_hetero.batching.global_batch import GlobalBatchSizes
from lightning_hetero.batching.passes import batches_of
from lightning_hetero.batching.planner import Planner
from lightning_hetero.batching.repartition import Repartition
from lightning_hetero.batching.reports import Idling, Report
from lightning_hetero.batching.sampler import Drawn
from lightning_hetero.batching.shares import Cost
from lightning_hetero.batching.timer import StepTimer, StepTiming
from lightning_hetero.comm.agreement import AsyncAllGather
from lightning_hetero.comm.failures import deadline
from lightning_hetero.errors import DataError, UnsupportedError
from lightning_hetero.replicas.optimizer_states import check_settings, settings_number

#: Batches of a fit after which all ranks meet, however rarely replicas do, so that measured shares do not stay even for
#: long. The first batch is not measured. Two tell how ranks differ, and the next one what more samples cost.
OPENING = (3, 4, 8, 16)


class BatchSources(Protocol):
    """Sources of this rank's parts of the batches: its dataloaders."""

    def sources(self) -> Sequence[Any]:
        """One source per loader; none if the loaders have not been set up here."""

    def next_step(self) -> int:
        """The first step that this rank has not drawn yet."""

    def take(self) -> Drawn:
        """The draw of the batch that is about to be trained on."""

    def ended(self) -> bool:
        """Whether this rank's replica has come to the end of its own data, so that padding batches follow."""

    rank: int  # this one, by the planner's numbers

    @property
    def own_streams(self) -> bool:
        """Whether each rank has training data of its own, which no other rank reads."""

    own_sizes: list[int]  # of each rank's batches, where its own loader sizes them; 0: not known
    sizes: GlobalBatchSizes  # samples in a step of all ranks


class BackgroundPlans(Protocol):
    """Plans that ranks at their own pace agree on in the background; see ``batching/plan_thread.py``."""

    def before_draw(self, step: int) -> None:
        """Wait until it is sure which plan is in force at a step that is about to be drawn."""

    def before_batch(self) -> None:
        """Follow the plans that were agreed."""

    def after_batch(self) -> None:
        """Report, if that is due."""

    def meet(self, step: int, reports: Sequence[Report]) -> None:
        """Follow a better plan at once, where all ranks have met (collective)."""

    def settle(self) -> None:
        """End with the same plan on all ranks (collective)."""

    def close(self) -> None:
        """End the thread; idempotent."""


class BatchAccounting:
    """Accounting of training batches: counts and times each one, from its draw until its report is sent.

    A batch goes through :meth:`begin`, perhaps :meth:`weigh`, then :meth:`weights`, and :meth:`end`.

    Args:
        planner: the agreed plans.
        timer: this rank's timer.
        loaders: where batches come from.
        replica: the ranks that average gradients with this one, itself among them.
        group: gives their process group for small CPU tensors; ``None``: this rank is alone.
        gathering: gathers the reports of all ranks.
        defers_reports: act on reports when the next ones are due, rather than at the next batch, for which all ranks
            would wait.
    """

    def __init__(
        self,
        planner: Planner,
        timer: StepTimer,
        loaders: BatchSources,
        replica: tuple[int, ...],
        group: Callable[[], dist.ProcessGroup | None],
        gathering: AsyncAllGather,
        defers_reports: bool = False,
    ) -> None:
        self.planner, self.timer, self.loaders = planner, timer, loaders
        self.replica, self._group, self._gathering = replica, group, gathering
        self._defers = defers_reports  # whether reports are applied where replicas exchange; under hetero_ddp: no
        self._owes = False  # a report of the step that has ended
        self._meets = False  # whether all ranks wait for these reports
        self.cost, self.evidence = CostModel(), SpeedEstimator()  # by what samples cost, or by their number
        self.by_cost, self._by_samples = CostEvidence(), False  # whether that does not explain this rank's times
        self.step = 0  # batches done, the same on every rank
        self.met = 0  # batches after which all ranks have last exchanged reports
        self.reports: list[Report] = []  # of all ranks, the latest ones
        self.launched = 0  # reports that this rank has sent
        self._reported_at, self._row = 0, list[float]()  # the step of the latest one, and its values
        self._quiet = 0  # the step up to which there is none, after a rank was lost
        self._warned = False  # that a rank's times bend down
        self._warned_too_slow = False  # that the job is faster without a rank
        self.ended = [False] * planner.world  # which ranks have come to the end of their data, as far as reports tell
        self._fresh_epoch = False  # an epoch's first batch has just been drawn
        self.drawn: Drawn | None = None  # of the running step, None between steps
        self._timings: list[StepTiming] = []  # since the last report
        self._durations = deque[float](maxlen=16)  # seconds of the latest batches, without exchanges between replicas
        self.watchers: list[Callable[[StepTiming], None]] = []  # are shown every lap
        self._weighing: tuple[Tensor, Tensor, dist.Work | None] | None = None
        self._pass_weights = list[float]()  # of this rank's batches, where they are weighed
        self.idling = Idling.UNKNOWN  # whether this rank's training step can be left out while it has no samples
        self._idle: tuple[int, ...] = ()  # ranks without samples, as the log knows
        self.settings: Callable[[], dict[str, float]] = dict  # the hyperparameters of optimizers
        self._settings: dict[str, float] = {}  # when the latest report was made
        # On new plans; without one they come from the reports of all ranks.
        self.agreement: BackgroundPlans | None = None

    def continue_from(self, former: "BatchAccounting", repartition: Repartition | None = None) -> None:
        """Go on where another one has stopped, which was made from an earlier view.

        Args:
            former: the other one.
            repartition: in the midst of a fit: which ranks remain (collective over them then).
        """
        self.step, self.cost, self.evidence, self.watchers = former.step, former.cost, former.evidence, former.watchers
        self._warned, self._warned_too_slow = former._warned, former._warned_too_slow
        self.by_cost, self._by_samples, self.idling = former.by_cost, former._by_samples, former.idling
        self._durations = former._durations
        self._owes, self._meets, self.launched = former._owes, former._meets, former.launched
        if repartition is not None:  # in the midst of a step, perhaps
            kept = repartition.former_ranks
            self.reports = [former.reports[rank] for rank in kept] if former.reports else []
            self.ended, self._timings, self.met = [former.ended[rank] for rank in kept], former._timings, former.met
            self.drawn = former.drawn and former.drawn.for_survivors(kept, self.replica)  # N without the lost ranks
            self._fresh_epoch = former._fresh_epoch
            if self._defers:  # replicas may be steps apart: the next reports are of a step that none has done
                self.launched, self._quiet = repartition.reports, repartition.start
                self._owes = self._meets = False
            elif former.launched > repartition.reports:  # the others will send theirs, or do so now
                self._row, self._reported_at = former._row, former._reported_at
                self._gathering.launch(self._row)

    def drawn_for_others(self, kept: Sequence[int], taken: bool) -> float:
        """Samples of other ranks of this replica in what is drawn and not trained on.

        Args:
            kept: ranks that remain, of which they are not.
            taken: whether others have completed the running step.
        """
        ahead = [draw for source in self.loaders.sources() for draw in source.drawn]
        draws = ahead if taken or self.drawn is None else [self.drawn, *ahead]
        return sum(samples for draw in draws for rank, samples in draw.parts.items() if rank not in kept)

    @property
    def reports_applied(self) -> int:
        """Number of times this rank has acted on the reports of all."""
        return self.launched - self._gathering.in_flight

    def forget(self) -> None:
        """Drop the reports that are on their way: a rank was lost."""
        self._gathering.forget()

    def assume(self, cost: Cost, samples: int) -> None:
        """Go on from what a checkpoint knows of this rank's time, when it last had so many samples."""
        if cost.bends:
            self.evidence.shape.assume(cost)
            cost = Cost(cost.fixed, (cost.seconds(samples) - cost.fixed) / samples)
        self.cost.assume(cost, samples)
        self._by_samples = self.planner.plans[-1].by_samples  # as is known already

    def begin_epoch(self) -> None:
        """An epoch's first batch is about to be drawn, and those that workers prefetch with it."""
        # Or the next plan could begin at a step that is drawn now. One of several loaders may begin again within an
        # epoch, when the others have drawn their batches of the next step.
        self.apply_reports(ahead=int(len(self.loaders.sources()) > 1))
        self._fresh_epoch = True
        self.ended = [False] * self.planner.world

    def begin(self) -> None:
        """A training batch has arrived.

        Raises:
            DataError: its dataloader is not one that has been set up here.
        """
        if self._fresh_epoch:  # starting workers and the like is not what a batch costs
            self._fresh_epoch = False
            self.timer.restart()
        if not self._defers:
            self.apply_reports()
        if not self.loaders.sources():
            raise DataError(
                "the training dataloader was replaced after the Trainer had set it up, so that the weights of its "
                "batches are unknown. Pass the final one to `fit`, or return it from `train_dataloader`."
            )
        if self.agreement is not None:
            self.agreement.before_batch()
        self.drawn = self.loaders.take()

    def current(self) -> Drawn:
        """The draw of the running step.

        Raises:
            UnsupportedError: there is none.
        """
        if self.drawn is None:
            raise UnsupportedError(
                "a backward pass outside of `training_step`: without a batch there is no number of samples by which "
                "this rank's gradients could be weighed. Move it into `training_step`; or, for gradients that are not "
                "to be averaged between ranks, call `loss.backward()` on a model that is not wrapped."
            )
        return self.drawn

    def end(self, report: bool) -> None:
        """This rank has done its work on the batch.

        Args:
            report: whether the ranks exchange reports after this step, the same on all: every
                ``rebalance_every_n_steps``, or where replicas exchange. They also do after the steps of ``OPENING``.
        """
        if self.drawn is None:
            return
        self._leave_costs()
        padding, idle = not self.drawn.samples, self.idle
        samples, cost = (0, 0.0) if idle else (int(self.drawn.samples) or self.planner.least, self.drawn.cost)
        for timing in self.timer.end_step(samples, padding, cost, len(self.drawn.pass_sizes)):
            self._learn(timing)
            for watcher in self.watchers:
                watcher(timing)
        self.drawn, self._weighing = None, None
        self.step += 1
        if self.agreement is not None:
            self.agreement.after_batch()
        opening = self.step in OPENING and self.planner.auto and not self.planner.frozen and self.planner.world > 1
        self._owes = (report or opening) and self.step > self._quiet
        self._meets = self._owes and opening
        self.send_report()

    def _learn(self, timing: StepTiming) -> None:
        """Take in how long a step has taken."""
        if timing.compiled:
            return
        self._durations.append(timing.work + timing.wait - timing.exchange)
        cost = 0.0 if self._by_samples else timing.cost
        size = cost or timing.samples
        self.cost.observe(size / timing.passes, timing.work / timing.passes)  # each pass pays the fixed cost
        if not self.cost.warm:
            return
        self._timings.append(timing)
        if not timing.samples:  # it has computed nothing
            return
        self.evidence.observe(timing._replace(samples=size, cost=cost), self.cost.cost)
        if timing.cost:
            one = timing.of_a_pass()
            self.by_cost.observe(one.cost, one.samples, one.work)

    def batch_seconds(self) -> float:
        """Median seconds of the latest batches, without exchanges, by the device's clock; NaN before the first."""
        return median(self._durations) if self._durations else math.nan

    def send_report(self) -> None:
        """Send the report of the step that has ended, if one is due; again if a lost rank has broken that."""
        if self._owes:
            self.apply_reports()
            self._row, self._reported_at = self.report(taken=self.agreement is None).row, self.step
            self._gathering.launch(self._row)
            self.launched, self._owes = self.launched + 1, False
        if self._meets:
            self.apply_reports(ahead=0)
            self._meets = False
            self.timer.restart()  # the wait is that of steps which are over

    def apply_reports(self, ahead: int = 1) -> None:
        """Act on the reports that are on their way, if any; on all ranks at the same step.

        Args:
            ahead: batches that ranks have drawn since the reports for steps which are not done: 1 once the next one has
                arrived, 0 between two steps.
        """
        if not self._gathering.in_flight:
            return
        with self.timer.waiting():
            self.reports, self.met = [Report.of_row(row) for row in self._gathering.collect()], self._reported_at
        if len({self.reports[rank].settings for rank in self.replica}) > 1:
            everyone = len(self.replica) == self.planner.world
            check_settings(self._settings, self.met, None if everyone else self._group())
        if not all(ended := [bool(report.ended) for report in self.reports]):
            self.ended = ended
        self._warn_of_concave_times()
        drawn_since = self.step - self._reported_at + ahead
        reports = [report._replace(drawn=report.drawn + drawn_since) for report in self.reports]
        if self.agreement is None:
            self.planner.update(self.step, reports)
        else:
            self.agreement.meet(self.step, reports)
        self.warn_of_slow_ranks()

    @property
    def idle(self) -> bool:
        """Whether this rank computes nothing in the running step, because it would make it longer."""
        return self.drawn is not None and not self.drawn.samples and self.loaders.rank in self.idle_ranks

    @property
    def idle_ranks(self) -> tuple[int, ...]:
        """The ranks that compute nothing in the running step."""
        return self.planner.at(self.step).idle

    def warn_of_slow_ranks(self) -> None:
        """Log, on rank 0, which ranks get no samples from now on, and once, which ones slow the job down."""
        slow, plan, before = self.planner.too_slow, self.planner.plans[-1], self._idle
        self._idle = plan.idle
        why = "" if slow is None else f" {slow._replace(idle=True, keeps='')}"
        for ranks, others, what in ((plan.idle, before, f"no samples.{why}"), (before, plan.idle, "samples again.")):
            if new := [str(rank) for rank in ranks if rank not in others]:
                rank_zero_info(f"From step {plan.start} on rank {', '.join(new)} gets {what}")
        if slow is not None and slow.keeps and not self._warned_too_slow:
            self._warned_too_slow = True
            rank_zero_info(str(slow))

    def _leave_costs(self) -> None:
        """Learn this rank's speed anew, by numbers of samples, once the agreed plan counts them again."""
        if self._by_samples or not self.planner.plans[-1].by_samples:
            return
        self._by_samples, self.cost, self.evidence = True, CostModel(), SpeedEstimator()
        off = [(report.off_by_cost, report.off_by_samples) for report in self.reports]
        by_cost, by_samples = (max(column, default=0.0) for column in zip(*off, strict=True)) if off else (0.0, 0.0)
        figures = f" (off by up to {by_cost:.0%} and {by_samples:.0%})" if off else ""
        rank_zero_warn(
            "What samples, or whole batches, are said to cost explains the times of steps worse than the numbers of "
            f"samples do{figures}. Batches are split by samples from step {self.planner.plans[-1].start} on. Correct "
            "the costs, set cost='padded' if each rank pads its part to its longest sample, or set cost='samples'."
        )

    def _warn_of_concave_times(self) -> None:
        """Say once on every rank that shares go by a curve that is below some rank's times."""
        bumps = [(rank, report) for rank, report in enumerate(self.reports) if report.bump]
        if self._warned or not bumps:
            return
        self._warned = True
        (rank, report), n = bumps[0], round(bumps[0][1].bump)
        warnings.warn(
            f"Rank {rank} takes {1e3 * report.bump_seconds:.3g} ms for {n} samples, more than its times for fewer and "
            f"for more samples suggest ({1e3 * report.cost.seconds(n):.3g} ms): somewhere they bend down, as on a "
            "device that works in steps. Measured shares go by the best convex curve below its times, so they may miss "
            "the best split by a step. If that matters, give shares that fit the device: `balance=[...]`.",
            stacklevel=2,
        )

    def samples_per_rank(self) -> Sequence[int]:
        """Samples of each rank in a full batch: by the plan in force, or by its own loader; 1 each where nobody knows.

        Nothing is planned before the training data has been looked at, as in the sanity check.
        """
        planned, own = self.planner.shares(self.step), self.loaders.own_sizes
        return planned if any(planned) else own if all(own) else [1] * self.planner.world

    def weigh(self, measure: Callable[[Any], Any], batch: Any) -> None:
        """Begin to sum the ranks' own measures of their batches, which replace the numbers of samples as weights."""
        of_passes = [_weight(measure(one) if self.current().samples else 0.0) for one in batches_of(batch)]
        own = torch.stack(of_passes).sum()
        total, work = own.clone(), None
        with self.timer.waiting():
            group = self._group()
        if group is not None:
            with deadline("sum the batch weights"):
                work = dist.all_reduce(total, group=group, async_op=True)
        self._weighing = own, total, work
        self._pass_weights = [weight.item() for weight in of_passes]

    @property
    def fitted(self) -> Cost | None:
        """The fitted cost of this rank; None while too little is known."""
        return (self.evidence.shape.curve() or self.cost.cost) if self.cost.ready else None

    @property
    def counts(self) -> bool:
        """Whether this rank's samples of the running step count; true outside of a step."""
        return self.drawn is None or self.weights()[0] > 0

    def weights(self) -> tuple[float, float]:
        """Weights of this rank's samples, and of those of all ranks of the replica.

        Raises:
            DataError: on every rank, if the user's measure of a batch was negative or NaN on any.
            UnsupportedError: no step is running.
        """
        own, total, *_ = self.current()
        if self._weighing is not None:
            mine, everyone, work = self._weighing
            if work is not None:
                with self.timer.waiting(), deadline("sum the batch weights"):
                    work.wait()
            self._weighing = mine, everyone, None
            own, total = mine.item(), everyone.item()
            if math.isnan(total):
                raise DataError(
                    "`batch_weight(batch)` was negative or NaN, infinite, or not one number, on some rank; it must be "
                    "a finite number of at least 0."
                )
        return own, total

    def mean_loss(self, loss: float, part: float) -> float:
        """The mean of a loss over the samples of the replica, of which this rank has a part (collective over it)."""
        with self.timer.waiting():
            group = self._group()
        if group is None:
            return loss
        mean = torch.tensor(part and part * loss, dtype=torch.float64)  # that of a padding batch may not be finite
        with self.timer.waiting(), deadline("average the loss"):
            dist.all_reduce(mean, group=group)
        return mean.item()

    def pass_fractions(self) -> list[float]:
        """The part of this rank's weight that each of its passes has."""
        weights = self.current().pass_sizes if self._weighing is None else self._pass_weights
        return [weight / (sum(weights) or 1) for weight in weights]

    def report(self, taken: bool) -> Report:
        """This rank's report to the others.

        Args:
            taken: the next report is about the steps from now on.
        """
        timings, count = self._timings, max(len(self._timings), 1)
        self._timings = [] if taken else timings
        self._settings = self.settings()
        speed = self.evidence.speed(self.cost.cost)
        off_by_cost, off_by_samples = self.by_cost.off()
        return Report(
            fixed=speed.cost.fixed,
            per_sample=speed.cost.per_sample,
            error=speed.noise if self.cost.ready else math.inf,
            drawn=self.loaders.next_step(),
            samples=sum(timing.samples for timing in timings) / count,
            compute=sum(timing.work for timing in timings) / count,
            wait=sum(timing.wait for timing in timings) / count,
            steps=len(timings),
            since=speed.since,
            bump=speed.bump[0],
            bump_seconds=speed.bump[1],
            ended=float(self.loaders.ended()),
            off_by_cost=off_by_cost,
            off_by_samples=off_by_samples,
            settings=settings_number(self._settings),
            idling=float(self.idling),
            compiles=float(self.timer.compiles),
            bends=speed.cost.bends,
        )


def _weight(value: Any) -> Tensor:
    """The user's measure of a batch; NaN, which reaches every rank through the sum, if it cannot be one."""
    own = torch.as_tensor(value).detach().cpu().double()  # on the CPU, since not every device has float64
    if own.numel() != 1 or not 0 <= own.reshape(()) < math.inf:
        return torch.tensor(math.nan, dtype=torch.float64)
    return own.reshape(())
