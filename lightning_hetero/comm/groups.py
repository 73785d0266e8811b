"""Process groups: made when they are first asked for, and ended with the object that hands them out."""

import atexit
import gc
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed import ReduceOp, distributed_c10d
from torch.futures import Future

from lightning_hetero.comm import device_exit, failures
from lightning_hetero.comm.agreement import gather, hash_of
from lightning_hetero.comm.failures import deadline
from lightning_hetero.comm.shared_memory import PART, SHARED, SharedBuffers, mean_of_rows, share_memory
from lightning_hetero.comm.staging import HostStage, as_vector
from lightning_hetero.comm.stores import clone_store
from lightning_hetero.comm.threads import THREADS, Worker, close_at_exit, record_sockets, value_or_error
from lightning_hetero.errors import UnsupportedError


def default_store() -> dist.Store:
    """The store with which all ranks have met; on the rank that hosts it, it ends with this object."""
    return distributed_c10d._get_default_store()


def register(group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Let PyTorch know a group of our own class: what reports an error asks for its backend and its ranks."""
    distributed_c10d._world.pg_map[group] = ("gloo", default_store())
    distributed_c10d._world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}


def unregister(group: dist.ProcessGroup) -> None:
    """Let PyTorch forget a group of :func:`register`."""
    distributed_c10d._world.pg_map.pop(group, None)
    distributed_c10d._world.pg_group_ranks.pop(group, None)


class ForwardingGroup(dist.ProcessGroup):
    """A process group of our own class: what it does not do itself goes over another group of the same ranks.

    Args:
        rank: of this process in it.
        size: number of its ranks.
        group: the other group, if it is there already.
    """

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._group = group


#: What PyTorch asks of a group; the longer names from 2.13 on.
_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "barrier", "gather", "scatter", "reduce", "send", "recv"),
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
    *("all_gather_single", "all_gather_single_coalesced", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
)


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: ForwardingGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._group, name)(*args, **kwargs)

    return method


for _name in _COLLECTIVES:
    if hasattr(dist.ProcessGroup, _name):
        setattr(ForwardingGroup, _name, _forwarded(_name))


ROW = 4 << 20  # bytes of a tensor that go through the memory at a time; each time ranks meet twice
_FREE, _FULL = b"f", b"w"

#: What becomes of a row of each rank; ``out`` may be one of them.
_REDUCE: dict[Any, Callable[..., Any]] = {
    ReduceOp.SUM: lambda rows, out: torch.sum(rows, 0, out=out),
    ReduceOp.AVG: mean_of_rows,
    ReduceOp.MAX: lambda rows, out: torch.amax(rows, 0, out=out),
    ReduceOp.MIN: lambda rows, out: torch.amin(rows, 0, out=out),
}


class SharedGroup(ForwardingGroup):
    """Ranks of one host, as a process group: all-reduces and broadcasts of CPU tensors go through shared memory.

    All-reduces have the same bits on all ranks and in each run. Everything else goes over gloo.

    Collectives run in the thread that asks for them. As always they need the same order on all ranks.

    Args:
        shared: the memory.
        group: of the same ranks, over gloo.
    """

    def __init__(self, shared: SharedBuffers, group: dist.ProcessGroup) -> None:
        super().__init__(shared.links.rank, shared.links.count, group)
        self._shared = shared
        register(self, dist.get_process_group_ranks(group))
        close_at_exit(self)

    def close(self) -> None:
        """Close the connections; idempotent."""
        self._shared.links.close()
        unregister(self)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        """Reduce over all ranks, in place."""
        reduce = _REDUCE.get(opts.reduceOp.op if hasattr(opts.reduceOp, "op") else opts.reduceOp)
        if reduce is None or any(not suits(tensor) for tensor in tensors):
            return super().allreduce(tensors, opts)
        for piece in _pieces(tensors):
            piece.copy_(self._shared.reduced(piece, reduce))
        return _done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        """Give all ranks the tensors of one, in place."""
        if any(not suits(tensor) for tensor in tensors):
            return super().broadcast(tensors, opts)
        links, rows, _ = self._shared
        for piece in _pieces(tensors):
            there = rows[opts.rootRank, : piece.nbytes].view(piece.dtype)
            if links.rank == opts.rootRank:
                there.copy_(piece)
            links.meet(_FULL)
            if links.rank != opts.rootRank:
                piece.copy_(there)
            links.meet(_FREE)
        return _done(tensors)

    def getBackendName(self) -> str:  # noqa: N802
        """For PyTorch's logs."""
        return "lightning_hetero-shared"


def suits(tensor: Tensor) -> bool:
    """Whether a tensor can go through shared memory: on the CPU, and dense."""
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_complex()


def _pieces(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        with as_vector(tensor) as vector:
            yield from vector.split(max(ROW // vector.element_size(), 1))


class _Work(dist.Work):
    """Handle of work for PyTorch, by the future of its result."""

    def __init__(self, future: Future[Any]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: Any = None) -> bool:
        self._future.wait()
        return True

    def get_future(self) -> Future[Any]:
        return self._future


def _done(tensors: list[Tensor]) -> _Work:
    future: Future[Any] = Future()
    future.set_result(tensors)
    return _Work(future)


Within = Literal["auto", "shm", "gloo"]


_POLL = 0.05  # longest pause between two looks at who has asked for a group, seconds

_ended: list[dist.ProcessGroup] = []  # groups that nobody can ask for any more
_on_devices: list[dist.ProcessGroup] = []  # groups that hold memory and threads of devices


class Groups:
    """Hands out the process groups that this rank is a member of.

    A process group holds sockets and threads. So each is made when it is first asked for, by its members only, and a
    group of one rank is never made. How many groups a rank has does not depend on the number of replicas.

    The members of a group wait for each other while it is made. They must all ask for it at the same point of the
    program, and not first in a background thread.

    Args:
        timeout: longest wait for another rank, while a group is made and in its collectives.
        name: the same on every rank, and different for each object of this class.
        nodes: where each rank lives; equal values for ranks of one node.
        within: how ranks of one node exchange long vectors. ``"auto"``: through shared memory where it is possible;
            ``"shm"``: the same, but an error where memory cannot be shared; ``"gloo"``: over sockets.

    Example: the group of a replica's ranks, for the sizes of batches::

        groups = Groups.open(timedelta(minutes=30))
        group = groups.get("batch sizes", (0, 1))
        if group is not None:
            dist.all_reduce(sizes, group=group)
    """

    def __init__(self, timeout: timedelta, name: str, nodes: Sequence[Hashable] = (), within: Within = "gloo") -> None:
        self.timeout, self._name, self._nodes, self._within = timeout, name, nodes, within
        self._said = False  # that memory cannot be shared
        self._groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._shared: dict[tuple[str, tuple[int, ...]], SharedGroup | None] = {}

    @classmethod
    def open(cls, timeout: timedelta, nodes: Sequence[Hashable] = (), within: Within = "gloo") -> "Groups":
        """Begin, without a group yet (collective over all ranks).

        Args:
            timeout: longest wait for another rank.
            nodes: where each rank lives; as for the class, and so is the other one.
            within: how ranks of one node exchange long vectors.
        """
        return cls(timeout, gather(secrets.token_hex(8), "a name for the process groups")[0], nodes, within)

    def get(
        self, purpose: str, ranks: Sequence[int], backend: str = "gloo", alone: bool = False
    ) -> dist.ProcessGroup | None:
        """The process group of some ranks for one purpose (collective over these ranks when called first).

        Args:
            purpose: two users that may send at the same time must give different ones: collectives of one group must
                have the same order on all of its members.
            ranks: the members, this rank among them, in the order in which the group numbers them.
            backend: of its collectives.
            alone: whether to make a group of one rank, too.

        Returns:
            The group, the same at each call. Else ``None`` for one rank, which has nobody to exchange with. Do not pass
            that on to ``torch.distributed``, for which ``None`` means all ranks of the job.

        Raises:
            CommunicationError: another member did not ask for the group in time.
            UnsupportedError: a background thread is the first to ask.
        """
        if len(ranks) == 1 and not alone:
            return None
        key = purpose, tuple(ranks)
        if key not in self._groups:
            if threading.current_thread().name.startswith(THREADS):
                raise UnsupportedError(
                    f"the process group of ranks {list(ranks)} for {purpose!r} was first asked for in a background "
                    "thread, where ranks cannot wait for each other in the same order. Ask for it once before the "
                    "work in the background begins."
                )
            with deadline(f"make the process group of ranks {list(ranks)} for {purpose!r}"):
                group = _new_group(f"{self._name}/{hash_of(repr(key))[:16]}", ranks, self.timeout, backend)
            weakref.finalize(self, _ended.append, group).atexit = False
            self._groups[key] = group
        return self._groups[key]

    def bulk(self, purpose: str, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """A process group as of :meth:`get`, for long vectors on CPUs: in shared memory where the ranks can share it.

        Args:
            purpose: as for :meth:`get`.
            ranks: as for :meth:`get`.

        Raises:
            CommunicationError: another member did not ask for the group in time.
            UnsupportedError: a background thread is the first to ask; or ``within="shm"``, and memory cannot be shared.
        """
        key, group = (purpose, tuple(ranks)), self.get(purpose, ranks)
        if group is None:
            return None
        if key not in self._shared:
            with deadline(f"share memory among ranks {list(ranks)} for {purpose!r}"):
                shared = self._share_memory(group, ranks)
            self._shared[key] = shared
            if shared is not None:
                weakref.finalize(self, shared.close).atexit = False
        return self._shared[key] or group

    def _share_memory(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> SharedGroup | None:
        """The same ranks as a group that shares memory; ``None`` if they cannot, or should not."""
        if self._within == "gloo" or len({self._nodes[rank] for rank in ranks}) > 1 or not os.path.isdir(SHARED):
            return None
        try:
            part = PART if self._within == "auto" else 1.0
            return SharedGroup(share_memory(group, ROW, self.timeout, part), group)
        except OSError as error:
            size = ROW * (len(ranks) + 1)
            if self._within == "shm":
                raise UnsupportedError(
                    f"within='shm', but the memory cannot be shared ({error}). Exchanges of ranks {list(ranks)} need "
                    f"{size} bytes in {SHARED} (docker run --shm-size). Set within='auto', which uses sockets then."
                ) from error
            if not self._said:
                self._said = True
                rank_zero_warn(
                    f"Ranks {list(ranks)} exchange over sockets: the memory cannot be shared ({error}). Shared memory "
                    f"is faster, and needs {round(size / PART)} free bytes in {SHARED} (docker run --shm-size), half "
                    "of which it leaves. within='gloo' silences this warning."
                )
            return None

    def store(self, purpose: str) -> dist.Store:
        """The store of the job, which all ranks can read and write, with keys of its own for a purpose.

        Args:
            purpose: the same on every rank, and different for each user.
        """
        return _store(f"{self._name}/{purpose}")


def _store(name: str) -> dist.Store:
    # Over a connection of its own: a rank that waits in the store, to make a process group, holds the one that it uses.
    return dist.PrefixStore(name, clone_store(default_store()))


def _new_group(name: str, ranks: Sequence[int], timeout: timedelta, backend: str) -> dist.ProcessGroup:
    """Make a group under a name on which its members agree (collective over them).

    All ranks of the job must call ``torch.distributed.new_group``, members or not. With ``use_local_synchronization``
    it asks for members only, but then the name of a group depends on how many groups the process has. That differs
    between ranks, and members would wait for each other under different names. So this calls what ``new_group`` itself
    calls, which takes these arguments in PyTorch 2.4 to 2.13.
    """
    _await_members(name, ranks, timeout)
    own_name: Any = name  # later versions have a type for it
    with record_sockets():
        group, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(dist.get_rank()),
            list(ranks),
            dist.Backend(backend),
            default_store(),
            own_name,
            timeout=timeout,
        )
    distributed_c10d._world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    if backend != "gloo":
        _on_devices.append(group)
        device_exit.holds_devices()
    return group


def _await_members(name: str, ranks: Sequence[int], timeout: timedelta) -> None:
    """Wait until all members ask for a group. PyTorch waits for them, too, but would not notice that one has died."""
    store, began, pause = default_store(), time.monotonic(), 0.001
    keys = {f"{name}/{rank}": rank for rank in ranks}
    store.set(f"{name}/{dist.get_rank()}", "1")
    while not store.check([*keys]):
        missing = [rank for key, rank in keys.items() if not store.check([key])]
        if missing and failures.first_failure(0.0) is not None:
            raise dist.DistNetworkError(f"rank(s) {missing} did not ask for the group")
        if missing and time.monotonic() - began > timeout.total_seconds():
            raise dist.DistNetworkError(f"Timed out: rank(s) {missing} did not ask for the group")
        time.sleep(pause)
        pause = min(2 * pause, _POLL)


def begin_world(store: dist.Store, view: int, rank: int, world: int, timeout: timedelta) -> None:
    """Make the group of all ranks of a view (collective over them).

    PyTorch numbers the groups of a process, those that could not be made too, and members meet under that number. Where
    one more rank is lost, some have tried to make the group of a view and others have not come to it: they would wait
    for each other under different numbers in the next view. So each view counts from 0.

    Args:
        store: of the view.
        view: its number.
        rank: of this process.
        world: number of ranks.
        timeout: longest wait for another rank, now and in collectives.

    Raises:
        DistError: not all have come.
    """
    distributed_c10d._world.group_count = 0
    with record_sockets(of_all=True):
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"view-{view}", store), rank=rank, world_size=world, timeout=timeout
        )


@atexit.register
def end_on_devices() -> None:
    """End NCCL's groups when the process ends: Lightning does so only where all ranks have met over NCCL.

    Not after a failure: that would wait for what is pending in them.
    """
    device_exit.leave_at_exit()
    while _on_devices and device_exit.may_destroy_groups():
        with suppress(ValueError, RuntimeError):  # it has ended since, or its other ranks have
            dist.destroy_process_group(_on_devices.pop())


def end_unused() -> None:
    """End the groups of :class:`Groups` that are gone (collective over all ranks). None is in use where they meet.

    The members of a group of devices end it together: one that ended it alone would wait for the others. So such a
    group ends when it is gone on all of them.
    """
    gc.collect()  # a Trainer and its strategy hold each other
    names = distributed_c10d._world.pg_names
    devices = {names[group]: group for group in _ended if group in _on_devices and group in names}
    everyone = gather(sorted(devices), "process groups that are not used any more")
    for name, group in sorted(devices.items()):
        if (
            all(name in everyone[rank] for rank in dist.get_process_group_ranks(group))
            and device_exit.may_destroy_groups()
        ):
            _on_devices.remove(group)
            _ended.remove(group)
            dist.destroy_process_group(group)
    for group in [group for group in _ended if group not in _on_devices]:
        _ended.remove(group)
        with suppress(ValueError):  # the world has ended since, and this group with it
            dist.destroy_process_group(group)


class LastingGroup(ForwardingGroup):
    """A process group for a device mesh: it stays the same object when its ranks are connected in another way.

    PyTorch keeps a mesh's groups in sharded modules, in their tensors, and in caches. A group itself ends with a job,
    or when a rank of another replica is lost.

    Args:
        name: of the group in this process.
        rank: of this process in it.
        size: number of its ranks.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._own_name: Any = name

    def connect(self, group: dist.ProcessGroup, backend: str) -> None:
        """Let the ranks be connected by a group of the same size from now on."""
        self._group, world = group, distributed_c10d._world
        world.pg_map[self] = (backend, default_store())
        world.pg_group_ranks[self] = dict(world.pg_group_ranks[group])
        world.pg_names[self] = self._own_name
        with suppress(RuntimeError):  # it has been, and the world has not ended since
            distributed_c10d._register_process_group(self._own_name, self)

    @property
    def group_name(self) -> Any:
        """The name by which PyTorch finds it."""
        return self._own_name

    def getBackendName(self) -> str:  # noqa: N802
        """For PyTorch's logs."""
        return "lightning_hetero-mesh"


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
        self._worker = Worker("mixed-group")
        register(self, ranks)

    def close(self) -> None:
        """End the thread, once it has done what it was given."""
        self._worker.close()
        unregister(self)

    # -- as PyTorch calls it ---------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        """Reduce over all ranks, in place: first among devices of one kind, then among hosts."""
        if averages := opts.reduceOp == ReduceOp.AVG:  # a mean of means would count ranks of large islands less
            opts = dist.AllreduceOptions()
            opts.reduceOp = ReduceOp.SUM

        def reduce(tensor: Tensor, stage: HostStage) -> None:
            if tensor.is_sparse:  # which NCCL does not know
                stage.through(tensor, lambda whole: self._all.allreduce([whole], opts).wait())
            else:
                reduce_dense(tensor, stage)
            if averages:
                tensor.detach().div_(self.size())

        def reduce_dense(tensor: Tensor, stage: HostStage) -> None:
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

        self._worker.call(work)
        return _Work(done.then(value_or_error))
