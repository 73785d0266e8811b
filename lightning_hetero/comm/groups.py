"""Process groups that are made when they are first asked for, and end with the object that hands them out."""

import gc
import secrets
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_hetero.comm.agreement import gather, hash_of
from lightning_hetero.comm.deadline import deadline
from lightning_hetero.comm.leaving import THREADS, noting_sockets
from lightning_hetero.errors import UnsupportedError

_ended: list[dist.ProcessGroup] = []  # groups that nobody can ask for any more


class Groups:
    """Hands out the process groups that this rank is a member of.

    A process group holds sockets and threads. So each is made when it is first asked for, by its members only, and a
    group of one rank is never made. How many groups a rank has does not depend on the number of replicas.

    The members of a group wait for each other while it is made. They must all ask for it at the same point of the
    program, and not first in a background thread.

    Args:
        timeout: longest wait for another rank, while a group is made and in its collectives.
        name: the same on every rank, and different for each object of this class.

    Example: the group of a replica's ranks, for the sizes of batches::

        groups = Groups.open(timedelta(minutes=30))
        group = groups.get("batch sizes", (0, 1))
        if group is not None:
            dist.all_reduce(sizes, group=group)
    """

    def __init__(self, timeout: timedelta, name: str) -> None:
        self.timeout, self._name = timeout, name
        self._groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}

    @classmethod
    def open(cls, timeout: timedelta) -> "Groups":
        """Begin, without a group yet (collective over all ranks).

        Args:
            timeout: longest wait for another rank.
        """
        return cls(timeout, gather(secrets.token_hex(8), "a name for the process groups")[0])

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

    def store(self, purpose: str) -> dist.Store:
        """The store of the job, which all ranks can read and write, with keys of its own for a purpose.

        Args:
            purpose: the same on every rank, and different for each user.
        """
        return _store(f"{self._name}/{purpose}")


def _store(name: str) -> dist.Store:
    # Over a connection of its own: a rank that waits in the store, to make a process group, holds the one that it uses.
    store = default_store()
    with noting_sockets(of_all=True):
        return dist.PrefixStore(name, store.clone() if hasattr(store, "clone") else store)  # PyTorch 2.4 cannot


def default_store() -> dist.Store:
    """The store with which all ranks have met; on the rank that hosts it, it ends with this object."""
    return distributed_c10d._get_default_store()


def _new_group(name: str, ranks: Sequence[int], timeout: timedelta, backend: str) -> dist.ProcessGroup:
    """Make a group under a name on which its members agree (collective over them).

    All ranks of the job must call ``torch.distributed.new_group``, members or not. With ``use_local_synchronization``
    it asks for members only, but then the name of a group depends on how many groups the process has. That differs
    between ranks, and members would wait for each other under different names. So this calls what ``new_group`` itself
    calls, which takes these arguments in PyTorch 2.4 to 2.13.
    """
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
    return group


def end_unused() -> None:
    """End the groups of :class:`Groups` that are gone. Call it where all ranks have just met: none is in use then."""
    gc.collect()  # a Trainer and its strategy hold each other
    while _ended:
        with suppress(ValueError):  # the world has ended since, and this group with it
            dist.destroy_process_group(_ended.pop())
