"""SIGTERM: all ranks agree on a step, save there, and end."""

import itertools
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed import Store

from lightning_hetero import _lightning
from lightning_hetero.comm import failures
from lightning_hetero.comm.collective import collective
from lightning_hetero.comm.leaving import THREADS, close_at_exit
from lightning_hetero.errors import CommunicationError
from lightning_hetero.strategies.growth import Growth
from lightning_hetero.strategies.saving import save_to_resume

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_hetero.strategies.base import HeteroStrategy

#: Exit status of a process that SIGTERM has ended, as shells and schedulers count.
TERMINATED = 128 + signal.SIGTERM


class StopRequest:
    """Stops the Trainer on all ranks after the same batch, once any rank has received SIGTERM, or others want to join.

    Lightning broadcasts a flag before every batch, which makes all ranks wait for rank 0 each time, and broadcasts or
    saves within the signal's handler, whenever that happens to run. Here the handler only raises a flag. A thread
    passes it on through the job's key-value store, so that all hear of it within a second, whether they are about to
    meet or not. Each rank then says after which batch it could stop at the earliest: the one that it is at. It may
    not go beyond that one before it knows what the others say; the latest of these batches is where all stop.

    Args:
        trainer: its handlers are replaced; before it registers them.
        store: with keys of its own for this fit.
        limit: longest wait for the other ranks' answers, seconds.
        save: writes the checkpoint to resume from (collective).
        growth: lets other processes join.
    """

    fits = itertools.count()  # of this process

    def __init__(
        self, trainer: "pl.Trainer", store: Store, limit: float, save: Callable[[], None], growth: Growth | None = None
    ) -> None:
        self.requested = False  # of this rank
        self.all_stop = False  # whether all ranks have saved, and end here
        self.at: int | None = None  # the batch after which all stop, counted from the start of this fit
        self._trainer, self._limit, self._save, self._growth = trainer, limit, save, growth
        self._lock = threading.Lock()
        self._done = 0  # batches of this fit
        self._bound: int | None = None  # how far this rank may go before it knows `at`
        self._hooks = _lightning.SignalHooks(trainer, self._notify, self._notify_here, self._update_lr_schedulers)
        self._watch(store)

    def _watch(self, store: Store) -> None:
        self._store, self._closed, self._known = store, threading.Event(), threading.Event()
        self._silent: list[str] = []  # ranks that have not answered yet
        self._thread = threading.Thread(target=self._listen, daemon=True, name=f"{THREADS}stop-request")
        self._thread.start()
        close_at_exit(self)

    def move(self, store: Store) -> None:
        """Go on among other ranks: some were lost. What was not agreed on yet is agreed on anew.

        Args:
            store: of the ranks that remain, with keys of its own.
        """
        self._closed.set()
        self._thread.join(2.0)
        self._bound = self.at = None
        self._watch(store)

    def __deepcopy__(self, _: Any) -> "StopRequest":
        return self  # of one Trainer, with a thread

    def close(self) -> None:
        """Give the Trainer its own methods back, and end the thread; idempotent."""
        self._closed.set()
        self._thread.join(2.0)  # a thread within the store would break the process's end off
        self._hooks.restore()

    def finish(self) -> None:
        """The fit is complete; if any rank has been asked to stop, save and end all the same (collective)."""
        if self._any_requested("end the fit"):
            self._stop()

    def _any_requested(self, what: str) -> bool:
        """Whether any rank has received SIGTERM (collective)."""

        def asked() -> bool:
            flag = torch.tensor([self.requested])
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            return bool(flag.item())

        return collective(what, asked)

    # -- the handlers ------------------------------------------------------------------------------

    def _notify(self, signum: int | signal.Signals, _: FrameType | None) -> None:
        launcher = self._trainer.strategy.launcher
        if not self.requested and launcher is not None:
            launcher.kill(signum)
        self.requested = True

    def _notify_here(self, *_: Any) -> None:
        self.requested = True

    # -- the agreement -----------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while not self._closed.wait(0.25):
                asks = self.requested or (self._growth is not None and self._growth.wanted)
                if asks:
                    self._store.set("asked", "1")
                if asks or self._store.check(["asked"]):
                    self._agree()
                    return
        except RuntimeError:  # the store has gone, and the job with it
            self._known.set()

    def _agree(self) -> None:
        with self._lock:
            self._bound = self._done + 1
        self._store.set(str(dist.get_rank()), str(self._bound))
        everyone = [str(rank) for rank in range(dist.get_world_size())]
        silent = everyone
        while silent := [rank for rank in silent if not self._store.check([rank])]:
            self._silent = silent
            if self._closed.wait(0.05):
                return
        self.at = max(int(self._store.get(rank)) for rank in everyone)
        self._known.set()

    def _batch_ended(self) -> bool:
        """Count a batch; whether the fit stops here."""
        with self._lock:
            self._done += 1
            wait = self._bound is not None and self._done >= self._bound
        if wait:
            self._wait_for_answers()
        complete = _lightning.stops_early(self._trainer)  # as if this were the last batch: see `finish`
        here = self.at is not None and self._done >= self.at
        return here and not _lightning.accumulates(self._trainer) and not complete

    def _wait_for_answers(self) -> None:
        until, lost = time.monotonic() + self._limit, None
        while lost is None and (seconds := until - time.monotonic()) > 0:
            if self._known.wait(min(seconds, 0.25)):
                return
            lost = failures.first(0.0)  # it will not answer any more
        ranks = f"rank(s) {', '.join(self._silent)}" if self._silent else "a rank"
        why = f"{lost}" if lost is not None else f"no answer from {ranks} within {self._limit:.0f} s"
        raise CommunicationError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} was asked to stop (SIGTERM), and could not agree "
            f"on a step with the others: {why}. Nothing was saved."
        )

    # -- the end -----------------------------------------------------------------------------------

    def _update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        ends = interval == "step" and update_plateau_schedulers  # what Lightning does last with a batch
        if not ends or not self._batch_ended():
            type(loop).update_lr_schedulers(loop, interval, update_plateau_schedulers)
            return
        # Lightning resumes from two moments: the end of a validation, at which it would have saved just before this
        # call; and `on_train_batch_end`, at which the batch does not count as completed yet.
        progress, early = loop.batch_progress, not _lightning.validates_now(self._trainer)
        if early:
            type(loop).update_lr_schedulers(loop, interval, update_plateau_schedulers)
            progress.total.completed -= 1
            progress.current.completed -= 1
        if self._growth is None or self._any_requested("stop"):
            self._stop()
        else:
            self._growth.admit()  # raises, unless those that wanted to join are gone
        if early:
            progress.total.completed += 1
            progress.current.completed += 1
        else:
            type(loop).update_lr_schedulers(loop, interval, update_plateau_schedulers)
        self.move(dist.PrefixStore("again", self._store))

    def _stop(self) -> None:
        self._save()
        self.all_stop = True
        _lightning.set_terminated(self._trainer)
        raise SIGTERMException(TERMINATED)


def handle_sigterm(strategy: "HeteroStrategy", trainer: "pl.Trainer") -> StopRequest | None:
    """What SIGTERM does in the run that is set up: in a fit it is a request to stop (collective).

    Args:
        strategy: saves.
        trainer: before it registers its handlers.
    """
    if trainer.state.fn != TrainerFn.FITTING:
        end_at_once(trainer)
        return None
    fit = strategy.broadcast(next(StopRequest.fits))
    limit, save = strategy.options.limit.total_seconds(), partial(save_to_resume, strategy)
    assert strategy.job is not None
    return StopRequest(trainer, strategy.job.store(f"stop/{fit}"), limit, save, strategy.survival.growth)


def end_at_once(trainer: "pl.Trainer") -> None:
    """Outside of a fit there is nothing to save: let SIGTERM end this process and those that it has started.

    Args:
        trainer: its handler is replaced; before it registers it.
    """

    def notify(signum: int | signal.Signals, _: FrameType | None) -> None:
        launcher = trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signum)
        raise SIGTERMException(TERMINATED)

    _lightning.on_sigterm(trainer, notify)
