"""Process groups that are made when they are first asked for, and end with the object that hands them out."""

import atexit
import gc
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_hetero.comm import device_exit, failures
from lightning_hetero.comm.agreement import gather, hash_of
from lightning_hetero.comm.deadline import deadline
from lightning_hetero.comm.leaving import THREADS, noting_sockets
from lightning_hetero.comm.own_group import default_store
from lightning_hetero.comm.shared_group import SharedGroup
from lightning_hetero.comm.sharing import Sharing
from lightning_hetero.comm.stores import copy_of
from lightning_hetero.errors import UnsupportedError

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
        sharing: says which ranks exchange long vectors through shared memory. Default: none.

    Example: the group of a replica's ranks, for the sizes of batches::

        groups = Groups.open(timedelta(minutes=30))
        group = groups.get("batch sizes", (0, 1))
        if group is not None:
            dist.all_reduce(sizes, group=group)
    """

    def __init__(self, timeout: timedelta, name: str, sharing: Sharing | None = None) -> None:
        self.timeout, self._name, self._sharing = timeout, name, sharing
        self._groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._shared: dict[tuple[str, tuple[int, ...]], SharedGroup | None] = {}

    @classmethod
    def open(cls, timeout: timedelta, sharing: Sharing | None = None) -> "Groups":
        """Begin, without a group yet (collective over all ranks).

        Args:
            timeout: longest wait for another rank.
            sharing: says which ranks exchange long vectors through shared memory. Default: none.
        """
        return cls(timeout, gather(secrets.token_hex(8), "a name for the process groups")[0], sharing)

    def get(self, purpose: str, ranks: Sequence[int], backend: str = "gloo") -> dist.ProcessGroup | None:
        """The process group of some ranks for one purpose (collective over these ranks when called first).

        Args:
            purpose: two users that may send at the same time must give different ones: collectives of one group must
                have the same order on all of its members.
            ranks: the members, this rank among them, in the order in which the group numbers them.
            backend: of its collectives.

        Returns:
            The group, the same at each call. ``None`` for one rank, which has nobody to exchange with. Do not pass that
            on to ``torch.distributed``, for which ``None`` means all ranks of the job.

        Raises:
            CommunicationError: another member did not ask for the group in time.
            UnsupportedError: a background thread is the first to ask.
        """
        if len(ranks) == 1:
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
        if group is None or self._sharing is None:
            return group
        if key not in self._shared:
            with deadline(f"share memory among ranks {list(ranks)} for {purpose!r}"):
                shared = self._sharing.group(group, ranks)
            self._shared[key] = shared
            if shared is not None:
                weakref.finalize(self, shared.close).atexit = False
        return self._shared[key] or group

    def store(self, purpose: str) -> dist.Store:
        """The store of the job, which all ranks can read and write, with keys of its own for a purpose.

        Args:
            purpose: the same on every rank, and different for each user.
        """
        return _store(f"{self._name}/{purpose}")


def _store(name: str) -> dist.Store:
    # Over a connection of its own: a rank that waits in the store, to make a process group, holds the one that it uses.
    return dist.PrefixStore(name, copy_of(default_store()))


def _new_group(name: str, ranks: Sequence[int], timeout: timedelta, backend: str) -> dist.ProcessGroup:
    """Make a group under a name on which its members agree (collective over them).

    All ranks of the job must call ``torch.distributed.new_group``, members or not. With ``use_local_synchronization``
    it asks for members only, but then the name of a group depends on how many groups the process has. That differs
    between ranks, and members would wait for each other under different names. So this calls what ``new_group`` itself
    calls, which takes these arguments in PyTorch 2.4 to 2.13.
    """
    _await_members(name, ranks, timeout)
    own_name: Any = name  # later versions have a type for it
    with noting_sockets():
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
    """Wait until all members ask for a group. PyTorch waits for them, too, but would not notice that one has died.

    Raises:
        DistNetworkError: one has not asked in time, or a rank has failed.
    """
    store, began, pause = default_store(), time.monotonic(), 0.001
    keys = {f"{name}/{rank}": rank for rank in ranks}
    store.set(f"{name}/{dist.get_rank()}", "1")
    while not store.check([*keys]):
        missing = [rank for key, rank in keys.items() if not store.check([key])]
        if missing and failures.first(0.0) is not None:
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
    with noting_sockets(of_all=True):
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"view-{view}", store), rank=rank, world_size=world, timeout=timeout
        )


@atexit.register
def end_on_devices() -> None:
    """End NCCL's groups when the process ends: Lightning does so only where all ranks have met over NCCL.

    Not after a failure: that would wait for what is pending in them.
    """
    device_exit.leave_at_exit()
    while _on_devices and device_exit.may_destroy():
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
        if all(name in everyone[rank] for rank in dist.get_process_group_ranks(group)) and device_exit.may_destroy():
            _on_devices.remove(group)
            _ended.remove(group)
            dist.destroy_process_group(group)
    for group in [group for group in _ended if group not in _on_devices]:
        _ended.remove(group)
        with suppress(ValueError):  # the world has ended since, and this group with it
            dist.destroy_process_group(group)
