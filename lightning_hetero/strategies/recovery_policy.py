"""The policy for lost ranks, and the values that recovery and joining work with."""

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from lightning_hetero.batching.repartition import ShareHistory
from lightning_hetero.checkpoint.snapshot import MemoryCheckpointIO
from lightning_hetero.comm.agreement import gather, value_of_rank
from lightning_hetero.comm.join_requests import Admission
from lightning_hetero.comm.retry import CollectiveRetry
from lightning_hetero.errors import MembershipLostError

if TYPE_CHECKING:
    import torch.distributed as dist

    from lightning_hetero.comm.membership_protocol import NextView
    from lightning_hetero.comm.view import View


class Progress(NamedTuple):
    """Progress of a rank in the fit.

    Attributes:
        step: optimizer steps that it has taken, and with manual optimization also training steps.
        exchanges: exchanges between replicas that it has completed.
        call: collectives over all ranks that it has completed.
        draw: the first batch that it has not drawn yet.
        reports: how many times it has acted on the reports of all ranks.
        met: batches that all ranks had trained on when they last met, as far as it knows; 0 where they do not keep
            step.
        manual_steps: steps of optimizers within ``training_step``, with manual optimization.
    """

    step: int
    exchanges: int
    call: int
    draw: int
    reports: int
    met: int
    manual_steps: int = 0


#: Of a rank that has left the fit to begin it again with others: nobody goes on from where it was.
LEFT_FIT = Progress(*[-1] * len(Progress._fields))


class MissedWork(NamedTuple):
    """Operations that others have completed while this rank lost its connections.

    Attributes:
        step: the running optimizer step; the weights after it are there now.
        exchange: the exchange between replicas that follows a step.
        manual_steps: steps of optimizers within ``training_step``, where they have taken the running step.
    """

    step: bool
    exchange: bool
    manual_steps: int


def catch_up(collectives: CollectiveRetry, all_progress: Sequence[Progress], own: Progress) -> None:
    """Give the results of collectives to those who missed them (collective).

    Args:
        collectives: has the results of this rank.
        all_progress: of all ranks.
        own: of this rank.

    Raises:
        MembershipLostError: this rank has missed more of them than others keep.
    """
    calls = [progress.call for progress in all_progress]
    if len(set(calls)) == 1:
        return
    ahead = calls.index(max(calls))
    results = {number: result for number, result in collectives.results.items() if number >= min(calls)}
    results = value_of_rank(results, ahead)
    missed = {number: result for number, result in results.items() if number >= own.call}
    if len(missed) < calls[ahead] - own.call:
        raise MembershipLostError(
            f"This rank cannot go on: it has missed {calls[ahead] - own.call} collectives, such as broadcasts, that "
            f"others have completed, and they keep the results of the latest {collectives.KEPT} only. The others go on."
        )
    collectives.received.update(missed)


def unreachable_members(me: int, limit: float, view: int, error: Exception) -> MembershipLostError:
    """The error of a rank that could not meet those with which it has agreed to go on.

    Args:
        me: its id.
        limit: seconds for which it has tried.
        view: most recently.
        error: what came of that.
    """
    return MembershipLostError(
        f"Rank {me} cannot go on: for {limit:g} s (the strategy's `timeout`) the ranks that remain have failed "
        f"to meet, most recently in view {view}: {error}"
    )


#: What a number of samples is; to be put before it.
EXACT, AT_MOST, AT_LEAST = "", "up to ", "at least "


def sentence(samples: int, bound: str, which: str) -> str:
    """The number in words, with a blank before them; empty if there is nothing to say.

    Args:
        samples: how many.
        bound: what that number is.
        which: completes "samples ...".
    """
    if samples:
        return f" {bound.capitalize()}{samples} samples {which} are not trained on."
    return f" How many samples {which} are not trained on is not known." if bound == AT_LEAST else ""


class LostSamples(NamedTuple):
    """Samples that nobody trains on.

    Attributes:
        samples: how many.
        bound: what that number is: ``""``, ``"up to "`` or ``"at least "``.
    """

    samples: int
    bound: str


def count_lost_samples(
    lost: Mapping[int, str],
    known: Mapping[int, int],
    all_progress: Mapping[int, Progress],
    past: ShareHistory,
    alike: bool,
    own: float | None = None,
) -> LostSamples:
    """Count the samples that were drawn for lost ranks, and that they have not trained on (collective).

    A rank tells with its heartbeats how many steps it has done, so it may have done more. Where all ranks exchange
    after the same steps it has done those, too, after which all have met. Where each rank reads a stream of its own,
    others know only how many samples a rank of their replica has drawn.

    Args:
        lost: by their ids.
        known: steps that ranks have done, by their ids; of lost ones, also those lost before, as far as is known.
        all_progress: of the ranks that remain, by their ids.
        past: what each rank was to take.
        alike: whether all ranks take every step together, so that nobody can have done more or fewer than these.
        own: samples that the lost ranks are known to have drawn of streams of their own, and not trained on.

    Returns:
        The same on all ranks, which need not remember plans equally far back.
    """
    if own is not None:
        return LostSamples(round(max(gather(own, "samples that are lost"))), AT_LEAST)
    least = min(done for id, done in known.items() if id in all_progress)
    met = max(progress.met for progress in all_progress.values())
    first = {id: max(known.get(id, 0), met) for id in lost if id in known or met > 0}
    if alike:
        first, bound = {}, EXACT
    else:
        bound = AT_MOST if first.keys() == lost.keys() else AT_LEAST
    samples = sum(past.samples(id, first.get(id, least)) for id in lost)
    return LostSamples(max(gather(samples, "samples that are lost")), bound)


T = TypeVar("T")


@dataclass(frozen=True)
class MembershipChange:
    """A change of who takes part.

    Attributes:
        view: number of the view since then.
        lost: of each lost rank, by the number that it had at first, how it was lost.
        ranks: that remain.
        replicas: units that remain: replicas, under ``hetero_ddp`` ranks.
        seconds: for which this rank paused: from the beginning of the step, exchange or collective that broke to
            when it could begin it again.
        samples: drawn for the lost ranks, and not trained on.
        bound: what that number is: ``""`` (exactly so many), ``"up to "`` or ``"at least "``.
        joined: ranks that have joined, by their numbers since then.
        step: the Trainer's ``global_step`` then.
        at: when this rank went on, by ``time.perf_counter()``.
        own_streams: whether the lost ranks had data of their own, which nobody else reads.
    """

    view: int
    lost: dict[int, str]
    ranks: int
    replicas: int
    seconds: float
    samples: int
    step: int
    joined: tuple[int, ...] = ()
    at: float = field(default_factory=time.perf_counter, compare=False)
    bound: str = ""
    own_streams: bool = False

    def warn(self, view: "View") -> None:
        """Tell the user who was lost, if anybody was.

        Args:
            view: since then, of this rank.
        """
        if not self.lost:
            return
        who = "; ".join(f"rank {id} {how}" for id, how in sorted(self.lost.items()))
        left = sentence(self.samples, self.bound, "that they had still to take")
        if self.own_streams:
            numbers = ", ".join(map(str, sorted(self.lost)))
            left += (
                f" What was left of the training data of rank(s) {numbers} is gone: each rank reads a part of its own, "
                "which no other rank reads. Wrap the dataset in lightning_hetero.SharedStream, and those that remain "
                "share what is left."
            )
        rest = f"{view.world} rank(s)" if view.ranks_leave else f"{view.count} replica(s) with {view.world} rank(s)"
        with suppress(UserWarning):  # also where warnings are errors
            warnings.warn(
                f"{who}. Training goes on with {rest} after step {self.step}; this rank, now number {view.rank}, "
                f"paused for {self.seconds:.2f} s.{left}",
                stacklevel=4,
            )


class JoinTicket(NamedTuple):
    """This rank's ticket to a fit that begins again with more ranks.

    Attributes:
        admission: its place.
        files: with the checkpoint.
        replica: id of the replica to which this rank belonged; ``None`` if it is new.
        since: when this rank stopped training, or was admitted, by ``time.monotonic()``.
        lost: ranks that were lost since then, each with the reason.
        entry: place of this rank in lists that the user gave, one entry per rank; ``None`` if it is new.
    """

    admission: Admission
    files: MemoryCheckpointIO
    replica: int | None
    since: float
    lost: Mapping[int, str] = MappingProxyType({})
    entry: int | None = None


class Newcomers(ABC):
    """Processes that are started later, and ask to take part in the fit.

    Attributes:
        terminated: whether SIGTERM has come while the fit ended, to begin again: then it is to stop at its first step.
    """

    terminated = False

    @property
    @abstractmethod
    def wanted(self) -> bool:
        """Whether there are newcomers that the job can take in; on the first rank, in any thread."""

    @abstractmethod
    def admit(self) -> None:
        """Begin the fit again with the newcomers, if there are any still (collective)."""

    @abstractmethod
    def enter_running_job(self) -> None:
        """Join the job that runs already, if there is one and this process is in none (collective over its ranks)."""

    @abstractmethod
    def resume(self) -> None:
        """Let the Trainer go on from the checkpoint with which this rank has entered, if it has."""

    @abstractmethod
    def share_rest(self) -> None:
        """Give all ranks rank 0's values of what the checkpoint lacks, where this rank has entered (collective)."""

    @abstractmethod
    def until_done(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of the Trainer, and begin a fit again where ranks join it."""


class RecoveryPolicy:
    """The policy for lost ranks: here a lost rank ends the fit.

    Attributes:
        losses: the changes of who takes part, in this fit.
    """

    def __init__(self) -> None:
        self.losses: list[MembershipChange] = []

    @property
    def newcomers(self) -> Newcomers | None:
        """Lets other processes join, where that is possible."""
        return None

    @property
    def view_number(self) -> int | None:
        """The number of the view, while ranks may be lost; else ``None``."""
        return None

    @property
    def changing(self) -> bool:
        """Whether the ranks are about to agree on who remains."""
        return False

    @property
    def patience(self) -> float:
        """Seconds until the loss of a rank is known; 0 if a lost rank is an error."""
        return 0.0

    def begin(self) -> None:
        """Training starts (collective)."""

    def end(self) -> None:
        """Training has ended, on all ranks: from now on a lost rank is an error (collective)."""

    def pause(self) -> None:
        """Leave the fit, to begin it again with other ranks (collective)."""

    def remaining(self) -> "tuple[NextView, int, dist.Store | None] | None":
        """The ranks that remain of those that have left the fit (collective over them).

        Returns:
            What they have agreed, the id of this rank, and the store with which they meet, if this rank hosts it;
            ``None`` if it was alone.
        """
        return None

    def failed(self, exception: BaseException) -> None:
        """This rank ends with an error."""

    def retry(self, operation: Callable[[], T]) -> T:
        """The result of an operation that can be called again if it breaks."""
        return operation()

    def step(self, operation: Callable[[], T], instead: Callable[[], T], backward: bool = True) -> T:
        """Run an optimizer step.

        Args:
            operation: the step, which can be repeated if a gradient does not arrive.
            instead: what to do instead if the other ranks have taken it.
            backward: whether a backward pass is part of it, which adds to gradients.
        """
        return operation()

    def recover_if_changing(self) -> bool:
        """Agree on who remains if other ranks are about to, and return whether they were."""
        return False

    def exchange(self, operation: Callable[[], T]) -> T | None:
        """Run what follows a step between replicas; nothing if the others have completed it."""
        return operation()
