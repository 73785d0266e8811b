"""Recovery from lost ranks: the others agree on a view, join again, and continue."""

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from traceback import clear_frames
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_hetero.batching.repartition import Repartition, ShareHistory
from lightning_hetero.comm import failures, threads
from lightning_hetero.comm.agreement import gather, raise_on_all
from lightning_hetero.comm.failure_detector import LEFT
from lightning_hetero.comm.failures import deadline, is_communication_error, wait_for_news
from lightning_hetero.comm.job import in_words, open_store
from lightning_hetero.comm.membership import Membership
from lightning_hetero.comm.membership_protocol import MembershipTerms, NextView
from lightning_hetero.comm.retry import CollectiveRetry, set_repeater
from lightning_hetero.comm.stores import store_at
from lightning_hetero.comm.view import View
from lightning_hetero.errors import CommunicationError, HeteroError, MembershipLostError, UnsupportedError
from lightning_hetero.lightning_compat import logged_so_far, results_of
from lightning_hetero.strategies.job import JobStrategy, gradients_of, set_gradients
from lightning_hetero.strategies.join import ElasticJoin
from lightning_hetero.strategies.metrics import leave_metrics, repeat_metrics
from lightning_hetero.strategies.recovery_policy import (
    LEFT_FIT,
    LostSamples,
    MembershipChange,
    MissedWork,
    Progress,
    RecoveryPolicy,
    catch_up,
    count_lost_samples,
    unreachable_members,
)
from lightning_hetero.strategies.trainer_checks import say_what_launchers_do, unsurvivable

T = TypeVar("T")
_log = logging.getLogger(__name__)
_AGREED = 1.0  # seconds in which the news of a loss has normally come to all


class PeerRecovery(RecoveryPolicy):
    """The policy by which a fit goes on among the ranks that remain.

    Args:
        strategy: of the fit.
    """

    def __init__(self, strategy: JobStrategy) -> None:
        super().__init__()
        self._strategy = strategy
        self._collectives = CollectiveRetry(self._recover)
        self._membership: Membership | None = None  # while the fit goes on without lost ranks
        self._former: Membership | None = None  # of those that were there, while they begin again with others
        self._longest: float | None = None  # silence of a rank that lives, as far as is known
        self._store: dist.Store | None = None  # of the latest view, if this rank hosts it
        self._in_step = False
        self._manual_steps = 0  # of optimizers within training_step
        self._over = False  # training has ended
        self._newcomers, self._past = ElasticJoin(strategy), ShareHistory()

    @property
    def newcomers(self) -> ElasticJoin:
        """See :class:`~lightning_hetero.strategies.recovery_policy.RecoveryPolicy`."""
        return self._newcomers

    @property
    def view_number(self) -> int | None:
        """The number of the view, while ranks may be lost; else ``None``."""
        return None if self._membership is None else self._strategy.job.view.number

    @property
    def changing(self) -> bool:
        """Whether the ranks are about to agree on who remains."""
        return self._membership is not None and self._membership.changing

    @property
    def patience(self) -> float:
        """Seconds until the loss of a rank is known; 0 if a lost rank is an error."""
        return 0.0 if self._membership is None else self._membership.grace + _AGREED

    def begin(self) -> None:
        """Training starts: from now on the ranks watch each other (collective).

        Raises:
            HeteroError: on every rank: this fit could not go on without a rank.
        """
        view = self._strategy.job.view
        self._collectives, self._over, self._past = CollectiveRetry(self._recover), False, ShareHistory()
        self._manual_steps = 0
        if not (again := self._strategy.ticket is not None):  # else the fit began earlier
            self.losses = []
        raise_on_all(self._unsurvivable(view), "a fit that goes on without lost ranks")
        say_what_launchers_do(type(self._strategy).__name__)
        self._newcomers.begin()
        if (membership := failures.membership()) is not None:
            self._survive(membership, view)
        if (change := self._newcomers.entered()) is not None:
            self.losses.append(change)
            change.warn(view)
        former = self._leave_former()
        if again:
            self.retry(lambda: gather(None, "that the fit has begun again"))
            if former is not None:  # nobody needs it any more
                former.close()

    def _unsurvivable(self, view: View) -> HeteroError | None:
        """The reason why this fit could not go on without a rank; ``None`` if it can."""
        strategy = self._strategy
        center = getattr(getattr(strategy, "algorithm", None), "center", None)
        sources, name = strategy.accounting.loaders.sources(), type(strategy).__name__
        callbacks = strategy.trainer.callbacks  # type: ignore[attr-defined]
        return unsurvivable(view, strategy.options, sources, callbacks, center, name, strategy.module)

    def _survive(self, membership: Membership, view: View) -> None:
        """Go on without lost ranks from now on (collective)."""
        options = self._strategy.options
        grace = None if options.grace == "auto" else float(options.grace)
        unit = "rank" if view.ranks_leave else "replica"
        terms = MembershipTerms(grace, options.min_replicas, options.limit.total_seconds(), unit)
        self._accounting = self._strategy.accounting
        hooks: dict[str, Any] = {
            "on_change": self._on_change,
            "offer": self._offer,
            "steps": lambda: self._accounting.step,
        }
        known = [silence for silence in gather(self._longest, "how long ranks are silent") if silence is not None]
        membership.survive(terms, view.number, view.units, max(known, default=None), **hooks)
        self._membership = membership
        set_repeater(self._collectives)
        repeat_metrics(self._strategy.lightning_module)

    def end(self) -> None:
        """Training has ended: from now on a lost rank is an error (collective)."""
        threads.unfreeze_gc()
        self._over = True
        self.pause()
        self._leave_former()
        self._newcomers.end()

    def pause(self) -> None:
        """Leave the fit, to begin it again with other ranks (collective). Until it has begun, losses are noticed."""
        set_repeater(None)
        leave_metrics(self._strategy.lightning_module)
        if self._membership is not None:
            with suppress(CommunicationError), deadline("leave the fit"):
                dist.barrier()  # who is lost now has done its part
            self._longest = self._membership.longest
            self._former, self._membership = self._membership, None
            wait_for_news(False)

    def remaining(self) -> tuple[NextView, int, dist.Store | None] | None:
        """See :class:`~lightning_hetero.strategies.recovery_policy.RecoveryPolicy`.

        Raises:
            MembershipLostError: this rank cannot go on.
        """
        if self._former is None:
            return None
        threads.abort_sockets()
        agreed, me = self._former.agree(LEFT_FIT), self._former.me
        begun = sorted(id for id, why in agreed.lost.items() if why == LEFT)
        if begun and len(agreed.members) <= len(agreed.lost):  # they may be more than half, and train
            raise MembershipLostError(
                f"Rank {me} cannot go on: rank(s) {', '.join(map(str, begun))} have begun again just before another "
                "one was lost, and go on without this one. Start it again if the job lets replicas join."
            )
        return agreed, me, self._store if agreed.roster.host == me else None

    def _leave_former(self) -> Membership | None:
        former, self._former = self._former, None
        if former is not None:
            former.leave()
            wait_for_news(self._membership is None)
        return former

    def failed(self, exception: BaseException) -> None:
        """Let the others know why this rank ends; they go on."""
        threads.unfreeze_gc()
        set_repeater(None)
        leave_metrics(self._strategy.lightning_module)
        alike = getattr(exception, "on_every_rank", False)
        self._newcomers.end(over=alike or (self._membership is None and self._former is None))
        if self._membership is not None and alike:
            # Who hears of a loss before it has raised the same error would go on instead.
            self._strategy.job.await_all(f"error {self._strategy.engine.windows}", lambda: self.changing)
        if self._former is not None:
            self._former.announce("failed", in_words(exception))
            self._former.close()
        self._membership = self._former = None  # the others hear of it as of all failures

    # -- operations that may break -----------------------------------------------------------------

    def retry(self, operation: Callable[[], T]) -> T:
        """The result of an operation that is called again after a loss."""
        return self._until_done(operation, lambda _: False, operation)

    def step(self, operation: Callable[[], T], instead: Callable[[], T], backward: bool = True) -> T:
        """Run an optimizer step, again after a loss unless the others have taken it.

        With manual optimization the step is ``training_step``. If optimizers have stepped in it, its rest is left out.
        Gradients of earlier batches, and logged values, are as before the broken step when it is repeated. Statistics
        that the module keeps by itself (BatchNorm's, torchmetrics') and random numbers have taken its batch in already.
        """
        module = self._strategy.module
        if self._in_step:  # the outer one repeats it
            output = operation()
            self._manual_steps += not module.automatic_optimization
            return output
        manual_steps = self._manual_steps
        adds = backward and (self._strategy.accumulates_locally or not module.automatic_optimization)
        take_back = logged_so_far(results_of(self._strategy.trainer) if self._membership is not None else None)

        def inside() -> T:
            # Here: a loss changes their weights, and the repeated step may break again.
            gradients = gradients_of(module) if adds and self._membership is not None else None
            by_hand = [] if module.automatic_optimization else module.parameters()
            trainable = [(parameter, parameter.requires_grad) for parameter in by_hand]
            try:
                with self._collectives.plain(), self._step():
                    return operation()
            except BaseException:
                if gradients is not None:  # of earlier batches, to which the broken step may have added
                    set_gradients(module, gradients)
                for parameter, on in trainable:  # an optimizer may be toggled
                    parameter.requires_grad_(on)
                raise

        def missed(others: MissedWork) -> bool:
            if others.step:
                self._count_steps(others.manual_steps)
                return True
            if stepped := self._manual_steps > manual_steps:
                _warn_of_rest(self._strategy.trainer.global_step)
            else:
                take_back()
            return stepped

        return self._until_done(inside, missed, instead)

    def _count_steps(self, others: int) -> None:
        """Count steps of optimizers within ``training_step`` that other ranks have taken for this one."""
        self._manual_steps += others
        progress = self._strategy.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        for _ in range(others):
            progress.increment_ready()
            progress.increment_completed()

    def exchange(self, operation: Callable[[], T]) -> T | None:
        """Run what follows a step between replicas, again after a loss unless the others have completed it."""

        def inside() -> T | None:
            with self._collectives.plain():
                return operation()

        def count() -> None:
            self._strategy.engine.count_exchange()  # the one of the ranks that remain

        self.recover_if_changing()
        return self._until_done(inside, lambda missed: missed.exchange, count)

    def recover_if_changing(self) -> bool:
        """See :class:`~lightning_hetero.strategies.recovery_policy.RecoveryPolicy`. The others wait for this rank."""
        if changing := self.changing:
            self._recover(time.monotonic())
        return changing

    def _until_done(
        self, operation: Callable[[], T], missed: Callable[[MissedWork], bool], instead: Callable[[], T]
    ) -> T:
        while True:
            began = time.monotonic()
            try:
                return operation()
            except RuntimeError as error:
                if self._in_step or self._membership is None or not _is_of_others(error):
                    raise
                others = self._recover(began)
                _release(error)
                if missed(others):
                    return instead()

    @contextmanager
    def _step(self) -> Iterator[None]:
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def _on_change(self) -> None:
        """A rank was lost, or asks who is: end this one's waits. On the membership's thread.

        The sockets of process groups are shut down, so that a collective which waits raises an error.
        """
        if not self._over:
            threads.abort_sockets()

    # -- recovery ----------------------------------------------------------------------------------

    def _offer(self, number: int) -> Any:
        """Open the store of a new view on this rank."""
        self._store, address = open_store(self._strategy.interface, self._strategy.options.limit)
        return address

    def _recover(self, stopped: float) -> MissedWork:
        """Agree on who remains, and go on with them (collective over them); what they have done, and this rank not."""
        membership = self._watched
        me, own, lost, known = membership.me, self._progress(), dict[int, str](), dict[int, int]()
        began, limit = time.monotonic(), self._strategy.options.limit.total_seconds()
        of_own_streams = dict[int, float]()  # by the view before each try: samples drawn in it for ranks lost since
        self._in_step = False
        while True:
            threads.abort_sockets()  # this thread has noticed the loss, other threads of this rank need not have
            agreed = membership.agree(own)
            lost, known = lost | agreed.lost, known | agreed.steps
            if LEFT_FIT in map(tuple, agreed.progress.values()):  # others have left the fit, and this rank was about to
                raise self._newcomers.again(agreed, self._store if agreed.roster.host == me else None)
            try:
                missed, counted = self._rejoin(agreed, own, lost, known, of_own_streams)
                break
            except RuntimeError as error:  # one more was lost meanwhile
                if not _is_of_others(error):
                    raise
                if time.monotonic() - began > limit:
                    raise unreachable_members(me, limit, agreed.roster.number, error) from error
                _log.info("rank %d could not join view %d: %s", me, agreed.roster.number, error)
        self._newcomers.continue_after_loss()
        self._tell(lost, counted, time.monotonic() - stopped)
        return missed

    @property
    def _watched(self) -> Membership:
        """The membership of the running fit."""
        if self._membership is None:
            raise UnsupportedError("ranks are watched during a fit only: a lost rank is an error now.")
        return self._membership

    def _progress(self) -> Progress:
        engine, accounting = self._strategy.engine, self._strategy.accounting
        counts = (
            engine.steps_taken + self._manual_steps,
            engine.exchanges_done,
            self._collectives.calls,
            accounting.loaders.next_step(),
            accounting.reports_applied,
        )
        return Progress(*counts, accounting.met if engine.lockstep else 0, self._manual_steps)

    def _rejoin(
        self,
        agreed: NextView,
        own: Progress,
        lost: dict[int, str],
        known: dict[int, int],
        of_own_streams: dict[int, float],
    ) -> tuple[MissedWork, LostSamples]:
        strategy, collectives = self._strategy, self._collectives
        me, before = self._watched.me, strategy.job.view
        # 1. Meet the survivors in a new world, and finish collectives that only some had completed.
        strategy.abandon()
        store = self._store if agreed.roster.host == me else None
        store = store or store_at(agreed.offer, strategy.options.limit)
        with collectives.plain():
            job = strategy.job.for_survivors(agreed.roster.number, agreed.members, store)
            all_progress = [Progress(*agreed.progress[id]) for id in job.view.ids]
            strategy.check_shards(job.view, [(progress.step, progress.exchanges) for progress in all_progress])
            catch_up(collectives, all_progress, own)
            # 2. Where each data-parallel rank was before, and from which step on samples are shared out anew.
            sharing = [view.data_parallel(strategy.options.tensor_parallel).ids for view in (before, job.view)]
            former_ranks = tuple(map(sharing[0].index, sharing[1]))
            reports = [progress.reports for progress in all_progress]
            repartition = Repartition(former_ranks, max(progress.draw for progress in all_progress), max(reports))
            # 3. What this rank's replica, and all of them, have done and this rank has not.
            replica = [all_progress[rank] for rank in job.view.replica.ranks]
            furthest = max(replica, key=lambda progress: progress.step)
            missed_step, manual_steps = own.step < furthest.step, furthest.manual_steps - own.manual_steps
            missed_exchange = strategy.engine.lockstep and own.exchanges < max(
                progress.exchanges for progress in all_progress
            )
            if own_data := strategy.accounting.loaders.own_streams:
                of_own_streams[before.number] = strategy.accounting.drawn_for_others(former_ranks, missed_step)
            # 4. Make all collaborators anew, and let ranks that are behind copy the state of one that is not.
            strategy.continue_with(job, repartition, missed_exchange, reports.index(max(reports)), self._past)
            self._accounting = strategy.accounting
            strategy.copy_states([progress.step for progress in all_progress])
            drawn = sum(of_own_streams.values()) if own_data else None
            alike = job.view.ranks_leave
            missed = MissedWork(missed_step, missed_exchange, manual_steps)
            by_id = dict(zip(job.view.ids, all_progress, strict=True))
            if strategy.accumulates_locally:  # what the lost ranks have added up since the latest step is lost
                start = max(gather(strategy.step.window_start, "where the window began"))
                known = {id: min(done, start) for id, done in known.items()}
            return missed, count_lost_samples(lost, known, by_id, self._past, alike, drawn)

    def _tell(self, lost: dict[int, str], counted: LostSamples, seconds: float) -> None:
        view, step = self._strategy.job.view, self._strategy.trainer.global_step
        sizes, (samples, bound) = (view.world, len(view.units)), counted
        own = self._strategy.accounting.loaders.own_streams
        change = MembershipChange(view.number, lost, *sizes, seconds, samples, step, bound=bound, own_streams=own)
        self.losses.append(change)
        self.losses[-1].warn(view)


def _release(error: BaseException | None) -> None:
    """Let go of what the frames of a handled error hold: the graph of a broken step, which keeps parameters in use."""
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _is_of_others(error: BaseException) -> bool:
    """Whether an error means that others were lost, rather than this rank itself: a connection has ended."""
    return is_communication_error(error) and not isinstance(error, MembershipLostError)


def _warn_of_rest(step: int) -> None:
    with suppress(UserWarning):  # also where warnings are errors
        warnings.warn(
            f"A rank was lost within `training_step`, after step {step}: an optimizer had stepped in it already, so "
            "it cannot be repeated. What was left of it is not done; all ranks go on with the next batch.",
            stacklevel=4,
        )
