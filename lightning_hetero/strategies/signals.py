"""SIGTERM: all ranks agree on a step, save there, and end."""

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed import Store

from lightning_hetero import lightning_compat
from lightning_hetero.batching.plan_agreement import ActionRequest, AgreedBatch
from lightning_hetero.comm.agreement import gather
from lightning_hetero.strategies.recovery_policy import RecoveryPolicy

if TYPE_CHECKING:
    import lightning.pytorch as pl

#: Exit status of a process that SIGTERM has ended, as shells and schedulers count.
TERMINATED = 128 + signal.SIGTERM
_NOTICE = 0.5  # seconds within which all ranks have normally answered; who wants to join waits meanwhile


class StopRequest:
    """Stops the Trainer on all ranks after the same batch, once any rank has received SIGTERM, or others want to join.

    Callbacks save by it, too (:meth:`save_after_batch`): it knows the moments from which Lightning can resume.

    Lightning broadcasts a flag before every batch, which makes all ranks wait for rank 0 each time, and broadcasts or
    saves within the signal's handler, whenever that happens to run. Here the handler only raises a flag, and the ranks
    agree on a batch.

    Args:
        trainer: its handlers are replaced; before it registers them.
        store: with keys of its own for this fit.
        limit: longest wait for the other ranks' answers, seconds.
        save: writes the checkpoint to resume from (collective).
        recovery: lets other processes join, and knows when ranks are lost.
    """

    fits = itertools.count()  # of this process

    def __init__(
        self, trainer: "pl.Trainer", store: Store, limit: float, save: Callable[[], None], recovery: RecoveryPolicy
    ) -> None:
        self._requested = False  # of this rank, in this fit
        self.all_stop = False  # whether all ranks have saved, and end here
        self._trainer, self._save, self._recovery = trainer, save, recovery
        self._done = 0  # batches of this fit
        self._saves: list[Callable[[], None]] = []  # once the running batch has ended
        after_batch = self._update_lr_schedulers
        self._overrides = lightning_compat.handle_signals(trainer, self._notify, self._notify_here, after_batch)
        survive = None if recovery.newcomers is None else recovery.recover_if_changing
        self.agreed = AgreedBatch(store, self._asks, limit, recover=survive)

    @property
    def requested(self) -> bool:
        """Whether this rank has received SIGTERM, in this fit or while it was about to begin."""
        newcomers = self._recovery.newcomers
        return self._requested or (newcomers is not None and newcomers.terminated)

    def _asks(self) -> ActionRequest | None:
        if self.requested:
            return ActionRequest("to save and stop at, as SIGTERM asks", 0.0)
        newcomers = self._recovery.newcomers
        return ActionRequest("at which others join", _NOTICE) if newcomers is not None and newcomers.wanted else None

    def __deepcopy__(self, _: Any) -> "StopRequest":
        return self  # of one Trainer, with a thread

    def close(self) -> None:
        """Give the Trainer its own methods back, and end the agreement; idempotent."""
        self.agreed.close()
        self._overrides.restore()

    def save_after_batch(self, save: Callable[[], None]) -> None:
        """Let a function save once the running batch has ended, with its validation and the schedulers' steps."""
        self._saves.append(save)

    def finish(self) -> None:
        """The fit is complete; if any rank has been asked to stop, save and end all the same (collective)."""
        if self._any_requested():
            self._stop()

    def _any_requested(self) -> bool:
        """Whether any rank has received SIGTERM (collective)."""
        return any(gather(self.requested, "who has received SIGTERM"))

    # -- the handlers ------------------------------------------------------------------------------

    def _notify(self, signum: int | signal.Signals, _: FrameType | None) -> None:
        launcher = self._trainer.strategy.launcher
        if not self._requested and launcher is not None:
            launcher.kill(signum)
        self._requested = True

    def _notify_here(self, *_: Any) -> None:
        self._requested = True

    # -- the end -----------------------------------------------------------------------------------

    def _batch_ended(self) -> bool:
        """Count a batch; whether the fit stops here."""
        self._done += 1
        trainer, here = self._trainer, self.agreed.batch_ended(self._done)
        if not here or lightning_compat.accumulates(trainer):
            return False
        if lightning_compat.stops_early(trainer):  # as if this were the last batch: see `finish`
            return False
        looks = any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs)  # a checkpoint has no metrics
        return (lightning_compat.validates_now(trainer) and not looks) or not loses_the_end(trainer)

    def _update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        ends = interval == "step" and update_plateau_schedulers  # what Lightning does last with a batch
        stops = ends and self._batch_ended()
        if not stops and not (ends and self._saves):
            type(loop).update_lr_schedulers(loop, interval, update_plateau_schedulers)
            return
        # Lightning resumes from two moments: the end of a validation, at which it would have saved just before this
        # call, which it makes again, without metrics; and `on_train_batch_end`, at which the batch does not count as
        # completed yet.
        validates, configs = lightning_compat.validates_now(self._trainer), self._trainer.lr_scheduler_configs
        plateaus = any(config.reduce_on_plateau and config.interval == "step" for config in configs)
        progress, early = loop.batch_progress, not validates or plateaus
        if early:
            type(loop).update_lr_schedulers(loop, interval, update_plateau_schedulers)
            progress.total.completed -= 1
            progress.current.completed -= 1
        saves, self._saves = self._saves, []
        for save in saves:
            save()
        if stops:
            newcomers = self._recovery.newcomers
            if newcomers is None or self._any_requested():
                self._stop()
            else:
                newcomers.admit()  # raises, unless those that wanted to join are gone
        if early:
            progress.total.completed += 1
            progress.current.completed += 1
        else:
            type(loop).update_lr_schedulers(loop, interval, update_plateau_schedulers)
        if stops:
            self.agreed.rearm()

    def _stop(self) -> None:
        self._save()
        self.all_stop = True
        lightning_compat.set_terminated(self._trainer)
        raise SIGTERMException(TERMINATED)


def loses_the_end(trainer: "pl.Trainer") -> bool:
    """Whether who goes on from here never comes to the end of the epoch: from the last batch Lightning begins the next.

    Where an epoch is one step there is nowhere else to stop.
    """
    batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready  # of this epoch, so far
    return lightning_compat.epoch_ends(trainer) and batches > trainer.accumulate_grad_batches


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

    lightning_compat.on_sigterm(trainer, notify)


@contextmanager
def sigterm_recorded(note: Callable[[], bool]) -> Iterator[None]:
    """Note SIGTERM where no fit handles it: while one ends, to begin again with others.

    Lightning puts its handler before the one that it finds, and puts that back when a fit ends: there is no moment
    without a handler.

    Args:
        note: notes it, and returns whether that will do; else what was there before this block decides.
    """
    before = signal.getsignal(signal.SIGTERM)
    if before is None or threading.current_thread() is not threading.main_thread():  # Python could not put it back
        yield
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        if note():
            return
        if callable(before):
            before(signum, frame)
        elif before == signal.SIG_DFL and signal.getsignal(signal.SIGTERM) is handle:  # no fit handles it, too
            signal.signal(signum, before)
            signal.raise_signal(signum)

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, before)
