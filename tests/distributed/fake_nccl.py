"""A process group that behaves as NCCL's if a rank is lost; over gloo, on CPUs and on simulated cards.

A collective with a dead rank never ends; neither does the group's shutdown after that. ``install()`` takes ranks on
CPUs for ranks on cards of their own, and makes their groups of this kind.
"""

import threading
import time
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.futures import Future
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from lightning_hetero.comm.topology import Place
from lightning_hetero.strategies import job


class FakeNCCL(dist.ProcessGroup):
    """Behaves as NCCL with dead ranks, and otherwise as gloo."""

    def __init__(self, gloo: dist.ProcessGroup) -> None:
        super().__init__(gloo.rank(), gloo.size())
        self._gloo, self._pending = gloo, 0

    def _launched(self, work: Any, tensors: Any) -> "Launched":
        self._pending += 1
        future: Future[Any] = Future()

        def complete() -> None:
            try:
                work.wait()
            except RuntimeError:
                return  # the kernel hangs
            self._pending -= 1
            future.set_result(tensors)

        threading.Thread(target=complete, daemon=True).start()
        return Launched(future)

    def _on_card(self, call: Any, tensors: Any, *inputs: Any) -> "Launched":
        """Run a kernel of a simulated card: the card, and not the host, reads and writes its tensors."""
        with _disable_current_modes():
            hosts = tree_map(lambda tensor: tensor.cpu(), (tensors, *inputs))
            try:
                call(*hosts).wait()
            except RuntimeError:
                threading.Event().wait()  # the kernel hangs, and so does the thread that waits for the card
            for tensor, host in zip(tree_leaves(tensors), tree_leaves(hosts[0]), strict=True):
                tensor.copy_(host)
        done: Future[Any] = Future()
        done.set_result(tensors)
        return Launched(done)

    def _run(self, call: Any, tensors: Any, *inputs: Any) -> "Launched":
        if tree_leaves(tensors)[0].device.type != "cpu":
            return self._on_card(call, tensors, *inputs)
        return self._launched(call(tensors, *inputs), tensors)

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        return self._run(lambda own: self._gloo.allreduce(own, opts), tensors)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self._run(lambda own: self._gloo.broadcast(own, opts), tensors)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        return self._run(lambda own: self._gloo.reduce(own, opts), tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self._run(lambda rows, own: self._gloo.allgather(rows, own, opts), outputs, inputs)

    def shutdown(self) -> None:
        while self._pending:
            time.sleep(0.1)

    abort = shutdown

    def getBackendName(self) -> str:  # noqa: N802
        return "fake_nccl"


class Launched(dist.Work):
    """A collective on its way; the host waits for it, as the device's queue would."""

    def __init__(self, future: Future[Any]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: Any = None) -> bool:
        self._future.wait()
        return True

    def get_future(self) -> Future[Any]:
        return self._future


def install() -> None:
    """Let ranks of this process have cards that this library connects."""
    made, place_of = distributed_c10d._new_process_group_helper, job.place_of

    def helper(size: int, rank: int, ranks: Any, backend: Any, store: Any, *args: Any, **kwargs: Any) -> Any:
        fake = str(backend) == "nccl"
        return made(size, rank, ranks, "fake_nccl" if fake else backend, store, *args, **kwargs)

    def create(store: Any, rank: int, size: int, timeout: Any) -> dist.ProcessGroup:
        return FakeNCCL(dist.ProcessGroupGloo(store, rank, size, timeout))

    def place(device: Any, host: str, node: int, local_rank: int) -> Place:
        return place_of(device, host, node, local_rank)._replace(
            device=f"card {node}-{local_rank}", library="fake NCCL"
        )

    dist.Backend.register_backend("fake_nccl", create, devices=["cpu"])
    distributed_c10d._new_process_group_helper = helper
    job.place_of = place
