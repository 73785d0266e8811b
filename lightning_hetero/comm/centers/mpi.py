"""Parameter center in an MPI window: clients read it and add to it without a thread of the host."""

import math
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hetero.comm.centers.base import Center, CenterLayout, PushPull, copy_vectors, subtract_center
from lightning_hetero.errors import HeteroError, UnsupportedError

_PART = 1 << 24  # elements of one message


class MPICenter(Center):
    """A center in a window of MPI. Each number is read and added to atomically, so no addition is lost.

    A push-pull as a whole is not atomic. The window is made by ``Win.Allocate``, locked once by ``Lock_all``, and
    operations are polled. Locks for each access, or windows over existing memory, would wait for the host's own calls.

    Args:
        layout: which ranks use it, numbered as MPI does.
        across: whether clients live on several hosts. Then a thread of the host serves MPI: otherwise nothing would
            move while the host computes.
    """

    def __init__(self, layout: CenterLayout, across: bool) -> None:
        super().__init__(layout)
        self._across = across
        self._window: Any = None
        self._stop = threading.Event()

    @override
    def open(self, values: Sequence[Tensor]) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._communicator = MPI.COMM_WORLD.Dup()
        sizes = [8 * len(self.layout.leaders), *(value.nbytes for value in values)]
        *self._starts, total = accumulate((-(-size // 64) * 64 for size in sizes), initial=0)
        self._window = MPI.Win.Allocate(total if self.layout.is_host else 0, 1, comm=self._communicator)
        self._window.Lock_all()
        self._table = torch.zeros(len(self.layout.leaders), dtype=torch.float64)  # counts
        self._center = [torch.empty_like(value) for value in values]  # as last read
        if self.layout.is_host:
            self._memory = torch.frombuffer(self._window.tomemory(), dtype=torch.uint8)
            self.write(values, [0] * len(self.layout.leaders))
            if self._across:
                threading.Thread(target=self._progress, name="hetero-center", daemon=True).start()
        self._window.Sync()
        self._communicator.Barrier()

    @override
    def push_pull(self, values: Sequence[Tensor], push: float, part: int = 0, turn: int = 0) -> PushPull:
        self._fetch(self._center)
        square = subtract_center(values, self._center)
        if math.isfinite(square):
            for start, difference, scaled in zip(self._starts[1:], values, self._center, strict=True):
                self._add(torch.mul(difference, push, out=scaled), start)
        own = torch.zeros_like(self._table)
        own[self.layout.replica] = 1
        self._add(own, 0)
        self._get(self._table, 0)
        sent = 0 if self.layout.is_host else sum(v.nbytes for v in values)
        return PushPull(square, self._counts(), sent)

    def _counts(self) -> list[int]:
        return [int(count) for count in self._table]

    def _fetch(self, out: Sequence[Tensor]) -> None:
        for start, part in zip(self._starts[1:], out, strict=True):
            self._get(part, start)

    def _get(self, out: Tensor, start: int) -> None:
        for part, place in self._pieces(out, start):
            self._wait(self._window.Rget_accumulate(part, part, self.layout.host, place, self._mpi.NO_OP))

    def _add(self, values: Tensor, start: int) -> None:
        for part, place in self._pieces(values, start):
            self._wait(self._window.Raccumulate(part, self.layout.host, place, self._mpi.SUM))

    def _pieces(self, values: Tensor, start: int) -> Iterator[tuple[Any, tuple[int, int, Any]]]:
        """Pieces of values as arrays, and where they lie in the window, in which the values begin at a byte."""
        types = {4: self._mpi.FLOAT, 8: self._mpi.DOUBLE}
        for first in range(0, values.numel(), _PART):
            part = values[first : first + _PART].numpy()
            yield part, (start + first * part.itemsize, part.size, types[part.itemsize])

    def _wait(self, request: Any) -> None:
        deadline = time.monotonic() + self.layout.timeout.total_seconds()
        while not request.Test():
            if time.monotonic() > deadline:
                raise self._too_late(f"the center in the memory of rank {self.layout.host}, which does not answer")
            if self._across:
                time.sleep(1e-4)

    @override
    def read(self, out: Sequence[Tensor] | None = None) -> tuple[list[Tensor], list[int]]:
        if self._window is None:  # it has left
            return copy_vectors(self._center, out), self._counts()
        values = [torch.empty_like(value) for value in self._center] if out is None else list(out)
        self._fetch(values)
        self._get(self._table, 0)
        return values, self._counts()

    @override
    def write(self, values: Sequence[Tensor], counts: Sequence[int]) -> None:
        if not self.layout.is_host:
            return
        table = torch.tensor(counts, dtype=torch.float64)
        for start, value in zip(self._starts, (table, *values), strict=True):
            self._memory[start : start + value.nbytes].view(value.dtype).copy_(value)
        self._window.Sync()

    def _progress(self) -> None:
        while not self._stop.wait(5e-4):
            self._communicator.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG)

    @override
    def leave(self) -> None:
        if self._window is not None:
            self._window.Flush_all()
            self._communicator.Barrier()
            if self.layout.is_host:  # what is saved at the end is read from it
                self.read(self._center)
            self._stop.set()
            self._memory = torch.zeros(0)  # nothing may look at the window's memory when it goes
            self._window.Unlock_all()
            self._window.Free()
            self._window = None

    @override
    def close(self) -> None:
        self._stop.set()


def mpi_missing(world: int) -> HeteroError | None:
    """Reason why the MPI center cannot be had here, if it cannot."""
    advice = "Install mpi4py with an MPI library (pip install 'lightning-hetero[mpi]' mpich), and launch with mpiexec"
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return UnsupportedError(f"center='mpi' needs mpi4py, which cannot be loaded: {error}. {advice}.")
    size = MPI.COMM_WORLD.Get_size()
    if size != world:
        return UnsupportedError(
            f"center='mpi': MPI knows {size} of the job's {world} ranks. Launch the job with mpiexec -n {world}, or "
            "use center='shared_memory' or 'thread'."
        )
    return None
