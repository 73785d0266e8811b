"""Resumable checkpoints: the same command, started again, goes on from the newest one."""

import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_hetero.argument_checks import at_least_one, is_number, plain
from lightning_hetero.batching.plan_agreement import ActionRequest, AgreedBatch
from lightning_hetero.callbacks.checkpoint_folder import (
    RetentionPolicy,
    checkpoint_path,
    newest_complete,
    newest_first,
    remove_partial,
)
from lightning_hetero.checkpoint.consensus import BackgroundConsensus
from lightning_hetero.checkpoint.writer import BackgroundWriter
from lightning_hetero.comm.job import Job
from lightning_hetero.errors import ConfigurationError, UnsupportedError, not_none
from lightning_hetero.lightning_compat import accumulates, resume_by
from lightning_hetero.strategies.base import HeteroStrategy
from lightning_hetero.strategies.replica import ReplicaStrategy
from lightning_hetero.strategies.signals import loses_the_end
from lightning_hetero.strategies.stopping import Resumable

if TYPE_CHECKING:
    import lightning.pytorch as pl

_NOTICE = 1.0  # seconds within which all ranks have normally answered, also on a busy machine


class ResumableCheckpoint(Resumable):
    """Saves as training goes, so that the same command, started again, goes on from the newest whole checkpoint.

    At the start of a fit to which no ``ckpt_path`` was given, rank 0 looks for the newest checkpoint in the folder, and
    all ranks see whether it is whole: its file, and the shards of all replicas. One that is not is passed over with a
    warning that says why. Without any, training starts from the beginning. So restarts by ``torchrun --max-restarts``,
    a requeued SLURM job and a loop in a shell need nothing else. Under SLURM the checkpoint that Lightning finds by
    itself takes part: the newest of all is taken.

    At the end of a fit it saves once more. Started again, a run that is complete trains no further, and has the final
    weights; with a larger ``max_epochs`` or ``max_steps`` it goes on, also if EarlyStopping has ended it.

    Args:
        dirpath: folder of the checkpoints, for this run alone, on a file system that all hosts share. Its files are
            ``step=<step>.ckpt``, with shards beside them; a complete run's ends in ``-complete.ckpt``, that of a run
            which SIGTERM has stopped in ``-stopped.ckpt``.
        every_n_steps: optimizer steps from one checkpoint to the next. What is due at the last step of an epoch is
            saved after the next: from the last one, Lightning would not go to the end of the epoch. Default: None, not
            by steps.
        every_n_seconds: seconds from one checkpoint to the next, by rank 0's clock; all ranks save after the same step,
            about a second later. Default: None, not by time, or every 600 if ``every_n_steps`` is None, too.
        keep: how many checkpoints to keep. Older ones are deleted once a newer one is complete.
        background: write files beside the training, from a copy. Training waits for the copy only. What is due while
            the one before is still being written is left out, with a warning.

    Raises:
        ConfigurationError: an option that cannot work.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero.callbacks import ResumableCheckpoint

        checkpoints = ResumableCheckpoint("checkpoints/run-7", every_n_steps=500)
        trainer = Trainer(strategy="hetero_ddp", accelerator="cpu", devices=2, callbacks=[checkpoints])
    """

    _fits = itertools.count()  # of this process

    def __init__(
        self,
        dirpath: str | Path,
        every_n_steps: int | None = None,
        every_n_seconds: float | None = None,
        keep: int = 2,
        background: bool = True,
    ) -> None:
        if not isinstance(dirpath, str | Path) or not str(dirpath):
            raise ConfigurationError(f"dirpath={dirpath!r}: give a folder.")
        every_n_steps, every_n_seconds, keep = plain((every_n_steps, every_n_seconds, keep))
        if every_n_steps is not None:
            at_least_one("every_n_steps", every_n_steps, ", or None")
        if every_n_seconds is not None and (not is_number(every_n_seconds) or every_n_seconds <= 0):
            raise ConfigurationError(f"every_n_seconds={every_n_seconds!r} must be a number above 0, or None.")
        at_least_one("keep", keep)
        if every_n_steps is None and every_n_seconds is None:
            every_n_seconds = 600.0
        self.dirpath, self.every_n_steps, self.every_n_seconds = str(dirpath), every_n_steps, every_n_seconds
        self.keep, self.background = keep, background
        self._ended: dict[str, Any] = {"complete": False, "stopped": False}  # how the run that goes on has ended
        self._session: CheckpointSession | None = None  # of the running fit
        self._schedule: SaveSchedule | None = None  # of the running fit, if it saves by time
        self._owed: BaseException | None = None  # what could not be written, until the next save tells it
        self._fit = 0  # a number that all ranks give the running fit
        self._kept = RetentionPolicy(keep)
        self._latest: tuple[Job, str] | None = None  # among whose ranks a checkpoint was begun last, and its path
        self._at = 0  # the step at which it has last looked whether to save
        self._counted = False  # whether it is to save, by steps
        self._since: float | None = None  # when it last saved by time, or the fit has begun
        self._warned = False  # that checkpoints are left out

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without what belongs to the running fit."""
        return {**self.__dict__, "_session": None, "_schedule": None, "_owed": None, "_latest": None}

    # -- going on ----------------------------------------------------------------------------------

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: Any, stage: str) -> None:
        """Choose what to go on from, once the Trainer asks.

        Raises:
            UnsupportedError: the strategy is not one of this package.
        """
        strategy = _strategy_of(trainer)
        self._ended = {"complete": False, "stopped": False}
        joins = strategy.ticket is not None  # a job that runs, and has its checkpoints
        if not joins:
            self._kept, self._owed, self._since = RetentionPolicy(self.keep), None, None
        if stage == TrainerFn.FITTING and not joins and not getattr(trainer, "fast_dev_run", False):
            resume_by(trainer, lambda path, named: path if named else self._newest(strategy, path))

    def _newest(self, strategy: HeteroStrategy, given: str | None) -> str | None:
        own = newest_first(self.dirpath, given) if strategy.is_global_zero else []
        paths = strategy.broadcast(own)
        path = newest_complete(strategy.checkpoint_io, paths)
        if path is None and paths:
            rank_zero_warn(f"No checkpoint in {self.dirpath} is whole: training starts from the beginning.")
        if path is not None:
            first = paths.index(path)  # those before it are not whole, and go first
            oldest_first = (*paths[:first], *reversed(paths[first:]))
            self._kept = RetentionPolicy(self.keep, (other for other in oldest_first if other != given))
        if strategy.local_rank == 0:
            remove_partial(self.dirpath, paths)
        return path

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._ended = dict(state_dict)

    @override
    def state_dict(self) -> dict[str, Any]:
        return dict(self._ended)

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: Any) -> None:
        if self._ended["complete"] and self._ended["stopped"] and self._ended.get("limits") == _limits(trainer):
            trainer.should_stop = True  # as it was told to at the end of that fit

    @override
    def on_fit_end(self, trainer: "pl.Trainer", pl_module: Any) -> None:
        if self._ended["complete"] and self._session is None:
            rank_zero_info(
                f"The run in {self.dirpath} is complete, so nothing was left to train. To train on, raise max_epochs "
                "or max_steps. To begin again, give another folder."
            )

    # -- saving ------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: Any) -> None:
        if getattr(trainer, "fast_dev_run", False):
            return
        strategy = _strategy_of(trainer)
        self._fit, self._kept = strategy.broadcast((next(self._fits), self._kept))  # some ranks may be new
        self._close()
        self._session = CheckpointSession(strategy, f"checkpoints of fit {self._fit}", self.background, self._owed)
        self._owed = None
        if self.every_n_seconds is not None:
            self._schedule = SaveSchedule(
                strategy, f"when to save in fit {self._fit}", self.every_n_seconds, self._since
            )
        self._at, self._counted, self._warned = trainer.global_step, False, False
        self._ended = {"complete": False, "stopped": False}

    @override
    def on_train_batch_end(self, trainer: "pl.Trainer", *_: Any) -> None:
        if self._session is None:
            return
        timed = self._schedule is not None and self._schedule.due(trainer.fit_loop.epoch_loop.total_batch_idx)
        if accumulates(trainer):
            return
        before, self._at = self._at, trainer.global_step
        if self.every_n_steps is not None:
            self._counted |= self._at // self.every_n_steps > before // self.every_n_steps
        if not (timed or self._counted) or loses_the_end(trainer):  # then after the next batch
            return
        request = not_none(_strategy_of(trainer).stop_request, "what ends a batch")
        request.save_after_batch(lambda: self._save_due(trainer, timed))

    def _save_due(self, trainer: "pl.Trainer", timed: bool) -> None:
        self._save(trainer, not_none(self._session, "the session of the fit").writer)
        self._counted = False
        if timed and self._schedule is not None:
            self._schedule.done()

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: Any) -> None:
        if self._session is not None:
            self.complete()
            self._ended = {"complete": True, "stopped": bool(trainer.should_stop), "limits": _limits(trainer)}
            self._save(trainer, self._session.writer)
            self.complete()
            self._session.writer.agree()

    def _save(self, trainer: "pl.Trainer", writer: BackgroundWriter) -> None:
        """Save now, unless the save before is not done yet (collective). An error of one rank is one of all."""
        strategy, step = _strategy_of(trainer), trainer.global_step
        if writer.agree():
            return self._left_out(step)
        if self._latest is not None and self._latest[0] is strategy.job:  # else ranks were lost, or have joined
            self._kept.complete(self._latest[1])
        path = checkpoint_path(self.dirpath, step, "-complete" if self._ended["complete"] else "")
        older, self._latest = self._kept.begin(path), None
        usual, strategy.checkpoint_io = strategy.checkpoint_io, writer
        try:
            trainer.save_checkpoint(path, weights_only=False)
        finally:
            strategy.checkpoint_io = usual
        if writer.launch(lambda: self._kept.remove(strategy, older)):
            self._latest = strategy.job, path
        if not self.background:
            writer.complete()
            writer.agree()

    def _left_out(self, step: int) -> None:
        if not self._warned:
            self._warned = True
            rank_zero_warn(
                f"No checkpoint was saved at step {step}: the one before is still being written. This will not be said "
                "again. Save less often, or to a faster disk."
            )

    @override
    def path_to_stop_at(self, trainer: "pl.Trainer") -> str:
        return checkpoint_path(self.dirpath, trainer.global_step, "-stopped")

    @override
    def complete(self) -> None:
        if self._session is not None:
            self._session.writer.complete()

    # -- the end -----------------------------------------------------------------------------------

    @override
    def on_exception(self, trainer: "pl.Trainer", pl_module: Any, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        """End what runs beside the training, on this rank."""
        if self._session is not None:
            self._owed, self._session = self._session.close(), None
        if self._schedule is not None:
            self._schedule.close()
            self._since, self._schedule = self._schedule.since, None

    @override
    def teardown(self, trainer: "pl.Trainer", pl_module: Any, stage: str) -> None:
        self._close()


def _limits(trainer: "pl.Trainer") -> list[int | None]:
    """The Trainer's limits, ``max_epochs`` and ``max_steps``."""
    return [trainer.max_epochs, trainer.max_steps]


def _strategy_of(trainer: "pl.Trainer") -> HeteroStrategy:
    if not isinstance(trainer.strategy, HeteroStrategy):
        raise UnsupportedError(
            f"ResumableCheckpoint needs a strategy of this package, and this is {type(trainer.strategy).__name__}. Use "
            "one, such as Trainer(strategy='hetero_ddp'), or Lightning's ModelCheckpoint."
        )
    return trainer.strategy


class CheckpointSession:
    """Saving of a fit's checkpoints, also where ranks are lost.

    Args:
        strategy: in a fit.
        purpose: tells this session from others; the same on all ranks.
        background: whether files are written while training goes on.
        owed: why something could not be written in an earlier fit, for the next save to tell.

    Attributes:
        writer: writes.
    """

    def __init__(
        self, strategy: HeteroStrategy, purpose: str, background: bool, owed: BaseException | None = None
    ) -> None:
        self._strategy, self._purpose, self._background = strategy, purpose, background
        store, limit = strategy.job.store(purpose), strategy.options.limit.total_seconds()
        self.writer = BackgroundWriter(strategy.checkpoint_io, store, limit, self._consensus(), owed)
        strategy.store_users[purpose] = self

    def _consensus(self) -> BackgroundConsensus | None:
        strategy = self._strategy
        return strategy.background_consensus() if self._background and isinstance(strategy, ReplicaStrategy) else None

    def move(self, store: dist.Store) -> None:
        """Go on among other ranks (collective over them); ``store`` is theirs, with keys of its own."""
        self.writer.move(store, self._consensus())

    def close(self) -> BaseException | None:
        """End what runs, on this rank.

        Returns:
            Why it could not write something of its own that nobody has heard of yet.
        """
        self._strategy.store_users.pop(self._purpose, None)
        self.writer.complete()
        return self.writer.owed()


class SaveSchedule:
    """Schedule of a fit's checkpoints by time: all ranks save after the same batch, also where ranks are lost.

    Args:
        strategy: in a fit.
        purpose: tells this schedule from others; the same on all ranks.
        seconds: from one checkpoint to the next.
        since: when the latest one was made, or training has begun, by ``time.monotonic()``; ``None``: now.

    Attributes:
        since: when the latest one was made, or training has begun.
    """

    def __init__(self, strategy: HeteroStrategy, purpose: str, seconds: float, since: float | None = None) -> None:
        self._strategy, self._purpose, self._seconds = strategy, purpose, seconds
        self.since = time.monotonic() if since is None else since
        recovery, limit = strategy.recovery, strategy.options.limit.total_seconds()
        self._agreed = strategy.store_users[purpose] = AgreedBatch(
            strategy.job.store(purpose),
            self._asks,
            limit,
            strategy.trainer.fit_loop.epoch_loop.total_batch_idx,
            # Ranks in lockstep wait for a lost one anyway.
            patience=lambda: 0.0 if strategy.engine.lockstep else recovery.patience,
            recover=None if recovery.newcomers is None else recovery.recover_if_changing,
        )

    def _asks(self) -> ActionRequest | None:
        """The first rank's clock counts, since clocks differ."""
        due = time.monotonic() >= self.since + self._seconds
        return ActionRequest("to save at", _NOTICE) if due and self._strategy.global_rank == 0 else None

    def due(self, batch: int) -> bool:
        """Whether it is time, after a batch that all ranks count alike; it stays so until :meth:`done`."""
        return self._agreed.batch_ended(batch)

    def done(self) -> None:
        """The checkpoint that was due is saved, or left out."""
        self.since = time.monotonic()
        self._agreed.rearm()

    def close(self) -> None:
        """End the agreement, on this rank."""
        self._agreed.close()
        self._strategy.store_users.pop(self._purpose, None)
