"""Finds out which rank failed first, also when other ranks have already ended."""

import os
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from lightning_hetero.comm import device_exit, objects
from lightning_hetero.comm.failure_watch import Failure, Failures, Kind
from lightning_hetero.comm.leaving import cut

_failures: Failures | None = None
_world: object = None  # the process group of all ranks for which it was made

_SOON = (
    3.0  # seconds in which who waits for a rank that has failed gets an error by itself, if that rank's process ends
)
_wakes = True
_numbers: Sequence[int] = ()  # by which users know the ranks; their own, if empty
_since: dict[int, float] = {}  # when a thread began to wait for other ranks


def _after_fork() -> None:
    if _failures is not None:
        _failures.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def watch(interface: str, seconds: float, numbers: Sequence[int] = ()) -> None:
    """Begin to watch all ranks, or begin a new run of them (collective over all ranks the first time).

    Args:
        interface: address of this machine on the network of the job.
        seconds: longest wait for rank 0.
        numbers: that the ranks had at first, if others were lost since: messages name them so.
    """
    global _failures, _world, _numbers
    if _world is not dist.group.WORLD:
        if _failures is not None:
            _failures.close()
        _failures, _world, _numbers = None, dist.group.WORLD, tuple(numbers)
        if dist.get_world_size() > 1:
            _failures = _connected(interface, seconds)
    if _failures is not None:
        _failures.run += 1


def forget() -> None:
    """Watch nobody any more: this process does not belong to those ranks now. Local, idempotent."""
    global _failures, _world, _numbers
    if _failures is not None:
        _failures.close()
    _failures, _world, _numbers = None, None, ()


def watched() -> bool:
    """Whether the ranks of the present process group are watched."""
    return dist.is_initialized() and _world is dist.group.WORLD


def _connected(interface: str, seconds: float) -> Failures:
    """A connection between rank 0 and every other rank (collective over all ranks)."""
    failures = Failures(dist.get_rank(), dist.get_world_size(), interface, told=_failed)
    where = objects.unpacked(objects.broadcast(objects.packed(failures.where if failures.rank == 0 else None), 0))
    if failures.rank == 0:
        failures.listen()
    elif where is not None:
        try:
            failures.connect(where, seconds)
        except OSError as error:
            warnings.warn(
                f"rank {failures.rank} cannot reach rank 0 at {where[0]}: {error}. Errors will not be able to "
                "name a rank that has ended.",
                stacklevel=3,
            )
    return failures


def announce(kind: Kind, how: str) -> None:
    """Let all ranks know what has happened to this one, before it ends.

    Args:
        kind: of failure.
        how: completes "rank 2 ...".
    """
    if _failures is not None:
        _failures.announce(kind, how)


def first(seconds: float) -> Failure | None:
    """The failure of another rank that came first; ``None``: none is known.

    Args:
        seconds: longest wait for one.
    """
    failure = None if _failures is None else _failures.first(seconds)
    return None if failure is None else failure._replace(rank=number(failure.rank))


def number(rank: int) -> int:
    """The number by which users know a rank: the one that it had at first."""
    return _numbers[rank] if _numbers else rank


def this_rank() -> str:
    """This rank in words, by the number that it had at first."""
    me, world = number(dist.get_rank()), dist.get_world_size()
    return f"rank {me} (one of the {world} that remain)" if _numbers else f"rank {me} of {world}"


# -- who waits for a rank that has failed --------------------------------------------------------------


@contextmanager
def waiting() -> Iterator[None]:
    """In this block the thread waits for other ranks."""
    me = threading.get_ident()
    outermost = _since.setdefault(me, now := time.monotonic()) is now
    try:
        yield
    finally:
        if outermost:
            _since.pop(me, None)


def wake_up(on: bool) -> None:
    """Whether those who wait get an error when a rank has failed and its process lives on; not where ranks are lost."""
    global _wakes
    _wakes = on


def _failed(failure: Failure) -> None:
    """A rank has failed. Its process may live on, so that connections to it do not break."""
    device_exit.another_failed(lambda: first(0.0))
    if failure.kind != "failed":
        return
    heard = time.monotonic()

    def wake() -> None:
        time.sleep(_SOON)
        while _wakes and first(0.0) is not None:  # until a new run begins
            if any(time.monotonic() - max(since, heard) >= _SOON for since in list(_since.values())):
                cut()
                return
            time.sleep(0.2)

    threading.Thread(target=wake, name="failure-news", daemon=True).start()
