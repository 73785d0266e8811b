"""Shared memory between ranks of one host; nothing is left behind when one of them is killed."""

import contextlib
import os
import shutil
import socket
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.threads import Worker, abort_too, close_at_exit, value_or_error
from lightning_hetero.errors import not_none

SHARED = "/dev/shm"
ALIGNED = 64  # bytes; vectors and rows begin at a cache line


class MappedVectors:
    """Vectors in a mapped file, in ``/dev/shm`` where there is one.

    The file loses its name once all processes have opened it (:meth:`hide`), or with this object if they never do. So
    nothing is left of a job that dies.

    Args:
        like: vectors of the sizes and dtypes to come.
        path: a file that another process has made. Default: make a file, full of zeros.

    Raises:
        OSError: the file cannot be found, or there is no room for it.
        ValueError: the file has another size.

    Attributes:
        path: of the file, until :meth:`hide`.
        vectors: the vectors in it.
    """

    def __init__(self, like: Sequence[Tensor], path: str | None = None) -> None:
        sizes = [value.nbytes for value in like]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // ALIGNED) * ALIGNED)
        size = max(starts[-1], ALIGNED)
        self.path = path or _make(size)
        self._remove = weakref.finalize(self, Path(self.path).unlink, missing_ok=True) if path is None else None
        if (there := os.stat(self.path).st_size) != size:  # raises if there is none; mapping would make one
            raise ValueError(f"{self.path} has {there} bytes, not {size}")
        memory = torch.from_file(self.path, shared=True, size=size, dtype=torch.uint8)
        parts = [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        self.vectors = [part.view(value.dtype) for part, value in zip(parts, like, strict=True)]

    def hide(self) -> None:
        """Remove the name of a file that was made here, once all have opened it: it ends with the last that uses it."""
        not_none(self._remove, "a file that was made here")()


def _make(size: int) -> str:
    file, path = tempfile.mkstemp(prefix="lightning-hetero-", dir=SHARED if os.path.isdir(SHARED) else None)
    try:
        os.posix_fallocate(file, 0, size)  # now rather than a bus error later
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(file)
    return path


class LocalLinks:
    """A connected local socket to each other rank of a group.

    Ranks that share memory meet over these: nobody spins, and the end of a process is noticed at once.

    Args:
        sockets: by the ranks to which they lead.
        rank: number of this process in the group.
        limit: longest wait for another rank.
    """

    def __init__(self, sockets: dict[int, socket.socket], rank: int, limit: timedelta) -> None:
        self._sockets, self.rank, self.count = sockets, rank, len(sockets) + 1
        self._limit = limit.total_seconds()
        for link in sockets.values():
            link.settimeout(self._limit)
            abort_too(link)
        self._end = weakref.finalize(self, _end, list(sockets.values()))
        self._end.atexit = False

    def meet(self, sign: bytes) -> None:
        """Wait until all ranks have come to the same point. It orders their reads and writes of shared memory.

        Args:
            sign: a byte that names the point.

        Raises:
            DistNetworkError: a rank has ended, is at another point, or was silent for too long.
        """
        until = time.monotonic() + self._limit
        for rank, link in self._sockets.items():
            with _of(rank, self._limit):
                link.sendall(sign)
        for rank, link in self._sockets.items():
            with _of(rank, self._limit):
                link.settimeout(max(until - time.monotonic(), 0.001))
                if (got := link.recv(1)) != sign:
                    raise ConnectionResetError if not got else ConnectionAbortedError("it is at another point")

    def close(self) -> None:
        """Close the connections; idempotent."""
        self._end()


def _end(sockets: Iterable[socket.socket]) -> None:
    for link in sockets:
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
        link.close()


@contextlib.contextmanager
def _of(rank: int, limit: float) -> Iterator[None]:
    """Say which rank an error is about. By its class and its words it is known for one of communication.

    Where a collective raises it, the class tells; of what a hook raises, DDP keeps the words only.
    """
    who = f"rank {rank}"
    try:
        yield
    except TimeoutError as error:
        text = f"Connection closed: {who} was silent for {limit:g} s (the strategy's `timeout`)"
        raise dist.DistNetworkError(text) from error
    except OSError as error:
        raise dist.DistNetworkError(f"Connection closed by {who}: {str(error) or 'it has ended'}") from error


T = TypeVar("T")
PART = 0.5  # of the memory that is free for sharing: the most that is taken unasked
_CONNECTED = 60.0  # seconds in which all others must have connected, unless the user's limit is shorter
_COPIED, _REDUCED = b"c", b"s"


class SharedBuffers(NamedTuple):
    """Memory that the ranks of a group share.

    Attributes:
        links: to the other ranks.
        rows: of bytes, one for each rank.
        result: one more row.
    """

    links: LocalLinks
    rows: Tensor
    result: Tensor

    def reduced(self, values: Tensor, reduce: Callable[..., object], start: int = 0) -> Tensor:
        """Reduce a vector over all ranks (collective).

        Every rank copies its vector into its row, and reduces a slice of all rows into the result. A slice is reduced
        once, in the order of ranks. So the result has the same bits on all ranks and in each run.

        Args:
            values: of this rank, on the CPU, contiguous.
            reduce: writes what becomes of rows to ``out``.
            start: the first byte of the rows to use.

        Returns:
            The result, in the shared memory.
        """
        span = slice(start, start + values.nbytes)
        rows = self.rows[:, span].view(values.dtype)
        # A tensor with a storage of its own: DDP reads the result from where its storage begins.
        result = torch.from_numpy(self.result.numpy()[span]).view(values.dtype)
        rows[self.links.rank].copy_(values)
        self.links.meet(_COPIED)
        mine = slice_of(len(values), self.links.rank, len(rows), ALIGNED // values.element_size())
        reduce(rows[:, mine], out=result[mine])
        self.links.meet(_REDUCED)
        return result


def share_memory(group: dist.ProcessGroup, size: int, limit: timedelta, part: float = 1.0) -> SharedBuffers:
    """Share memory among ranks (collective over the group).

    The memory and the sockets lose their names before this returns, so that the kernel removes them with the processes.

    Args:
        group: ranks of one host.
        size: bytes of a row.
        limit: longest wait for another rank.
        part: of the memory that is free for sharing, the most to take.

    Raises:
        OSError: on every rank: one of them cannot take part, or there is not enough memory.
        CommunicationError: another rank did not take part in time.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    row = -(-size // ALIGNED) * ALIGNED
    like = [torch.empty(rows * row, dtype=torch.uint8, device="meta") for rows in (ranks, 1)]
    links: dict[int, socket.socket] = {}
    try:
        _meet(rank, ranks, links, group, min(_CONNECTED, limit.total_seconds()))
        made = _on_all(lambda: _made(like, part) if rank == 0 else None, group)
        try:
            path = gather(made and made.path, "the shared memory", group)[0]
            memory = _on_all(lambda: made or MappedVectors(like, path), group)
        finally:
            if made is not None:
                made.hide()
    except BaseException:
        for link in links.values():
            link.close()
        raise
    values, result = memory.vectors
    members = dist.get_process_group_ranks(group)
    sockets = {members[number]: link for number, link in links.items()}
    return SharedBuffers(LocalLinks(sockets, rank, limit), values.view(ranks, row), result)


def slice_of(length: int, rank: int, ranks: int, step: int) -> slice:
    """The slice that a rank reduces: slices of nearly equal length that begin at multiples of a step."""
    steps = -(-length // step)
    return slice(min(rank * steps // ranks * step, length), min((rank + 1) * steps // ranks * step, length))


def _made(like: Sequence[torch.Tensor], part: float) -> MappedVectors:
    needed, free = sum(vector.nbytes for vector in like), shutil.disk_usage(SHARED).free
    if needed > part * free:
        raise OSError(f"{needed} bytes are more than {part:.0%} of the {free} that are free in {SHARED}")
    return MappedVectors(like)


def _meet(rank: int, ranks: int, links: dict[int, socket.socket], group: dist.ProcessGroup, seconds: float) -> None:
    """Connect to each other rank of a group (collective)."""
    with contextlib.ExitStack() as opened:

        def listen() -> socket.socket:
            folder = tempfile.mkdtemp(prefix="lightning-hetero-")  # which only this user can enter
            opened.callback(shutil.rmtree, folder)
            listener = opened.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(f"{folder}/{rank}")
            listener.listen(ranks)
            return listener

        listener = _on_all(listen, group)
        names = gather(listener.getsockname(), "local sockets", group)
        _on_all(lambda: _connect(rank, names, listener, links, seconds), group)


def _connect(
    rank: int, names: Sequence[str], listener: socket.socket, links: dict[int, socket.socket], seconds: float
) -> None:
    """Connect to the ranks before this one, and wait for those after it."""
    until = time.monotonic() + seconds
    for other in range(rank):
        links[other] = socket.socket(socket.AF_UNIX)
        links[other].settimeout(max(until - time.monotonic(), 0.001))
        links[other].connect(names[other])
        links[other].sendall(rank.to_bytes(4, "big"))
    for _ in range(rank + 1, len(names)):
        listener.settimeout(max(until - time.monotonic(), 0.001))
        link, _ = listener.accept()
        link.settimeout(max(until - time.monotonic(), 0.001))
        links[int.from_bytes(link.recv(4, socket.MSG_WAITALL), "big")] = link


def _on_all(action: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Do something on every rank (collective).

    Raises:
        OSError: on every rank, if it fails on one.
    """
    value, problem = None, None
    try:
        value = action()
    except (OSError, ValueError) as error:
        problem = str(error) or type(error).__name__
    for rank, other in enumerate(gather(problem, "shared memory", group)):
        if other is not None:
            raise OSError(f"rank {dist.get_process_group_ranks(group)[rank]}: {other}")
    return value  # type: ignore[return-value]


def mean_of_rows(rows: Tensor, out: Tensor) -> Tensor:
    """The mean of the rows of a matrix, in their order."""
    return torch.sum(rows, 0, out=out).div_(len(rows))


class SharedMean:
    """A communication hook for DDP: the mean of each gradient bucket over the ranks of a group, in shared memory.

    A thread does the work, so that it overlaps with the rest of the backward pass, as with PyTorch's own hook.

    Args:
        shared: memory of the ranks of the group.
    """

    def __init__(self, shared: SharedBuffers) -> None:
        self._shared = shared
        self._free = 0  # the first byte of the rows that no bucket of this backward pass has taken
        self._error: BaseException | None = None
        self._worker = Worker("shared-mean")
        close_at_exit(self)

    def hook(self, group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
        """Average a bucket in the background; for ``register_comm_hook``.

        Args:
            group: of the same ranks. Averages sparse gradients.
            bucket: of DDP.
        """
        gradients, first = bucket.buffer(), bucket.index() == 0
        if gradients.is_sparse:
            if first:
                self._worker.call(self._restart)
            return allreduce_hook(group, bucket)
        done: Future[Any] = Future()
        self._worker.call(lambda: done.set_result(self._outcome(gradients, first)))
        return done.then(value_or_error)

    def _restart(self) -> None:
        """Begin at the first byte of the rows again."""
        self._free = 0

    def _outcome(self, gradients: Tensor, first: bool) -> Tensor | BaseException:
        if self._error is None:
            try:
                return self.mean(gradients, first)
            except BaseException as error:
                self._error = error  # the ranks are not at the same point any more
        return self._error

    def mean(self, values: Tensor, first: bool) -> Tensor:
        """The mean over all ranks (collective; the same order on each).

        Args:
            values: of this rank, on CPU, contiguous.
            first: begin at the first byte of the rows again. No result of before is needed any more.

        Returns:
            The result, in shared memory. It stays until the call after the next one with ``first``.
        """
        if first:
            self._restart()
        start = self._free
        self._free = start + -(-values.nbytes // ALIGNED) * ALIGNED
        return self._shared.reduced(values, mean_of_rows, start)

    def close(self) -> None:
        """End the thread, and the connections."""
        self._worker.close()
        self._shared.links.close()
