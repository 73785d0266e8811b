"""Parameter center in memory that the processes of one host share."""

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_hetero.comm.agreement import gather, raise_on_all
from lightning_hetero.comm.centers.base import Center, CenterLayout, CenterPart, PushPull, copy_vectors
from lightning_hetero.comm.failures import cause
from lightning_hetero.comm.shared_memory import MappedVectors
from lightning_hetero.errors import CommunicationError, ConfigurationError, HeteroError

_LOCK, _ALIVE = 0, 1  # bytes of the file: locked by the client at work; and, from here on, by each leader that lives


class SharedCenter(Center):
    """A center in a mapped file without a name, in ``/dev/shm`` where there is one.

    When a process dies, the kernel releases its file locks. So a dead client cannot block the others, and every process
    can find out which others live.

    Args:
        layout: which ranks use it.
        locked: whether clients wait for each other. Otherwise they read and add at any time (Hogwild), and some
            additions to the same numbers at the same time are lost.
        parts: that are exchanged one by one. Default: all of it, by the elastic rule.
    """

    def __init__(
        self, layout: CenterLayout, locked: bool = True, parts: Sequence[CenterPart] = (CenterPart(),)
    ) -> None:
        super().__init__(layout, parts)
        self._locked = locked
        self._file = -1
        self._table, self._values = torch.zeros(0), [torch.zeros(0)]  # counts; the center

    @override
    def open(self, values: Sequence[Tensor]) -> None:
        like = [torch.zeros(len(self.layout.leaders), dtype=torch.float64), *values]
        memory: MappedVectors | None = None
        problem: HeteroError | None = None
        if self.layout.is_host:
            try:
                memory = MappedVectors(like)
            except OSError as error:
                size = sum(value.nbytes for value in like)
                problem = ConfigurationError(
                    f"no room for a center of {size} bytes in shared memory: {error}. Use center='thread', or make "
                    "room: containers take --shm-size."
                )
        raise_on_all(problem, "the center in shared memory", self.layout.group)
        path = gather(memory.path if memory else "", "the center's file", self.layout.group)[self.layout.place]
        if self.layout.is_client:
            try:
                self._table, *self._values = (memory or MappedVectors(like, path)).vectors
                # After mapping, which opens and closes the file: closing it ends all locks of the process.
                self._file = os.open(path, os.O_RDWR)
            except (OSError, RuntimeError, ValueError) as error:
                problem = ConfigurationError(
                    f"cannot open the center's file in shared memory; use center='thread': {error}"
                )
        dist.barrier(self.layout.group)  # all clients have opened it
        if memory:
            memory.hide()
        raise_on_all(problem, "the center in shared memory", self.layout.group)
        if self.layout.is_client:
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, _ALIVE + self.layout.replica)
        if self.layout.is_host:
            self.write(values, [0] * len(self.layout.leaders))
        dist.barrier(self.layout.group)

    @override
    def push_pull(self, values: Sequence[Tensor], push: float, part: int = 0, turn: int = 0) -> PushPull:
        rule = self.parts[part].rule
        with self._held():
            self._check_others()
            square = rule.measure(values, rule.travelling(self._values))
            rule.move(values, self._values, push, square)
            self._table[self.layout.replica] += 1  # each has its own
            return PushPull(square, self._counts())

    @override
    def read(self, out: Sequence[Tensor] | None = None) -> tuple[list[Tensor], list[int]]:
        with self._held():
            return copy_vectors(self._values, out), self._counts()

    @override
    def peek(self) -> tuple[list[Tensor], list[int]] | None:
        return (copy_vectors(self._values, None), self._counts()) if self._file >= 0 else None

    @override
    def write(self, values: Sequence[Tensor], counts: Sequence[int]) -> None:
        if not self.layout.is_host:
            return
        for own, value in zip(self._values, values, strict=True):
            own.copy_(value)
        self._table.copy_(torch.tensor(counts))

    def _counts(self) -> list[int]:
        return [int(count) for count in self._table]

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Keep the others out meanwhile, if clients wait for each other."""
        if not self._locked:
            yield
            return
        deadline = time.monotonic() + self.layout.timeout.total_seconds()
        while not _try(self._file, fcntl.LOCK_EX, _LOCK):
            self._check_others()
            if time.monotonic() > deadline:
                raise self._too_late("the center in shared memory: another rank holds it and has stopped")
            time.sleep(1e-4)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _LOCK)

    def _check_others(self) -> None:
        """Raise an error if a leader has ended: the others would wait for it at the end of the epoch."""
        for replica, rank in enumerate(self.layout.leaders):
            if self._file >= 0 and replica != self.layout.replica and _try(self._file, fcntl.LOCK_SH, _ALIVE + replica):
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _ALIVE + replica)
                host = ", with which it lives," if rank == self.layout.host else ""
                error = ConnectionError(f"rank {rank}{host} has ended")
                raise CommunicationError(f"rank {self.layout.rank} cannot use the center: {cause(error)}")

    @override
    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)  # gives up its locks
            self._file = -1
        self._table, self._values = torch.zeros(0), [torch.zeros(0)]


def _try(file: int, kind: int, byte: int) -> bool:
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):
        return False
    return True
