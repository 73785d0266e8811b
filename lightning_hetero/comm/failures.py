"""Finds out which rank failed first, also when other ranks have already ended."""

import os
import warnings

import torch.distributed as dist

from lightning_hetero.comm import objects
from lightning_hetero.comm.failure_watch import Failure, Failures, Kind

_failures: Failures | None = None
_world: object = None  # the process group of all ranks for which it was made


def _after_fork() -> None:
    if _failures is not None:
        _failures.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def watch(interface: str, seconds: float) -> None:
    """Begin to watch all ranks, or begin a new run of them (collective over all ranks the first time).

    Args:
        interface: address of this machine on the network of the job.
        seconds: longest wait for rank 0.
    """
    global _failures, _world
    if _world is not dist.group.WORLD:
        if _failures is not None:
            _failures.close()
        _failures, _world = None, dist.group.WORLD
        if dist.get_world_size() > 1:
            _failures = _connected(interface, seconds)
    if _failures is not None:
        _failures.run += 1


def watched() -> bool:
    """Whether the ranks of the present process group are watched."""
    return dist.is_initialized() and _world is dist.group.WORLD


def _connected(interface: str, seconds: float) -> Failures:
    """A connection between rank 0 and every other rank (collective over all ranks)."""
    failures = Failures(dist.get_rank(), dist.get_world_size(), interface)
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
    return None if _failures is None else _failures.first(seconds)
