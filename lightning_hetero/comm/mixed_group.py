"""A process group for ranks with unlike devices: what cannot travel between devices does so between hosts."""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_hetero.comm.background import keeping_device
from lightning_hetero.comm.groups import Groups
from lightning_hetero.comm.host_stage import HostStage, as_vector
from lightning_hetero.comm.in_order import serve, value_or_error
from lightning_hetero.comm.leaving import THREADS, close_at_exit
from lightning_hetero.comm.own_group import register, unregister

Island = tuple[int, ...]


class MixedGroup(dist.ProcessGroup):
    """The ranks of a replica with different kinds of devices, as a process group for PyTorch's DDP.

    gloo takes tensors on CPUs, NCCL those on GPUs of one kind. Here an all-reduce has two levels: ranks with devices of
    one kind, an island, reduce among themselves; then the islands' leaders and all ranks without an island reduce over
    gloo, from and to pinned memory; then leaders tell their islands. All other collectives are rare and go over gloo.

    A thread does the work in the order of the calls, which is the same on every rank. So averages of gradients overlap
    with the rest of the backward pass, as usual.

    Args:
        groups: makes the process groups.
        ranks: the members, this one among them.
        islands: disjoint parts of ``ranks`` of at least two each: those that NCCL can connect.
        rank: this process.
    """

    def __init__(self, groups: Groups, ranks: Sequence[int], islands: Sequence[Island], rank: int) -> None:
        super().__init__(list(ranks).index(rank), len(ranks))  # type: ignore[call-arg]
        island = next((island for island in islands if rank in island), (rank,))
        followers = {other for island in islands for other in island[1:]}
        leaders = [other for other in ranks if other not in followers]
        self._leader = island[0]
        all_ = groups.get("mixed, all", ranks)
        assert all_ is not None
        self._all = all_
        self._leaders = groups.get("mixed, leaders", leaders) if rank in leaders else None
        self._island = groups.get("mixed, island", island, "nccl")
        self._stages: dict[torch.device, HostStage] = {}
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        target = keeping_device(partial(serve, self._work))
        threading.Thread(target=target, name=f"{THREADS}mixed-group", daemon=True).start()
        self._end = weakref.finalize(self, self._work.put, None)
        self._end.atexit = False
        close_at_exit(self)
        register(self, ranks)

    def close(self) -> None:
        """End the thread, once it has done what it was given."""
        self._end()
        unregister(self)

    # -- as PyTorch calls it ---------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        """Reduce over all ranks, in place: first among devices of one kind, then among hosts."""

        def reduce(tensor: Tensor, stage: HostStage) -> None:
            if tensor.is_sparse:  # which NCCL does not know
                stage.through(tensor, lambda whole: self._all.allreduce([whole], opts).wait())
                return
            with as_vector(tensor) as vector:
                if self._island is not None:
                    dist.reduce(vector, self._leader, opts.reduceOp, group=self._island)
                if (leaders := self._leaders) is not None:
                    stage.through(vector, lambda piece: leaders.allreduce([piece], opts).wait())
                if self._island is not None:
                    dist.broadcast(vector, self._leader, group=self._island)

        return self._in_order(tensors, reduce)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        """Give all ranks the tensors of one, in place."""

        def send(tensor: Tensor, stage: HostStage) -> None:
            stage.through(tensor, lambda piece: self._all.broadcast([piece], opts).wait())

        return self._in_order(tensors, send)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any
    ) -> dist.Work:
        """Gather the tensors of all ranks."""
        found = {id(own): rows for own, rows in zip(inputs, outputs, strict=True)}

        def collect(tensor: Tensor, stage: HostStage) -> None:
            host = tensor.detach().cpu().contiguous()
            everyone = [torch.empty_like(host) for _ in range(self.size())]
            dist.all_gather(everyone, host, group=self._all)
            for row, value in zip(found[id(tensor)], everyone, strict=True):
                row.copy_(value)

        return self._in_order(inputs, collect)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        """Gather the tensors of all ranks, which are on CPUs, on one rank."""
        return self._in_order(inputs, lambda own, _: self._all.gather(outputs, [own], opts).wait())

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks."""
        return self._in_order([torch.zeros(1)], lambda tensor, _: dist.all_reduce(tensor, group=self._all))

    def getBackendName(self) -> str:  # noqa: N802
        """For PyTorch's logs."""
        return "lightning_hetero-mixed"

    # -- in the background -----------------------------------------------------------------------------

    def _in_order(self, tensors: Sequence[Tensor], action: Callable[[Tensor, HostStage], object]) -> dist.Work:
        """Let the thread do something with tensors, after all that it was given before."""
        device = tensors[0].device
        if device not in self._stages:
            self._stages[device] = HostStage(device)
        stage = self._stages[device]
        begin = stage.ready()
        done: Future[Any] = Future(devices=[device] if stage.has_streams else [])

        def work() -> None:
            with stage.after(begin):
                try:
                    for tensor in tensors:
                        action(tensor, stage)
                    result: Any = list(tensors)
                except BaseException as error:
                    result = error  # a future with an error of Python's own is a mere value to DDP
                done.set_result(result)

        self._work.put(work)
        return _Work(done.then(value_or_error))


class _Work(dist.Work):
    """What PyTorch waits for."""

    def __init__(self, future: Future[Any]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: Any = None) -> bool:
        self._future.wait()
        return True

    def get_future(self) -> Future[Any]:
        return self._future
