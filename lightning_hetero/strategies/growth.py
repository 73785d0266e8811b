"""Lets processes that are started later take part in a fit that runs.

Joining is resuming. All ranks agree on a batch, as they do when they are asked to stop, and make a checkpoint there, in
memory. Then they begin the fit again from it, with the newcomers, in a world of more ranks.
"""

import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_hetero import _lightning
from lightning_hetero.comm.agreement import gather, of_rank, raise_on_all
from lightning_hetero.comm.deadline import of_communication
from lightning_hetero.comm.groups import default_store
from lightning_hetero.comm.membership import Agreed
from lightning_hetero.engine.job import open_store
from lightning_hetero.engine.join_requests import Admission, JoinRequests, answers
from lightning_hetero.errors import HeteroError, JoinRefusedError
from lightning_hetero.launch.job_address import AddressFile, JobAddress
from lightning_hetero.strategies import asking_again, regrouping, saving
from lightning_hetero.strategies.entering import PATH, Entry, addresses, enter
from lightning_hetero.strategies.join_card import card, fits, misfit
from lightning_hetero.strategies.signals import TERMINATED, sigterm_noted
from lightning_hetero.strategies.snapshot import MemoryFiles

if TYPE_CHECKING:
    from lightning_hetero.strategies.base import HeteroStrategy


class BeginAgainError(Exception):
    """The fit begins again, with more ranks. No error: it leaves Lightning's loops.

    Args:
        entry: of this rank.
        store: with which the ranks meet, if this rank hosts it.
    """

    def __init__(self, entry: Entry, store: dist.Store | None) -> None:
        super().__init__("the fit begins again, with more ranks")
        self.entry, self.store = entry, store


class Growth:
    """The part of the ranks that are there.

    Args:
        strategy: of the fit.

    Attributes:
        terminated: whether SIGTERM has come while the fit ended, to begin again: then it is to stop at its first step.
    """

    def __init__(self, strategy: "HeteroStrategy") -> None:
        self._strategy = strategy
        self.terminated = False
        self._between = False  # the fit has ended, and has not begun again
        self._requests: JoinRequests | None = None  # on the first rank
        self._ended: JoinRequests | None = None
        self._first_store: dist.Store | None = None  # the launcher's, which later processes ask as well
        self._written: list[JobAddress] = []
        self._leaving: Entry | None = None  # how this rank is about to begin again
        self._came_later = False  # whether this process has joined a job that ran

    def begin(self) -> None:
        """Let others find this job (collective).

        Raises:
            HeteroError: on every rank, if the address cannot be written.
        """
        self._between = False
        problem, entry = None, self._strategy.entry
        self._came_later |= entry is not None and entry.replica is None
        try:
            self.open()
        except HeteroError as error:
            problem = error
        raise_on_all(problem, "a fit that other processes may join")

    def go_on(self) -> None:
        """Others were lost: this may be the first rank now."""
        try:
            self.open()
        except HeteroError as error:
            warnings.warn(f"Nobody can join this fit any more: {error}", stacklevel=2)

    def open(self) -> None:
        """Take requests, if this is the first rank.

        Raises:
            ConfigurationError: the address cannot be written to a file.
            CommunicationError: nor to the launcher's store.
            JoinRefusedError: another job has begun under the same file.
        """
        strategy = self._strategy
        assert strategy.job is not None
        self._first_store = self._first_store or default_store()
        if strategy.job.view.rank != 0:
            return
        if self._requests is None:
            interface, limit = regrouping.interface(strategy), strategy.options.limit
            self._requests = JoinRequests(interface, limit, lambda other: misfit(card(strategy), other))
            self._claim()
        self._written = self._written or addresses(strategy, self._came_later)
        for place in self._written:
            place.write(self._requests.address)

    def _claim(self) -> None:
        """See that no other job has begun under the same file at the same time."""
        file = self._strategy.options.join_file
        follows = self._strategy.survival.view or self._strategy.entry is not None  # what stands there is this job's
        there = None if file is None or follows else AddressFile(file).read()
        if there is not None and answers(there):
            raise JoinRefusedError(
                f"another job has written join_file={file!r} in the meantime, and runs at {there[0]}:{there[1]}. "
                "Start this process again to join it, or give this job another file."
            )

    def leaves(self) -> None:
        """This rank leaves the fit, to begin it again."""
        self._between = True

    def asks(self) -> None:
        """This process, which is new, has left the fit, and has yet to ask the job again: SIGTERM ends it.

        Raises:
            SIGTERMException: it has come already.
        """
        self._between = False
        if self.terminated:
            raise SIGTERMException(TERMINATED)

    def note_sigterm(self) -> bool:
        """SIGTERM has come; returns whether the fit that is about to begin again will stop for it."""
        self.terminated |= self._between
        return self._between

    @property
    def wanted(self) -> bool:
        """Whether there are newcomers that the job can take in; on the first rank, in any thread."""
        return self._requests is not None and self._most(self._requests.waiting) > 0

    def _most(self, waiting: int) -> int:
        """How many of those that wait the job can take in: the user's options may allow some numbers of ranks only."""
        assert self._strategy.job is not None
        world = self._strategy.job.view.world
        return max((more for more in range(waiting + 1) if fits(self._strategy, world + more)), default=0)

    def admit(self) -> None:
        """Begin the fit again with the newcomers, if there are any still (collective).

        Raises:
            BeginAgainError: there are.
        """
        began, strategy, requests = time.monotonic(), self._strategy, self._requests
        assert strategy.job is not None
        view, trainer, limit = strategy.job.view, strategy.trainer, strategy.options.limit
        newcomers = [] if requests is None else requests.invite(self._most(requests.waiting))
        store, address = open_store(regrouping.interface(strategy), limit) if newcomers else (None, ("", 0))
        more, address = of_rank((len(newcomers), address), 0)
        if not more:
            return
        world = view.world + more
        rank_zero_info(f"{more} rank(s) join after step {trainer.global_step}: the fit goes on with {world} ranks.")
        files = MemoryFiles(PATH, strategy.checkpoint_io, saving.kept_by_each(strategy))
        strategy.checkpoint_io = files
        admission = Admission(view.number + 1, view.rank, world, view.world, address)
        self._leaving = Entry(admission, files, view.replica.id, began)
        try:
            trainer.save_checkpoint(PATH)
        finally:
            strategy.checkpoint_io = files.usual
        strategy.survival.again(strategy.share.listen)  # leave nothing in flight
        if any(gather(strategy.job.view is not view, "who was lost")):  # others come next time
            if requests is not None:
                requests.put_off(newcomers)
            return
        if requests is not None:
            requests.admit(newcomers, view.number + 1, view.world, address)
        raise BeginAgainError(self._leaving, store)

    def again(self, agreed: Agreed, store: dist.Store | None) -> BeginAgainError:
        """How this rank begins again with those that remain, since some of them have left the fit already.

        Args:
            agreed: who they are.
            store: with which they meet, if this rank hosts it.
        """
        assert self._leaving is not None, "nobody leaves before all have come to the end of admit()"
        assert self._strategy.job is not None
        view = self._strategy.job.view
        return among(self._leaving, agreed, view.ids[view.rank], store)

    def end(self, over: bool = True) -> None:
        """Let nobody in any more on this rank. Local, idempotent.

        Args:
            over: the job has come to its end; else it goes on without this rank, and with another first one.
        """
        if self._requests is not None:
            for place in self._written if over else ():  # else the next first rank writes its own address there
                place.remove(self._requests.address)
            self._requests.close(over)
            self._ended, self._requests = self._requests, None  # its store stays, to give the answer


def until_done(strategy: "HeteroStrategy", function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of the Trainer, and begin a fit again where ranks join it."""
    growth, again, asked = strategy.survival.growth, None, 0
    assert growth is not None
    growth.terminated = False
    with sigterm_noted(growth.note_sigterm):
        while True:
            try:
                if again is not None:
                    strategy.entry = again.entry
                    enter(strategy, again.entry, again.store)
                return function(*args, **kwargs)
            except BeginAgainError as grows:
                again = grows
            except Exception as error:
                if asked < asking_again.MOST and _may_ask_again(strategy, error):
                    _leave_fit(strategy, growth)
                    growth.asks()
                    again, asked = BeginAgainError(asking_again.ask_again(strategy, error), None), asked + 1
                    continue
                if again is None or (again := _without_newcomers(strategy, again, error)) is None:
                    raise
            _leave_fit(strategy, growth)


def among(entry: Entry, agreed: Agreed, me: int, store: dist.Store | None) -> BeginAgainError:
    """How a rank begins again with those that remain, without newcomers.

    Args:
        entry: how it was to begin with others.
        agreed: who remain.
        me: id of this rank.
        store: with which they meet, if this rank hosts it.
    """
    rank, world, view = agreed.members.index(me), len(agreed.members), max(agreed.number, entry.admission.view + 1)
    admission = Admission(view, rank, world, world, agreed.offer)
    return BeginAgainError(entry._replace(admission=admission, lost={**entry.lost, **agreed.lost}), store)


def _without_newcomers(strategy: "HeteroStrategy", former: BeginAgainError, error: Exception) -> BeginAgainError | None:
    """How those that remain go on if the fit cannot begin with the newcomers, or without one of them.

    Returns:
        ``None`` if there is another reason.
    """
    entry = strategy.entry
    if entry is None or entry.replica is None or not (isinstance(error, HeteroError) or of_communication(error)):
        return None  # training has begun, or this is a newcomer
    view, rank, world, before, address = entry.admission
    if (remaining := strategy.survival.remaining()) is None:  # one rank, with newcomers
        alone = Admission(view + 1, rank, before, before, address)
        again = BeginAgainError(entry._replace(admission=alone), former.store)
    else:
        if world == before and not remaining[0].lost:
            return None
        again = among(entry, *remaining)
    if again.entry.admission.rank == 0 and world > before:
        warnings.warn(f"{world - before} rank(s) could not join, and the fit goes on without: {error}", stacklevel=2)
    return again


def _may_ask_again(strategy: "HeteroStrategy", error: Exception) -> bool:
    """Whether this process is new, and others are why it could not join."""
    entry = strategy.entry
    return entry is not None and entry.replica is None and asking_again.wrong_are_others(entry, error)


def _leave_fit(strategy: "HeteroStrategy", growth: Growth) -> None:
    """End what belongs to the fit so far, on this rank."""
    trainer, request = strategy.trainer, strategy.stop_request
    growth.leaves()
    strategy.survival.pause()
    module, stage = trainer.lightning_module, TrainerFn.FITTING
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        callback.teardown(trainer, module, stage)
    for user in (trainer.datamodule, module):  # type: ignore[attr-defined]
        if user is not None:
            user.teardown(stage)
    _lightning.tear_down(trainer)
    growth.terminated |= request is not None and request.requested  # after all had asked each other
    for name in strategy.of_the_job:
        vars(strategy).pop(name, None)
