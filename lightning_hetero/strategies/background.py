"""Writes checkpoints beside the training, from copies."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins import AsyncCheckpointIO
from typing_extensions import override

from lightning_hetero._lightning import WrappingCheckpointIO
from lightning_hetero.comm import failures
from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.background import Background, come_last
from lightning_hetero.comm.deadline import of_communication
from lightning_hetero.errors import CheckpointError
from lightning_hetero.strategies.copies import Copies

#: What is to be written: a checkpoint, its path, and the user's storage options.
Files = list[tuple[dict[str, Any], Any, Any]]


class BackgroundFiles(WrappingCheckpointIO):
    """Takes copies of what it is to write, and writes them on a thread, the checkpoint itself last.

    Lightning's ``AsyncCheckpointIO`` does not suit: before 2.6 it takes no copy, so that training changes what is
    being written; it queues without a limit; and rank 0 may have written the checkpoint before the others have
    written their shards.

    Args:
        files: writes them.
        store: of the job, with keys of its own.
        limit: longest wait for another rank, seconds.
        owed: why this rank could not write something earlier, if that has yet to be told.
    """

    def __init__(self, files: CheckpointIO, store: dist.Store, limit: float, owed: BaseException | None = None) -> None:
        # One thread is enough.
        super().__init__(files.checkpoint_io if isinstance(files, AsyncCheckpointIO) else files)
        self._store, self._limit = store, limit
        self._copies = Copies()
        self._world = dist.group.WORLD
        self._jobs: Files = []  # what is to be written
        self._number = 0  # of saves, the same on every rank
        self._owed = owed
        self._alone = False  # whether the latest save has ended because another rank is lost
        self._running: Background[None] | None = None
        self.seconds = 0.0  # that the latest save has taken

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self.complete()
        if not self._jobs:
            self._copies.rewind()
        self._jobs.append((self._copies.of(checkpoint), path, storage_options))

    def launch(self, then: Callable[[], Any]) -> None:
        """Begin to write what has been given since the last time; on all ranks.

        Args:
            then: called on rank 0 once all of it is written, on all ranks.
        """
        jobs, self._jobs, self._number = self._jobs, [], self._number + 1
        self.begin(str(self._number), lambda: jobs, then)

    def begin(self, save: str, prepare: Callable[[], Files | None], then: Callable[[], Any]) -> None:
        """Begin to write what a function gives; on all ranks.

        Args:
            save: names the save, the same on all ranks.
            prepare: gives it, on the thread that writes; ``None``: nothing, on any rank.
            then: called on rank 0 once all of it is written, on all ranks.
        """
        self._alone = False
        self._running = Background(lambda: self._write(prepare, save, then))

    @property
    def busy(self) -> bool:
        """Whether this rank still writes."""
        return self._running is not None and self._running.running

    def complete(self) -> None:
        """Wait until this rank has written all that it was given; its error stays for :meth:`problem`."""
        if self._running is not None:
            self._running.wait()

    def problem(self) -> BaseException | None:
        """Why this rank could not write, if it could not."""
        if self._owed is not None:
            return self._owed
        return None if self._running is None or self._running.running else self._running.error

    def owed(self) -> BaseException | None:
        """The same, for those that remain when a rank is lost: a save that ends because of the loss is no problem."""
        if (problem := self.problem()) is None or problem is self._owed:
            return problem
        return None if self._alone or of_communication(problem) else problem

    def agree(self) -> bool:
        """Whether any rank still writes (collective).

        Raises:
            CheckpointError: on every rank, if one could not write.
        """
        problem = self.owed()
        everyone = gather((self.busy, None if problem is None else str(problem)), "whether checkpoints are written")
        if self._world is dist.group.WORLD:  # nobody has been lost, so that is not the reason
            problem = self.problem()
        if problem is not None:
            raise problem
        for rank, (_, text) in enumerate(everyone):
            if text is not None:
                raise CheckpointError(f"rank {rank} could not save: {text}")
        return any(busy for busy, _ in everyone)

    def _write(self, prepare: Callable[[], Files | None], save: str, then: Callable[[], Any]) -> None:
        began, first = time.perf_counter(), dist.get_rank() == 0
        assert self.checkpoint_io is not None
        try:
            jobs = prepare()
            come_last()
            for checkpoint, path, options in (jobs or ())[: len(jobs or ()) - first]:
                self.checkpoint_io.save_checkpoint(checkpoint, path, options)
        except BaseException as error:
            with suppress(dist.DistError):  # what has happened here comes first
                self._store.set(f"{save}/{dist.get_rank()}", str(error) or type(error).__name__)
            raise
        self._store.set(f"{save}/{dist.get_rank()}", "written")
        if jobs is None:
            return
        if first:
            self._wait_for_others(save)
            checkpoint, path, options = jobs[-1]
            self.checkpoint_io.save_checkpoint(checkpoint, path, options)
            then()
        self.seconds = time.perf_counter() - began

    def _wait_for_others(self, save: str) -> None:
        until, others = time.monotonic() + self._limit, [f"{save}/{rank}" for rank in range(1, dist.get_world_size())]
        while not all(self._store.check([other]) for other in others):
            if failures.first(0.0) is not None or time.monotonic() > until:
                self._alone = True
                raise CheckpointError("another rank has not written its part of the checkpoint. Nothing was replaced.")
            time.sleep(0.02)
        for rank, other in enumerate(others, 1):
            if (text := self._store.get(other).decode()) != "written":
                raise CheckpointError(f"rank {rank} could not save: {text}")
