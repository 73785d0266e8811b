"""Averages gradients among the ranks of one host, through memory that they share."""

import queue
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from lightning_hetero.comm.in_order import serve, value_or_error
from lightning_hetero.comm.leaving import THREADS, close_at_exit
from lightning_hetero.comm.local_links import LocalLinks
from lightning_hetero.comm.same_host import ALIGNED, slice_of

_COPIED, _SUMMED = b"c", b"s"


class SharedMean:
    """A communication hook for DDP: the mean of each gradient bucket over the ranks of a group.

    Every rank copies its bucket into its own row of the shared memory, sums a slice of all rows into the result, and
    returns the result where it lies. A slice is summed once, in the order of ranks. So the mean has the same bits on
    all ranks and in each run. Ranks tell each other over local sockets how far they are.

    A thread does the work, so that it overlaps with the rest of the backward pass, as with PyTorch's own hook.

    Args:
        links: to the other ranks of the group.
        rows: a row of bytes for each rank, the same shared memory in all processes.
        result: one more such row.
    """

    def __init__(self, links: LocalLinks, rows: Tensor, result: Tensor) -> None:
        self._links, self._rows, self._result, self._rank = links, rows, result.numpy(), links.rank
        self._free = 0  # the first byte of the rows that no bucket of this backward pass has taken
        self._error: BaseException | None = None
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=serve, args=(self._work,), name=f"{THREADS}shared-mean", daemon=True).start()
        self._end = weakref.finalize(self, self._work.put, None)
        self._end.atexit = False
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
                self._work.put(self._restart)
            return allreduce_hook(group, bucket)
        done: Future[Any] = Future()
        self._work.put(lambda: done.set_result(self._outcome(gradients, first)))
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
        span = slice(start, start + values.nbytes)
        rows = self._rows[:, span].view(values.dtype)
        # A tensor with a storage of its own: DDP reads the result from where its storage begins.
        result = torch.from_numpy(self._result[span]).view(values.dtype)
        rows[self._rank].copy_(values)
        self._links.meet(_COPIED)
        mine = slice_of(len(values), self._rank, len(rows), ALIGNED // values.element_size())
        torch.sum(rows[:, mine], 0, out=result[mine])
        result[mine].div_(len(rows))
        self._links.meet(_SUMMED)
        return result

    def close(self) -> None:
        """End the thread, and the connections."""
        self._end()
        self._links.close()
