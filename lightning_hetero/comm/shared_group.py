"""A process group for ranks of one host: vectors go through memory that they share."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.futures import Future

from lightning_hetero.comm.host_stage import as_vector
from lightning_hetero.comm.leaving import close_at_exit
from lightning_hetero.comm.own_group import register, unregister
from lightning_hetero.comm.same_host import ALIGNED, Shared, slice_of

ROW = 4 << 20  # bytes of a tensor that go through the memory at a time; each time ranks meet twice
_FREE, _FULL, _DONE = b"f", b"w", b"d"

#: What becomes of a row of each rank; ``out`` may be one of them.
_REDUCE: dict[Any, Callable[..., Any]] = {
    ReduceOp.SUM: lambda rows, out: torch.sum(rows, 0, out=out),
    ReduceOp.AVG: lambda rows, out: torch.sum(rows, 0, out=out).div_(len(rows)),
    ReduceOp.MAX: lambda rows, out: torch.amax(rows, 0, out=out),
    ReduceOp.MIN: lambda rows, out: torch.amin(rows, 0, out=out),
}


class SharedGroup(dist.ProcessGroup):
    """Ranks of one host, as a process group: all-reduces and broadcasts of CPU tensors go through shared memory.

    In an all-reduce every rank copies a piece of its tensor into its row, reduces a slice of all rows, and copies the
    result out. A slice is reduced once, in the order of ranks. So the result has the same bits on all ranks and in each
    run. Everything else goes over gloo.

    Collectives run in the thread that asks for them. As always they need the same order on all ranks.

    Args:
        shared: the memory.
        group: of the same ranks, over gloo.
    """

    def __init__(self, shared: Shared, group: dist.ProcessGroup) -> None:
        super().__init__(shared.links.rank, shared.links.count)  # type: ignore[call-arg]
        self._links, self._rows, self._result = shared
        self._rank, self._group = shared.links.rank, group
        register(self, dist.get_process_group_ranks(group))
        close_at_exit(self)

    def close(self) -> None:
        """Close the connections; idempotent."""
        self._links.close()
        unregister(self)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        """Reduce over all ranks, in place."""
        reduce = _REDUCE.get(opts.reduceOp.op if hasattr(opts.reduceOp, "op") else opts.reduceOp)
        if reduce is None or any(not suits(tensor) for tensor in tensors):
            return self._group.allreduce(tensors, opts)
        for piece in _pieces(tensors):
            rows, result = self._rows[:, : piece.nbytes].view(piece.dtype), self._result[: piece.nbytes]
            rows[self._rank].copy_(piece)
            self._links.meet(_FULL)
            mine = slice_of(len(piece), self._rank, len(rows), ALIGNED // piece.element_size())
            reduce(rows[:, mine], out=result.view(piece.dtype)[mine])
            self._links.meet(_DONE)
            piece.copy_(result.view(piece.dtype))
        return _Done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        """Give all ranks the tensors of one, in place."""
        if any(not suits(tensor) for tensor in tensors):
            return self._group.broadcast(tensors, opts)
        for piece in _pieces(tensors):
            there = self._rows[opts.rootRank, : piece.nbytes].view(piece.dtype)
            if self._rank == opts.rootRank:
                there.copy_(piece)
            self._links.meet(_FULL)
            if self._rank != opts.rootRank:
                piece.copy_(there)
            self._links.meet(_FREE)
        return _Done(tensors)

    def getBackendName(self) -> str:  # noqa: N802
        """For PyTorch's logs."""
        return "lightning_hetero-shared"

    # -- over gloo -------------------------------------------------------------------------------------

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:  # type: ignore[override]
        """Gather the tensors of all ranks."""
        return self._group.allgather(outputs, inputs, opts)

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any) -> dist.Work:  # type: ignore[override]
        return self._group._allgather_base(output, own, opts)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any) -> dist.Work:  # type: ignore[override]
        """Gather the tensors of all ranks into one; under this name from PyTorch 2.13 on."""
        return self._group.all_gather_single(output, own, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:  # type: ignore[override]
        """Gather the tensors of all ranks on one of them."""
        return self._group.gather(outputs, inputs, opts)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        """Send to one rank."""
        return self._group.send(tensors, to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        """Receive from one rank."""
        return self._group.recv(tensors, source, tag)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks."""
        return self._group.barrier(opts) if opts is not None else self._group.barrier()


def suits(tensor: Tensor) -> bool:
    """Whether a tensor can go through shared memory: on the CPU, and dense."""
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_complex()


def _pieces(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        with as_vector(tensor) as vector:
            yield from vector.split(max(ROW // vector.element_size(), 1))


class _Done(dist.Work):
    """What PyTorch waits for; it has happened already."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._tensors)
        return future
