"""This rank's part of the work: what it draws, how much it weighs, how long it takes, and what the others are told."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_hetero.comm.async_all_gather import AsyncAllGather
from lightning_hetero.comm.deadline import deadline
from lightning_hetero.engine.optimizer_states import check_settings, number_of
from lightning_hetero.errors import DataError, UnsupportedError
from lightning_hetero.workload.cost import CostModel
from lightning_hetero.workload.curve import Curve
from lightning_hetero.workload.evidence import Evidence
from lightning_hetero.workload.planner import Planner
from lightning_hetero.workload.regrouping import Regrouping
from lightning_hetero.workload.report import Report
from lightning_hetero.workload.sampler import Drawn
from lightning_hetero.workload.shares import Cost
from lightning_hetero.workload.timer import Lap, StepTimer

if TYPE_CHECKING:
    from lightning_hetero.engine.global_sizes import GlobalSizes
    from lightning_hetero.engine.plan_agreement import PlanAgreement


class Draws(Protocol):
    """Where this rank's parts of the batches come from: its dataloaders."""

    def sources(self) -> Sequence[Any]:
        """One source per loader; none if the loaders have not been set up here."""

    def next_step(self) -> int:
        """The first step that this rank has not drawn yet."""

    def take(self) -> Drawn:
        """What was drawn for the batch that is about to be trained on."""

    def ended(self) -> bool:
        """Whether this rank's replica has come to the end of its own data, so that padding batches follow."""

    own_sizes: list[int]  # of each rank's batches, where its own loader sizes them; 0: not known
    sizes: "GlobalSizes"  # samples in a step of all ranks


class Workshare:
    """Counts and times every training batch, from the moment it is drawn until its report is sent.

    A batch goes through :meth:`begin`, perhaps :meth:`weigh`, then :meth:`weights`, and :meth:`end`.

    Args:
        planner: the agreed plans.
        timer: this rank's stopwatch.
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
        loaders: Draws,
        replica: tuple[int, ...],
        group: Callable[[], dist.ProcessGroup | None],
        gathering: AsyncAllGather,
        defers_reports: bool = False,
    ) -> None:
        self.planner, self.timer, self.loaders = planner, timer, loaders
        self.replica, self._group, self._gathering = replica, group, gathering
        self._defers, self._owes = defers_reports, False  # a report of the step that has ended
        self.cost, self.evidence = CostModel(), Evidence()
        self.step = self.met = 0  # batches done, the same on every rank; after which all have met last, to report
        self.reports: list[Report] = []  # of all ranks, the latest ones
        self.launched, self._reported_at = 0, 0  # reports that this rank has sent; the step of the latest one
        self._row, self._quiet = list[float](), 0  # that report; the step up to which there is none, after a loss
        self._told = self._told_too_slow = False  # that a rank's times bend down; that the job is faster without one
        self.ended = [False] * planner.world  # which ranks have come to the end of their data, as far as reports tell
        self._fresh_pass = False  # an epoch's first batch has just been drawn
        self.drawn: Drawn | None = None  # of the running step, None between steps
        self._laps: list[Lap] = []  # since the last report
        self.watchers: list[Callable[[Lap], None]] = []  # are shown every lap
        self._weighing: tuple[Tensor, Tensor, dist.Work | None] | None = None
        self.settings: Callable[[], dict[str, float]] = dict  # the hyperparameters of optimizers
        self._settings: dict[str, float] = {}  # when the latest report was made
        self.agreement: PlanAgreement | None = None  # on new plans; without one they come from the reports of all ranks

    def take_over(self, former: "Workshare", regrouping: Regrouping | None = None) -> None:
        """Go on where another one has stopped, which was made from an earlier view.

        Args:
            former: the other one.
            regrouping: in the midst of a fit: which ranks remain (collective over them then).
        """
        self.step, self.cost, self.evidence, self.watchers = former.step, former.cost, former.evidence, former.watchers
        self._told, self._told_too_slow = former._told, former._told_too_slow
        self._owes, self.launched = former._owes, former.launched
        if regrouping is not None:  # in the midst of a step, perhaps
            kept = regrouping.kept
            self.reports = [former.reports[rank] for rank in kept] if former.reports else []
            self.ended, self._laps, self.met = [former.ended[rank] for rank in kept], former._laps, former.met
            self.drawn, self._fresh_pass = former.drawn and former.drawn.among(kept, self.replica), former._fresh_pass
            if self._defers:  # replicas may be steps apart: the next reports are of a step that none has done
                self.launched, self._owes, self._quiet = regrouping.reports, False, regrouping.start
            elif former.launched > regrouping.reports:  # the others will send theirs, or do so now
                self._row, self._reported_at = former._row, former._reported_at
                self._gathering.launch(self._row)

    @property
    def heard(self) -> int:
        """How many times this rank has acted on the reports of all."""
        return self.launched - self._gathering.in_flight

    def forget(self) -> None:
        """Drop the reports that are on their way: a rank was lost."""
        self._gathering.forget()

    def assume(self, cost: Cost | Curve, samples: int) -> None:
        """Go on from what a checkpoint knows of this rank's time, when it last had so many samples."""
        if isinstance(cost, Curve):
            self.evidence.shape.assume(cost)
            cost = Cost(cost.fixed, (cost.seconds(samples) - cost.fixed) / samples)
        self.cost.assume(cost, samples)

    def begin_pass(self) -> None:
        """An epoch's first batch is about to be drawn, and those that workers prefetch with it."""
        self.listen()  # or the next plan could begin at a step that is drawn now
        self._fresh_pass = True
        self.ended = [False] * self.planner.world

    def begin(self) -> None:
        """A training batch has arrived.

        Raises:
            DataError: its dataloader is not one that has been set up here.
        """
        if self._fresh_pass:  # starting workers and the like is not what a batch costs
            self._fresh_pass = False
            self.timer.restart()
        if not self._defers:
            self.listen()
        if not self.loaders.sources():
            raise DataError(
                "the training dataloader was replaced after the Trainer had set it up, so that the weights of its "
                "batches are unknown. Pass the final one to `fit`, or return it from `train_dataloader`."
            )
        if self.agreement is not None:
            self.agreement.before_batch()
        self.drawn = self.loaders.take()

    def current(self) -> Drawn:
        """What was drawn for the running step.

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
            report: whether the ranks exchange reports after this step; the same on all.
        """
        if self.drawn is None:
            return
        for lap in self.timer.lap(max(int(self.drawn.samples), 1), padding=not self.drawn.samples):
            self.cost.observe(lap.samples, lap.work)
            if self.cost.warm:
                self.evidence.observe(lap, self.cost.cost)
                self._laps.append(lap)
            for watcher in self.watchers:
                watcher(lap)
        self.drawn, self._weighing = None, None
        self.step += 1
        if self.agreement is not None:
            self.agreement.after_batch()
        self._owes = report and self.step > self._quiet
        self.tell()

    def tell(self) -> None:
        """Send the report of the step that has ended, if it is due and a loss has kept this rank from that."""
        if self._owes:
            self.listen()
            self._row, self._reported_at = self.report(taken=self.agreement is None).row, self.step
            self._gathering.launch(self._row)
            self.launched, self._owes = self.launched + 1, False

    def listen(self) -> None:
        """Act on the reports that are on their way, if any; on all ranks at the same step."""
        if not self._gathering.in_flight:
            return
        with self.timer.waiting():
            self.reports, self.met = [Report.of_row(row) for row in self._gathering.collect()], self._reported_at
        if len({self.reports[rank].settings for rank in self.replica}) > 1:
            everyone = len(self.replica) == self.planner.world
            check_settings(self._settings, self.met, None if everyone else self._group())
        if not all(ended := [bool(report.ended) for report in self.reports]):
            self.ended = ended
        self._say_where_times_bend_down()
        if self.agreement is not None:
            return
        # Since the reports were sent every rank has drawn a batch for each step, and one more.
        drawn_since = self.step - self._reported_at + 1
        self.planner.update(self.step, [report._replace(drawn=report.drawn + drawn_since) for report in self.reports])
        self.say_who_is_too_slow()

    def say_who_is_too_slow(self) -> None:
        """Log once, on rank 0, without which ranks the job would be faster, if the planner has found some."""
        if self.planner.too_slow is not None and not self._told_too_slow:
            self._told_too_slow = True
            rank_zero_info(str(self.planner.too_slow))

    def _say_where_times_bend_down(self) -> None:
        """Say once on every rank that shares go by a curve that is below some rank's times."""
        bumps = [(rank, report) for rank, report in enumerate(self.reports) if report.bump]
        if self._told or not bumps:
            return
        self._told = True
        (rank, report), n = bumps[0], round(bumps[0][1].bump)
        warnings.warn(
            f"Rank {rank} takes {1e3 * report.bump_seconds:.3g} ms for {n} samples, more than its times for fewer and "
            f"for more samples suggest ({1e3 * report.cost.seconds(n):.3g} ms): somewhere they bend down, as on a "
            "device that works in steps. Measured shares go by the best convex curve below its times, so they may miss "
            "the best split by a step. If that matters, give shares that fit the device: `balance=[...]`.",
            stacklevel=2,
        )

    def samples_per_rank(self) -> Sequence[int]:
        """What each rank takes of a full batch: by the plan in force, or by its own loader; 1 each where nobody knows.

        Nothing is planned before the training data has been looked at, as in the sanity check.
        """
        planned, own = self.planner.shares(self.step), self.loaders.own_sizes
        return planned if any(planned) else own if all(own) else [1] * self.planner.world

    def weigh(self, measure: Callable[[Any], Any], batch: Any) -> None:
        """Begin to sum the ranks' own measures of their batches, which replace the numbers of samples as weights."""
        value = measure(batch) if self.current().samples else 0.0
        own = torch.as_tensor(value).detach().cpu().double()  # on the CPU, since not every device has float64
        own = own.reshape(()) if own.numel() == 1 else torch.tensor(float("nan"), dtype=torch.float64)
        if not 0 <= own < math.inf:
            own = torch.tensor(float("nan"), dtype=torch.float64)  # reaches every rank through the sum
        total, work = own.clone(), None
        with self.timer.waiting():
            group = self._group()
        if group is not None:
            with deadline("sum the batch weights"):
                work = dist.all_reduce(total, group=group, async_op=True)
        self._weighing = own, total, work

    @property
    def fitted(self) -> Cost | Curve | None:
        """How this rank's time depends on its samples; None while too little is known."""
        return (self.evidence.shape.curve() or self.cost.cost) if self.cost.ready else None

    @property
    def counts(self) -> bool:
        """Whether this rank's samples of the running step count; true outside of a step."""
        return self.drawn is None or self.weights()[0] > 0

    def weights(self) -> tuple[float, float]:
        """What this rank's samples weigh, and those of all ranks of the replica.

        Raises:
            DataError: on every rank, if the user's measure of a batch was negative or NaN on any.
            UnsupportedError: no step is running.
        """
        own, total, _ = self.current()
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

    def report(self, taken: bool) -> Report:
        """What this rank tells the others.

        Args:
            taken: the next report is about the steps from now on.
        """
        count = max(len(self._laps), 1)
        samples, work, wait = (
            sum(column) / count for column in zip(*(lap[:3] for lap in self._laps), (0.0, 0.0, 0.0), strict=True)
        )
        laps, self._laps = len(self._laps), [] if taken else self._laps
        speed = self.evidence.speed(self.cost.cost)
        error = speed.noise if self.cost.ready else math.inf
        drawn, cost, ended = self.loaders.next_step(), speed.cost, float(self.loaders.ended())
        means = samples, work, wait
        self._settings = self.settings()
        told = speed.since, *speed.bump, ended, number_of(self._settings)
        return Report(cost.fixed, cost.per_sample, error, drawn, *means, laps, *told, bends=cost.bends)
