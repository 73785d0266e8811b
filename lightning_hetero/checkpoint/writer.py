"""Atomic and background writing of checkpoints: a file under its final name is always complete."""

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins import AsyncCheckpointIO
from typing_extensions import override

from lightning_hetero.checkpoint.consensus import BackgroundConsensus
from lightning_hetero.checkpoint.snapshot import Snapshot
from lightning_hetero.comm import failures
from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.failures import is_communication_error
from lightning_hetero.comm.threads import Background, lower_priority
from lightning_hetero.errors import CheckpointError
from lightning_hetero.lightning_compat import WrappingCheckpointIO


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's way to save, but a local file gets its final name only when it is complete and on the disk.

    Lightning writes to the system's temporary folder and then moves the file. To another file system a move is a copy:
    if the disk is full, or the process ends, a part of a checkpoint is left under the final name, and the checkpoint
    that was there before is lost. Here the new file is written next to the final name (``saving-*.tmp``) and renamed.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        file_system, local = url_to_fs(str(path))
        if storage_options is not None or not isinstance(file_system, LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            with atomic_write(Path(local)) as file:
                torch.save(checkpoint, file)
        except OSError as error:
            raise CheckpointError(
                f"{path} could not be saved: {error}. A file that was there before is unchanged. Make room, or save to "
                "another place."
            ) from error


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of ``path`` once the block is left without an error; else nothing is left of it.

    Args:
        path: in a local file system; missing folders are made.

    Yields:
        The file to write to.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not named after `path`: Lightning takes any file with "hpc_ckpt_" or "last" in its name for a checkpoint. Except
    # for shards, which bear the name of their save: so it is known whose one is that will never be complete.
    whose = f"{path.stem}-" if path.name.startswith("replica-") else ""
    beside = path.with_name(f"saving-{whose}{uuid.uuid4().hex[:12]}.tmp")
    try:
        with open(beside, "xb") as raw:
            file = _ErrorRecorder(raw)
            try:
                yield file  # type: ignore[misc]
            except Exception:
                if file.error is not None:  # torch.save raises another one that does not tell the cause
                    raise file.error from None
                raise
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
    with suppress(OSError):  # not every file system can
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class _ErrorRecorder:
    """Remembers why writing failed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()


#: What is to be done: functions with their arguments, such as a checkpoint, its path, and the user's storage options.
Jobs = list[tuple[Any, ...]]


class BackgroundWriter(WrappingCheckpointIO):
    """Takes a snapshot of what it is to write, and writes it on a thread, the checkpoint itself last.

    Lightning's ``AsyncCheckpointIO`` does not suit: before 2.6 it takes no copy, so that training changes what is
    being written; it queues without a limit; and rank 0 may have written the checkpoint before the others have
    written their shards.

    Args:
        files: writes them.
        store: of the job, with keys of its own.
        limit: longest wait for another rank, seconds.
        consensus: finds the consensus on the thread; ``None``: it is found at the step, where there are replicas.
        owed: why this rank could not write something earlier, if that has yet to be told.

    Attributes:
        snapshot: of what is to be written.
        seconds: that the latest save has taken.
    """

    def __init__(
        self,
        files: CheckpointIO,
        store: dist.Store,
        limit: float,
        consensus: BackgroundConsensus | None = None,
        owed: BaseException | None = None,
    ) -> None:
        # One thread is enough.
        files = (files.checkpoint_io or AtomicCheckpointIO()) if isinstance(files, AsyncCheckpointIO) else files
        super().__init__(files)
        self._files = files
        self.snapshot, self._consensus = Snapshot(), consensus
        self._store, self._limit, self._owed = store, limit, owed
        self._world = dist.group.WORLD  # when the latest save was begun
        self._jobs: Jobs = []
        self._find: Callable[[Mapping[str, Any]], None] | None = None  # finds the consensus that they lack
        self._number = 0  # of saves, the same on every rank
        self._left_out = 0  # number of the latest save that some had begun when ranks were lost
        self._alone = False  # whether the latest save has ended because another rank is lost
        self._running: Background[None] | None = None
        self.seconds = 0.0

    def consensus_later(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """A module's state to save, with room for the consensus that the thread will find; ``None`` if it does not."""
        if self._consensus is None or not self._consensus.serves:
            return None
        state, self._find = self._consensus.later(state, self.snapshot)
        return state

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self.complete()
        self._jobs.append((self._files.save_checkpoint, self.snapshot.of(checkpoint), path, storage_options))

    def save_in_steps(
        self, checkpoint: dict[str, Any], prepare: Callable[[dict[str, Any]], list[Callable[[], None]]]
    ) -> None:
        """The same of what is no single file.

        Args:
            checkpoint: to be written.
            prepare: gives the steps that write the copy. The last one of rank 0 comes after those of all others.
        """
        self.complete()
        self._jobs += [(step,) for step in prepare(self.snapshot.of(checkpoint))]

    def forget(self) -> None:
        """Forget what has been given since the last launch: ranks were lost meanwhile, and it is given once more."""
        self._jobs = []

    def launch(self, then: Callable[[], Any]) -> bool:
        """Begin to write what has been given since the last time; on all ranks.

        Args:
            then: called on rank 0 once all of it is written, on all ranks.

        Returns:
            Whether it begins: ranks were lost when some had begun this save. Then it is left out.
        """
        jobs, self._jobs, self._number = self._jobs, [], self._number + 1
        find, self._find, save, store = self._find, None, str(self._number), self._store
        self.snapshot.rewind()
        if self._number <= self._left_out:
            return False
        self._alone, self._world = False, dist.group.WORLD
        self._running = Background(lambda: self._write(jobs, find, save, store, then))
        return True

    def move(self, store: dist.Store, consensus: BackgroundConsensus | None) -> None:
        """Go on among other ranks (collective over them); a save that some have begun is left out by all.

        Args:
            store: of these ranks, with keys of its own.
            consensus: finds the consensus on the thread, from now on.
        """
        self._left_out = max(gather(self._number, "which saves were begun"))
        self._store, self._consensus = store, consensus

    @property
    def busy(self) -> bool:
        """Whether this rank still writes."""
        return self._running is not None and self._running.running

    def complete(self) -> None:
        """Wait until this rank has written all that it was given; its error stays for :meth:`agree`."""
        if self._running is not None:
            self._running.wait()

    def _problem(self) -> BaseException | None:
        """Reason why this rank could not write, if it could not."""
        if self._owed is not None:
            return self._owed
        return None if self._running is None or self._running.running else self._running.error

    def owed(self) -> BaseException | None:
        """The same, for those that remain when a rank is lost: a save that ends because of the loss is no problem."""
        if (problem := self._problem()) is None or problem is self._owed:
            return problem
        return None if self._alone or is_communication_error(problem) else problem

    def agree(self) -> bool:
        """Whether any rank still writes (collective).

        Raises:
            CheckpointError: on every rank, if one could not write.
        """
        problems = self._problem(), self.owed()
        texts = [None if problem is None else str(problem) or type(problem).__name__ for problem in problems]
        everyone = gather((self.busy, *texts), "whether checkpoints are written")
        lost = self._world is not dist.group.WORLD  # ranks, since the save began, which may be the reason
        if (problem := problems[lost]) is not None:
            raise problem
        for rank, (_, *told) in enumerate(everyone):
            if told[lost] is not None:
                raise CheckpointError(f"rank {rank} could not save: {told[lost]}")
        return any(busy for busy, *_ in everyone)

    def _write(
        self,
        jobs: Jobs,
        find: Callable[[Mapping[str, Any]], None] | None,
        save: str,
        store: dist.Store,
        then: Callable[[], Any],
    ) -> None:
        began, rank = time.perf_counter(), dist.get_rank()
        try:
            if find is not None and jobs:  # the first one is the replica's shard
                find(jobs[0][1]["state"])
            lower_priority()
            for job, *arguments in jobs[:-1] if rank == 0 else jobs:
                job(*arguments)
        except BaseException as error:
            with suppress(dist.DistError):  # what has happened here comes first
                store.set(f"{save}/{rank}", str(error) or type(error).__name__)
            raise
        store.set(f"{save}/{rank}", "written")
        if rank == 0:
            self._wait_for_others(save, store)
            job, *arguments = jobs[-1]
            job(*arguments)
            then()
        self.seconds = time.perf_counter() - began

    def _wait_for_others(self, save: str, store: dist.Store) -> None:
        until, others = time.monotonic() + self._limit, [f"{save}/{rank}" for rank in range(1, dist.get_world_size())]
        while not all(store.check([other]) for other in others):
            lost = failures.first_failure(0.0) is not None or self._world is not dist.group.WORLD
            if lost or time.monotonic() > until:
                self._alone = lost
                raise CheckpointError("another rank has not written its part of the checkpoint. Nothing was replaced.")
            time.sleep(0.02)
        for rank, other in enumerate(others, 1):
            if (text := store.get(other).decode()) != "written":
                raise CheckpointError(f"rank {rank} could not save: {text}")
