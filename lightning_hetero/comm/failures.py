"""Finds out which rank failed first, also when other ranks have already ended."""

import os
import threading
import time
import warnings
from collections.abc import Sequence

import torch.distributed as dist

from lightning_hetero.comm import device_exit, objects, waits
from lightning_hetero.comm.failure_watch import Failure, Failures, Kind
from lightning_hetero.comm.leaving import cut
from lightning_hetero.comm.wait_watch import WaitWatch

_failures: Failures | None = None
_waits: WaitWatch | None = None
_world: object = None  # the process group of all ranks for which it was made

_SOON = (
    3.0  # seconds in which who waits for a rank that has failed gets an error by itself, if that rank's process ends
)
_wakes = True
_numbers: Sequence[int] = ()  # by which users know the ranks; their own, if empty


def _after_fork() -> None:
    if _failures is not None:
        _failures.after_fork()
    if _waits is not None:
        _waits.leave_signals()


os.register_at_fork(after_in_child=_after_fork)


def watch(interface: str, seconds: float, numbers: Sequence[int] = ()) -> None:
    """Begin to watch all ranks, or begin a new run of them (collective over all ranks the first time).

    Args:
        interface: address of this machine on the network of the job.
        seconds: longest wait for rank 0.
        numbers: that the ranks had at first, if others were lost since: messages name them so.
    """
    global _failures, _waits, _world, _numbers
    if _world is not dist.group.WORLD:
        forget()
        _world, _numbers = dist.group.WORLD, tuple(numbers)
        if dist.get_world_size() > 1:
            _waits = WaitWatch(dist.get_rank(), dist.get_world_size(), number, seconds)
            _failures = _connected(interface, seconds, _waits)
            _waits.begin(_failures.tell)
    if _failures is not None:
        _failures.run += 1
    if _waits is not None:
        _waits.stopped = ""


def forget() -> None:
    """Watch nobody any more: this process does not belong to those ranks now. Local, idempotent."""
    global _failures, _waits, _world, _numbers
    for one in (_failures, _waits):
        if one is not None:
            one.close()
    _failures, _waits, _world, _numbers = None, None, None, ()


def waiting() -> set[int]:
    """The other ranks that wait for others now, by their own word; empty if ranks are not watched."""
    return set() if _waits is None else _waits.waiting()


def watched() -> bool:
    """Whether the ranks of the present process group are watched."""
    return dist.is_initialized() and _world is dist.group.WORLD


def _connected(interface: str, seconds: float, waiting: WaitWatch) -> Failures:
    """A connection between rank 0 and every other rank (collective over all ranks)."""
    failures = Failures(dist.get_rank(), dist.get_world_size(), interface, told=_failed, heard=waiting.heard)
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


def places(since: float | None = None) -> str:
    """Where the ranks are while one waits for long, as the last notice has said.

    Args:
        since: from when on a notice counts, by ``time.monotonic()``. Default: it is no older than they come.
    """
    return "" if _waits is None else _waits.places(since)


def stopped() -> str:
    """Which signal has ended a wait of this process in this run, in a sentence; empty: none has."""
    return "" if _waits is None else _waits.stopped


def number(rank: int) -> int:
    """The number by which users know a rank: the one that it had at first."""
    return _numbers[rank] if _numbers else rank


def this_rank() -> str:
    """This rank in words, by the number that it had at first."""
    me, world = number(dist.get_rank()), dist.get_world_size()
    return f"rank {me} (one of the {world} that remain)" if _numbers else f"rank {me} of {world}"


# -- who waits for a rank that has failed --------------------------------------------------------------


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
            if any(time.monotonic() - max(since, heard) >= _SOON for since in waits.since()):
                cut()
                return
            time.sleep(0.2)

    threading.Thread(target=wake, name="failure-news", daemon=True).start()
