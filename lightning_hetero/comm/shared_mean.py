"""Averages gradients among the ranks of one host, through memory that they share."""

import contextlib
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from lightning_hetero.comm.leaving import THREADS, close_at_exit, cut_too

ALIGNED = 64  # bytes; a bucket, and what one rank sums of it, begins at a cache line
_COPIED, _SUMMED = b"c", b"s"


class SharedMean:
    """A communication hook for DDP: the mean of each gradient bucket over the ranks of a group.

    Every rank copies its bucket into its own row of the shared memory, sums a slice of all rows into the result, and
    returns the result where it lies. A slice is summed once, in the order of ranks. So the mean has the same bits on
    all ranks and in each run. Ranks tell each other how far they are with single bytes over local sockets: nobody
    spins, and the end of a process is noticed at once.

    A thread does the work, so that it overlaps with the rest of the backward pass, as with PyTorch's own hook.

    Args:
        links: a connected socket to each other rank of the group, by its number in it.
        rows: a row of bytes for each rank, the same shared memory in all processes.
        result: one more such row.
        rank: number of this process in the group.
        limit: longest wait for another rank.
    """

    def __init__(self, links: dict[int, socket.socket], rows: Tensor, result: Tensor, rank: int, limit: timedelta):
        self._links, self._rows, self._result, self._rank = links, rows, result.numpy(), rank
        self._limit = limit.total_seconds()
        self._free = 0  # the first byte of the rows that no bucket of this backward pass has taken
        self._error: BaseException | None = None
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for link in links.values():
            link.settimeout(self._limit)
            cut_too(link)
        threading.Thread(target=_serve, args=(self._work,), name=f"{THREADS}shared-mean", daemon=True).start()
        self._end = weakref.finalize(self, _end, self._work, list(links.values()))
        self._end.atexit = False
        _all.add(self)
        close_at_exit(self)

    def hook(self, group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
        """Average a bucket in the background; for ``register_comm_hook``.

        Args:
            group: of the same ranks. Averages sparse gradients.
            bucket: of DDP.
        """
        gradients, first = bucket.buffer(), bucket.index() == 0
        if gradients.is_sparse:
            return allreduce_hook(group, bucket)
        done: Future[Any] = Future()
        self._work.put(lambda: done.set_result(self._outcome(gradients, first)))
        return done.then(_value)

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
        start = 0 if first else self._free
        self._free = start + -(-values.nbytes // ALIGNED) * ALIGNED
        span = slice(start, start + values.nbytes)
        rows = self._rows[:, span].view(values.dtype)
        # A tensor with a storage of its own: DDP reads the result from where its storage begins.
        result = torch.from_numpy(self._result[span]).view(values.dtype)
        rows[self._rank].copy_(values)
        self._meet(_COPIED)
        mine = _slice(len(values), self._rank, len(rows), ALIGNED // values.element_size())
        torch.sum(rows[:, mine], 0, out=result[mine])
        result[mine].div_(len(rows))
        self._meet(_SUMMED)
        return result

    def _meet(self, sign: bytes) -> None:
        """Wait until all ranks have come to the same point. It orders their reads and writes of the memory."""
        until = time.monotonic() + self._limit
        for rank, link in self._links.items():
            with _of(rank, self._limit):
                link.sendall(sign)
        for rank, link in self._links.items():
            with _of(rank, self._limit):
                link.settimeout(max(until - time.monotonic(), 0.001))
                if (got := link.recv(1)) != sign:
                    raise ConnectionResetError if not got else ConnectionAbortedError("it is at another bucket")

    def close(self) -> None:
        """End the thread, and the connections."""
        self._end()

    def after_fork(self) -> None:
        """Leave the connections to the parent, or nobody would notice its end."""
        for link in self._links.values():
            link.close()


_all: weakref.WeakSet[SharedMean] = weakref.WeakSet()


def _after_fork() -> None:
    for shared in _all:
        shared.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _end(work: "queue.SimpleQueue[Any]", links: Iterable[socket.socket]) -> None:
    work.put(None)
    for link in links:
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
        link.close()


@contextlib.contextmanager
def _of(rank: int, limit: float) -> Iterator[None]:
    """Say which rank an error is about. The words tell who waits for DDP that it is one of communication."""
    who = f"rank {rank} of this replica"
    try:
        yield
    except TimeoutError as error:
        raise TimeoutError(f"Connection closed: {who} was silent for {limit:g} s (the strategy's `timeout`)") from error
    except OSError as error:
        raise ConnectionError(f"Connection closed by {who}: {str(error) or 'it has ended'}") from error


def _serve(work: "queue.SimpleQueue[Any]") -> None:
    while (task := work.get()) is not None:
        task()
        del task


def _value(done: Future[Any]) -> Tensor:
    value = done.value()
    if isinstance(value, BaseException):
        raise value
    return value


def _slice(length: int, rank: int, ranks: int, step: int) -> slice:
    """What a rank sums: slices of nearly equal length that begin at multiples of a step."""
    steps = -(-length // step)
    return slice(min(rank * steps // ranks * step, length), min((rank + 1) * steps // ranks * step, length))
