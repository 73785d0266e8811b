"""A center in memory that all processes of a host share."""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_hetero.comm.agreement import gather, together
from lightning_hetero.comm.centers.center import Center, Job, Visit, copied, differ, push_by
from lightning_hetero.errors import CommunicationError, ConfigurationError, HeteroError

_ALIGNED = 64  # bytes; vectors begin at a cache line
_LOCK, _ALIVE = 0, 1  # bytes of the file: locked by who uses the center; from here on, by each leader while it lives


class SharedCenter(Center):
    """A mapped file without a name, in ``/dev/shm`` where there is one.

    The kernel lets go of a process's file locks when it dies, so that no dead visitor can block the others, and
    everybody can tell who lives.

    Args:
        job: who visits.
        locked: whether visitors wait for each other. Otherwise they read and add as they come (Hogwild), and some of
            their adds to the same numbers at the same time are lost.
    """

    def __init__(self, job: Job, locked: bool = True) -> None:
        super().__init__(job)
        self._locked = locked
        self._file = -1
        self._table, self._values = torch.zeros(0), [torch.zeros(0)]  # counts, and whether to stop; the center

    @override
    def open(self, values: Sequence[Tensor]) -> None:
        sizes = [8 * (len(self.job.leaders) + 1), *(value.numel() * value.element_size() for value in values)]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // _ALIGNED) * _ALIGNED)
        path = ""
        problem: HeteroError | None = None
        if self.job.rank == self.job.host:
            try:
                path = _make(starts[-1])
            except OSError as error:
                problem = ConfigurationError(
                    f"no room for a center of {starts[-1]} bytes in shared memory: {error}. Use center='thread', or "
                    "make room: containers take --shm-size."
                )
        together(problem, "the center in shared memory")
        path = gather(path, "the center's file")[self.job.host]
        problem = self._map(path, starts, sizes, values) if self.job.visits else None
        dist.barrier()  # all have opened it
        if self.job.rank == self.job.host:
            os.unlink(path)  # from now on it goes when the last process does
        together(problem, "the center in shared memory")
        if self.job.visits:
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, _ALIVE + self.job.replica)
        if self.job.rank == self.job.host:
            self.write(values, [0] * len(self.job.leaders))
        dist.barrier()

    def _map(
        self, path: str, starts: Sequence[int], sizes: Sequence[int], values: Sequence[Tensor]
    ) -> HeteroError | None:
        try:
            memory = torch.from_file(path, shared=True, size=starts[-1], dtype=torch.uint8)
            self._file = os.open(path, os.O_RDWR)  # after from_file, which closes it: that would end all its locks
        except (OSError, RuntimeError) as error:
            return ConfigurationError(f"cannot open the center's file in shared memory; use center='thread': {error}")
        parts = [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        self._table = parts[0].view(torch.float64)
        self._values = [part.view(value.dtype) for part, value in zip(parts[1:], values, strict=True)]
        return None

    @override
    def visit(self, values: Sequence[Tensor], push: float, stop: bool = False) -> Visit:
        with self._held() if self._locked else nullcontext():
            self._check_others()
            square = differ(values, self._values)
            push_by(values, self._values, push, square)
            self._table[self.job.replica] += 1  # each has its own
            if stop:
                self._table[-1] = 1
            return Visit(square, self._counts(), stop=bool(self._table[-1]))

    @override
    def read(self, out: Sequence[Tensor] | None = None) -> tuple[list[Tensor], list[int]]:
        with self._held() if self._locked else nullcontext():
            return copied(self._values, out), self._counts()

    @override
    def write(self, values: Sequence[Tensor], counts: Sequence[int]) -> None:
        if self.job.rank != self.job.host:
            return
        for own, value in zip(self._values, values, strict=True):
            own.copy_(value)
        self._table[:-1].copy_(torch.tensor(counts))

    def _counts(self) -> list[int]:
        return [int(count) for count in self._table[:-1]]

    @contextmanager
    def _held(self) -> Iterator[None]:
        deadline = time.monotonic() + self.job.timeout.total_seconds()
        while not _try(self._file, fcntl.LOCK_EX, _LOCK):
            self._check_others()
            if time.monotonic() > deadline:
                raise CommunicationError(
                    f"rank {self.job.rank} waited {self.job.timeout.total_seconds():g} s for the center in shared "
                    "memory: another rank holds it and has stopped (the strategy's `timeout` is the limit)."
                )
            time.sleep(1e-4)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _LOCK)

    def _check_others(self) -> None:
        """See that nobody has ended, who would be waited for in vain at the end of the epoch."""
        if self._table[-1]:  # all stop, some sooner
            return
        for replica, rank in enumerate(self.job.leaders):
            if replica != self.job.replica and _try(self._file, fcntl.LOCK_SH, _ALIVE + replica):
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _ALIVE + replica)
                host = ", with which it lives," if rank == self.job.host else ""
                raise CommunicationError(
                    f"rank {self.job.rank} cannot visit the center: rank {rank}{host} has ended. Look for its error "
                    "first."
                )

    @override
    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)  # gives up its locks
            self._file = -1
        self._table, self._values = torch.zeros(0), [torch.zeros(0)]


def _make(size: int) -> str:
    shared = Path("/dev/shm")
    file, path = tempfile.mkstemp(prefix="lightning-hetero-", dir=shared if shared.is_dir() else None)
    try:
        os.posix_fallocate(file, 0, size)  # now rather than a bus error later
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(file)
    return path


def _try(file: int, kind: int, byte: int) -> bool:
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):
        return False
    return True
