"""Engine between replicas: calls the algorithm around each step, and finds the consensus to evaluate and save."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_hetero.algorithms.base import (
    Averager,
    FitInfo,
    Outcome,
    ReplicaLoss,
    StepContext,
    change_layout,
    warn_of_scratch,
)
from lightning_hetero.algorithms.state import (
    Own,
    PerReplica,
    Shared,
    check_declared,
    drop_in_flight,
    fields_of,
    has_tensors,
    read,
    scratch_in_use,
    select,
    write,
)
from lightning_hetero.batching.accounting import BatchAccounting
from lightning_hetero.batching.loss import LossTracker
from lightning_hetero.comm.agreement import check_equal
from lightning_hetero.comm.all_reduce import ReplicaLinks, Traffic
from lightning_hetero.comm.view import View
from lightning_hetero.errors import CheckpointError, NotFiniteError, UnsupportedError
from lightning_hetero.replicas import optimizer_states
from lightning_hetero.replicas.vectors import Replica


def nonfinite_message(
    broken: Sequence[int],
    replicas: Sequence[Sequence[int]],
    step: int,
    seen: Sequence[tuple[str | None, int | None] | None],
    fresh_start: str,
) -> str:
    """The error message for replicas that are not finite.

    Args:
        broken: their numbers.
        replicas: the ranks of each.
        step: optimizer step after which they were found.
        seen: of each rank, the first parameter or buffer that is not finite, and the step of the first such loss;
            ``None``: this rank does not know.
        fresh_start: with what such a replica would go on, were it left out.
    """
    parts = []
    for index in broken:
        ranks = replicas[index]
        known = {rank: found for rank in ranks if (found := seen[rank]) is not None}
        if not known:
            parts.append(f"replica {index} (ranks {list(ranks)}) has sent values that are not finite")
            continue
        name = next((name for name, _ in known.values() if name), None)
        if name is None:
            parts.append(
                f"the changes of replica {index} (ranks {list(ranks)}) are too large for the wire; use 'bf16' or 'fp32'"
            )
            continue
        losses = [f"of rank {rank} at step {step}" for rank, (_, step) in known.items() if step is not None]
        parts.append(
            f"replica {index} (ranks {list(ranks)}) holds values that are not finite, the first in {name!r}"
            + (f"; the first loss that was not: {', '.join(losses)}" if losses else "; its losses were all finite")
        )
    spread = "No value that is not finite has reached the others."
    firsts = sorted(
        (found[1], rank)
        for i in broken
        for rank in replicas[i]
        if (found := seen[rank]) is not None and found[1] is not None
    )
    if len(broken) > 1 and firsts:
        spread = (
            f"The loss of rank {firsts[0][1]} was the first that was not finite, at step {firsts[0][0]}: before that "
            "it may have given the others values that were finite, but far too large."
        )
    return (
        f"When replicas met after step {step}, {'; '.join(parts)}. {spread} Lower the "
        "learning rate or clip gradients; or give on_nan='skip' to leave such replicas out, who then go on with "
        f"{fresh_start}."
    )


@contextmanager
def explain_nonfinite(engine: "Engine") -> Iterator[None]:
    """In a block in which replicas meet, add to errors about those that are not finite what the engine knows.

    All ranks alike do where all exchange after the same steps (collective then, if a replica is not finite).

    Raises:
        NotFiniteError: a replica is not finite, and may not be left out.
    """
    averager = engine.running
    skipped, facts = len(engine.traffic.skipped), averager.traits
    try:
        yield
    except NotFiniteError as error:
        mine = averager.replica.first_nonfinite(), engine.losses.nonfinite_step
        if facts.lockstep:
            seen = engine.links.gather(mine)
        else:  # nobody else knows
            seen = [mine if rank == engine.view.rank else None for rank in range(engine.view.world)]
        message = nonfinite_message(error.replicas, engine.view.ranks, engine.windows, seen, facts.fresh_start)
        told = NotFiniteError(error.replicas, message)
        raise (told.of_all() if facts.lockstep else told) from None
    for index in engine.traffic.skipped[skipped:]:
        warn = rank_zero_warn if facts.lockstep else warnings.warn
        warn(
            f"Replica {index} (ranks {list(engine.view.ranks[index])}) was left out of the average after step "
            f"{engine.windows}: its values were not finite. It goes on with {facts.fresh_start}."
        )


#: Shared state that follows from the values with which all begin when others join, or resume with other replicas.
FROM_MODEL = "reference", "commits"
#: What ranks must have done alike.
CHANGED = "the parameters that have become trainable or frozen"


def unfrozen_within_epoch(names: Iterable[str]) -> str:
    """The error message for parameters that are unfrozen, or frozen, within an epoch.

    Args:
        names: of the parameters.
    """
    return (
        f"{listed(names)} became trainable, or frozen, in mid-epoch; replicas agree on what is trainable at the "
        "beginning of an epoch. Change it there, as in on_train_epoch_start, or use hetero_ddp."
    )


def listed(names: Iterable[str]) -> str:
    """The names in few words: the first one, and how many more."""
    first, *more = names
    return f"{first} and {len(more)} more" if more else first


class EvaluationCadence:
    """Warning, once in a fit, if validation or checkpoints come more often than exchanges.

    Attributes:
        exchanges: that this replica has completed in this fit.
        before: at which step, and after how many exchanges, the latest look was; ``None``: there was none.
    """

    def __init__(self) -> None:
        self.exchanges = 0
        self.before: tuple[int, int] | None = None
        self._warned = False

    def note(self, step: int, between: str) -> None:
        """Note a look.

        Args:
            step: optimizer steps done.
            between: what a look sees between two exchanges; empty if it is worth no warning.
        """
        before = self.before
        if not between:
            return
        self.before = step, self.exchanges
        if before is None or self._warned:
            return
        if self.exchanges == before[1] and step > before[0]:
            self._warned = True
            rank_zero_warn(
                f"Replicas have not met between step {before[0]} and step {step}, at which validation or a "
                f"checkpoint looks at them again. Between exchanges it sees {between}. Look less often "
                "(check_val_every_n_epoch, val_check_interval, every_n_train_steps), or lower tau."
            )


class SurvivingState(NamedTuple):
    """State of a replica that remains, while the ranks recover from a loss.

    Attributes:
        state: of its averager, with entries of all replicas before the loss.
        under_way: whether exchanges were under way.
        scratch: what starts over, in words.
    """

    state: dict[str, Any]
    under_way: bool
    scratch: list[str]


class Engine:
    """Engine of a fit: counts windows, and lets the averager, if there is one, act between replicas.

    A window is an optimizer step with all of its batches.

    Args:
        view: who takes part.
        links: the wires between replicas.
        accounting: of this rank's batches.
        report_every: batches from one exchange of reports to the next, where there is one replica only.
        sharing: the view of those who share out samples. Default: ``view``.

    Attributes:
        averager: brings parameters together; of the running fit. ``None``: none runs, or there is one replica.
        losses: what this rank's training loss has been.
        windows: optimizer steps since the start of the fit.
        exchanges_done: exchanges between replicas that this one has completed, since its ranks have met.
        exchanged: the latest of these steps that an exchange between replicas, if one was due, has followed.
        finished: whether replicas are equal, at the end of the fit: what is saved is what the model holds.
    """

    def __init__(
        self,
        view: View,
        links: ReplicaLinks,
        accounting: BatchAccounting,
        report_every: int,
        sharing: View | None = None,
    ) -> None:
        self.view, self.links, self._accounting = view, links, accounting
        self._sharing = sharing or view
        self._report_every = report_every
        self.averager: Averager | None = None
        self.losses = LossTracker()
        self.windows = self.exchanged = self.exchanges_done = 0
        self.finished = False
        # While ranks recover from a loss:
        self._survived: SurvivingState | None = None
        self._count_before = 0  # replicas among which the averager was last at work; 0: it was not
        self._kept: list[int] = []  # of each replica that remains, its index there
        self._open = self._stepped = False  # whether a window has begun, and its optimizer step has been taken
        self._due = self._epoch_ends = False  # whether replicas meet after the window that ends, and an epoch ends
        self._own: list[Tensor] | None = None  # this replica's values while the model holds the consensus
        self._cadence = EvaluationCadence()

    # -- a fit -------------------------------------------------------------------------------------

    def start(
        self,
        averager: Averager,
        replica: Replica,
        optimizers: Callable[[], Sequence[Optimizer]],
        run: FitInfo,
        metric: Callable[[str], float | None],
    ) -> Outcome | None:
        """Begin a fit, with the same values on all ranks (collective).

        Args:
            averager: a new one.
            replica: the values that replicas exchange.
            optimizers: gives the optimizers.
            run: what is known of the fit.
            metric: gives the mean over all ranks of a logged metric; see :class:`StepContext`.
        """
        self._open = self.finished = False  # an earlier fit may have ended in a window
        self._cadence = EvaluationCadence()
        self.averager, self._metric, self._optimizers = averager, metric, optimizers
        return averager.setup(replica, self.links, optimizers, run)

    def resume(self, windows: int) -> None:
        """Go on after so many optimizer steps."""
        self.windows, self.exchanged, self._cadence.before = windows, windows, None

    def finish(self) -> Outcome | None:
        """Make all replicas equal, at the end of a fit (collective)."""
        averager = self.running
        with explain_nonfinite(self):
            averager.complete(context := self.context(epoch_ends=False))
            outcome = averager.finish(context)
        self.finished = True
        return outcome

    def close(self) -> None:
        """Let go of what the fit held; local, idempotent, also after an error."""
        if self.averager is not None:
            self.averager.close()
            self.averager = self._own = None

    def continue_from(self, former: "Engine") -> None:
        """Continue the counts of an engine made from an earlier view; :meth:`take_over` brings the averager."""
        self.windows, self.exchanged, self.exchanges_done = former.windows, former.exchanged, former.exchanges_done
        self._stepped = former._stepped
        self.losses = former.losses
        self.links.traffic = former.traffic

    @property
    def lockstep(self) -> bool:
        """Whether all replicas exchange after the same steps."""
        return self.averager is None or self.averager.traits.lockstep

    def abandon(self) -> None:
        """Drop what is under way between replicas: one was lost, and connections are broken. Local."""
        self.links.abandon()

    def take_over(self, former: "Engine", kept: Sequence[int]) -> None:
        """Take over from an engine among whose replicas some were lost. Local.

        Args:
            former: what went on until now.
            kept: of each replica that remains, its index there.
        """
        self._open, self._due, self._epoch_ends = former._open, former._due, former._epoch_ends
        self._own, self._cadence, self._survived = former._own, former._cadence, former._survived
        if former._count_before:  # it was recovering itself
            self._count_before, self._kept = former._count_before, [former._kept[index] for index in kept]
        else:
            self._count_before, self._kept = former.view.count if former.averages else 0, list(kept)
        if former.averager is not None:
            self.averager, self._metric, self._optimizers = former.averager, former._metric, former._optimizers

    def continue_after_loss(self, missed: bool, run: FitInfo) -> None:
        """Go on in the midst of a fit, among the replicas that remain, after :meth:`take_over` (collective over them).

        Args:
            missed: whether the others have completed an exchange in which this replica lost its connections.
            run: what is known of the job and the fit now.
        """
        averager, kept = self.averager, self._kept
        if averager is None:
            return
        averager.links = self.links  # those of before are cut
        if not self._count_before:
            averager.run = run
            return
        if (survived := self._survived) is None:
            averager.before_save(lost=[index for index in range(self._count_before) if index not in kept])
            dropped, scratch = drop_in_flight(averager), scratch_in_use(averager)
            # Another rank may be lost before this ends: then it is done again, and the averager has lost its state.
            survived = self._survived = SurvivingState(read(averager), bool(dropped), scratch)
        state = select(averager, survived.state, kept)
        averager.close()
        progress = self.links.gather((state["commits"], self.exchanged, survived.under_way))
        furthest = max(range(len(progress)), key=lambda rank: progress[rank][:2])
        equal = len({commits for commits, *_ in progress}) == 1  # then vectors are, too
        names = [field.name for field in fields_of(type(averager), Shared, PerReplica)]
        sent = {name: state[name] for name in names if not (equal and has_tensors(state[name]))}
        theirs = self.links.value_of(furthest, sent)
        averager.setup(averager.replica, self.links, self._optimizers, run)
        write(averager, {**state, **theirs}, Shared, Own, PerReplica)
        averager.after_restore(ReplicaLoss(state, kept, self.context(epoch_ends=False)))
        self._survived, self._count_before, scratch = None, 0, survived.scratch
        if missed and averager.on_missed(self.windows) == "adopt":
            averager.replica.unpack(averager.reference)
        if any(under_way for *_, under_way in progress):
            scratch = [
                "exchanges under way, which are dropped; the next ones take in what replicas have done",
                *scratch,
            ]
        warn_of_scratch(averager, scratch, "Replicas were lost")

    @property
    def running(self) -> Averager:
        """The averager of the running fit.

        Raises:
            UnsupportedError: no fit runs.
        """
        if self.averager is None:
            raise UnsupportedError("replicas exchange during a fit only: begin one with Trainer.fit.")
        return self.averager

    @property
    def averages(self) -> bool:
        """Whether an averager is at work."""
        return self.averager is not None and (self.view.count > 1 or not self.averager.traits.needs_others)

    @property
    def all_met(self) -> bool:
        """Whether an exchange was due after the latest batch."""
        return self._due

    @property
    def traffic(self) -> Traffic:
        """Cost of the exchanges between replicas since the ranks have met."""
        return self.links.traffic

    def samples_per_replica(self) -> list[int]:
        """Samples of each replica in a full batch; where all meet at once, 0 for those that have no more data."""
        averager = self.running
        samples = self._sharing.per_replica(self._accounting.samples_per_rank())
        if not averager.traits.lockstep:
            return samples
        ended, replicas = self._accounting.ended, self._sharing.ranks
        left = [0 if ended[ranks[0]] else n for ranks, n in zip(replicas, samples, strict=True)]
        return left if any(left) else samples

    def context(self, epoch_ends: bool) -> StepContext:
        """Facts of the latest optimizer step, the same on all ranks."""
        samples = self.samples_per_replica()
        return StepContext(self.windows, epoch_ends, samples, self.losses.mean_over_ranks, self._metric)

    # -- a window ----------------------------------------------------------------------------------

    def before_window(self) -> None:
        """A window is about to begin: before its first forward pass. Asked again within a window it does nothing.

        Raises:
            UnsupportedError: parameters have become trainable, or frozen, in mid-epoch.
        """
        if self._open or self.averager is None:
            return
        if self.averages:
            if changed := self.averager.replica.changed():
                raise UnsupportedError(unfrozen_within_epoch(changed))
            with self._accounting.timer.waiting(exchange=True), explain_nonfinite(self):
                self.averager.before_step(self.context(epoch_ends=False))
        self._open = True  # only now: what breaks is called again

    def change_layout(self) -> bool:
        """Between two windows, go on with the parameters that are trainable now; whether these have changed.

        Collective.

        Raises:
            DisagreementError: on every rank: they are not the same ones everywhere.
        """
        averager = self.running
        with self._accounting.timer.waiting(exchange=True):
            changed = averager.replica.changed()
            check_equal(CHANGED, {name: "trainable" if on else "frozen" for name, on in changed.items()})
            if not changed:
                return False
            averager.replica.broadcast_parameters([name for name, trainable in changed.items() if trainable])
            with explain_nonfinite(self):
                change_layout(averager, self.context(epoch_ends=False), self._optimizers)
        return True

    def decide_exchange(self, batch: int, window_ends: bool, epoch_ends: bool) -> bool:
        """Decide whether replicas exchange after this batch, and return whether ranks exchange reports after it.

        Called once per batch, alike on all ranks. Reports are exchanged where replicas meet anyway: elsewhere the fast
        ones would have to wait.

        Args:
            batch: batches done, this one included.
            window_ends: whether an optimizer has stepped after it.
            epoch_ends: whether it is the last of its epoch.
        """
        self._due, self._epoch_ends = False, epoch_ends
        if window_ends and self.averager is not None:
            self._due = self.averager.due(self.context(epoch_ends)._replace(step=self.windows + 1))
        return batch % self._report_every == 0 if self.view.count == 1 else self._due

    def before_overwrite(self, after_backward: bool = False) -> None:
        """The device is about to be told to change the model's values, of which a copy may be under way.

        Args:
            after_backward: whether a backward pass has ended.
        """
        if self.averager is None:
            return
        replica, timer = self.averager.replica, self._accounting.timer
        with timer.waiting(exchange=True) if replica.copies else nullcontext():
            replica.before_overwrite(after_backward)

    def take_loss(self, loss: Tensor) -> None:
        """Take in the loss of a batch, the mean over its samples, which weighs as much as they do in the gradient."""
        if self.averager is not None:
            self.losses.take(loss, self._accounting.weights()[0], self.windows)

    @property
    def steps_taken(self) -> int:
        """Optimizer steps that the parameters have seen: one more than windows while a window ends."""
        return self.windows + self._stepped

    def step_taken(self) -> None:
        """The optimizer has stepped. What follows may break, until :meth:`window_ended` counts the step."""
        self._stepped = True

    def window_ended(self) -> None:
        """The window is over; after :meth:`decide_exchange`."""
        self.windows += 1
        self._open = self._stepped = False

    def exchange(self) -> Outcome | None:
        """Let the algorithm act after a window: it exchanges if that is due. It can be called again if it breaks."""
        if self.averager is None or not self.averages:
            return None
        averager = self.averager
        with self._accounting.timer.waiting(exchange=True), explain_nonfinite(self):
            outcome = averager.after_step(self.context(self._epoch_ends))
        if self._due:
            check_declared(averager)  # what it has made only now has a role, too
        self.count_exchange()
        self._cadence.exchanges += outcome is not None and outcome.exchanged
        return outcome

    def count_exchange(self) -> None:
        """Count the exchange that follows the latest window, if one was due; others may have completed it alone."""
        self.exchanged, self.exchanges_done = self.windows, self.exchanges_done + self._due

    def exchange_completed(self) -> None:
        """The exchange is complete: where all replicas are here now, act on their reports."""
        if self.averages and self._due and self.averager is not None and self.averager.traits.blocking:
            self._accounting.apply_reports(ahead=0)  # all are here now

    # -- the consensus -----------------------------------------------------------------------------

    def consensus(self, sanity_check: bool = False) -> list[Tensor]:
        """The values to evaluate and to save (collective). In a ``sanity_check`` training has not begun."""
        averager = self.running
        with explain_nonfinite(self):
            values = averager.consensus(self.context(epoch_ends=False))
        if not sanity_check:
            self.note_evaluation()
        return values

    def join_values(self) -> list[Tensor]:
        """The values from which all replicas go on together when others join (collective)."""
        averager = self.running
        with explain_nonfinite(self):
            return averager.join_values(self.context(epoch_ends=False))

    def note_evaluation(self) -> None:
        """Count an evaluation of the mean of the replicas, for the rate of exchanges."""
        averager = self.running
        self._cadence.note(self.windows, averager.traits.between)

    def evaluation_values(self, sanity_check: bool) -> list[Tensor] | None:
        """The values to validate; ``None``: those of the model (collective).

        Args:
            sanity_check: whether this is the sanity check, before training.
        """
        self.before_overwrite()
        return self.consensus(sanity_check) if self.averages and self._own is None else None

    def hold(self, values: list[Tensor] | None) -> None:
        """Let the model hold what :meth:`evaluation_values` has returned, until :meth:`release`."""
        if values is not None:
            averager = self.running
            self._own = averager.replica.pack()
            averager.replica.unpack(values)

    def release(self) -> None:
        """Let the model hold this replica's own values again."""
        if self.averager is not None and self._own is not None:
            self.averager.replica.unpack(self._own)
            self._own = None

    @property
    def holds(self) -> bool:
        """Whether the model holds the consensus."""
        return self._own is not None

    def own_values(self, flat: Callable[..., Tensor] | None = None) -> list[Tensor]:
        """This replica's own values, whatever the model holds; for ``flat`` see :meth:`Replica.pack`."""
        averager = self.running
        return averager.replica.pack(flat=flat) if self._own is None else self._own

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(
        self, optimizers: Sequence[Optimizer], precision: dict[str, Any], flat: Callable[..., Tensor] | None = None
    ) -> dict[str, Any] | None:
        """This replica's own state, on its leader; elsewhere ``None`` (collective). Tensors and builtins only.

        Where each rank has a shard, it is that of the shard.

        Args:
            optimizers: of the fit.
            precision: state of the precision plugin.
            flat: see :meth:`Replica.pack`.
        """
        averager = self.running
        with explain_nonfinite(self):
            averager.before_save()
            check_declared(averager)
            algorithm = read(averager)
        values = self.own_values(flat)  # on all ranks: those of a replica make their buffers alike first
        if not self.links.is_leader:
            return None
        return {
            "values": [value.cpu() for value in values],
            "kept": dict(averager.replica.unexchanged_buffers()),
            "precision": precision,
            "optimizers": [optimizer_states.of_rank(optimizer) for optimizer in optimizers],
            "windows": self.windows,
            "algorithm": algorithm,
        }

    def shared_state(self) -> dict[str, Any]:
        """The state that is the same on all replicas, for :meth:`load_shared_state` (collective)."""
        averager = self.running
        with explain_nonfinite(self):
            averager.before_save()
            state = read(averager)
        names = [field.name for field in fields_of(type(averager), Shared)]
        return {name: state[name] for name in names if name not in FROM_MODEL}

    def load_shared_state(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`shared_state` of other replicas, from the model's values (collective)."""
        averager = self.running
        write(averager, state, Shared, but=FROM_MODEL)
        averager.after_restore()

    def load_state_dict(self, state: dict[str, Any], optimizers: Sequence[Optimizer]) -> None:
        """Continue from :meth:`state_dict`, to which the caller has added this rank's ``"losses"``."""
        averager = self.running
        averager.replica.unpack(_checked_layout(state["values"], averager.replica.layout))
        averager.replica.set_unexchanged_buffers(state["kept"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer_states.restore(optimizer, saved)
        why = "The checkpoint was saved with another wire, another model or other replicas"
        warn_of_scratch(averager, write(averager, state["algorithm"]), why)
        averager.after_restore()
        self.losses.load_state_dict(state["losses"])
        self.resume(int(state["windows"]))


def _checked_layout(values: Sequence[Tensor], layout: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
    """The values of a replica in a checkpoint, if they are in the layout of this fit; else an error on every rank."""
    saved = [value.numel() for value in values]
    here = [sum(value.numel() for value in group.values()) for group in layout]
    if saved == here:
        return values
    raise CheckpointError(
        f"The replicas of the checkpoint hold vectors of {saved} values; in this fit they are of {here}. Resume with "
        "the fragments and exclude of the run that was saved."
    )
