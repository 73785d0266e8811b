"""Lets ranks of one host share memory, without leaving anything behind when one of them is killed."""

import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.local_links import LocalLinks
from lightning_hetero.comm.mapped import Mapped

T = TypeVar("T")
SHARED = "/dev/shm"
ALIGNED = 64  # bytes; rows begin at a cache line
PART = 0.5  # of the memory that is free for sharing: the most that is taken unasked
_CONNECTED = 60.0  # seconds in which all others must have connected, unless the user's limit is shorter


class Shared(NamedTuple):
    """Memory that the ranks of a group share.

    Attributes:
        links: to the other ranks.
        rows: of bytes, one for each rank.
        result: one more row.
    """

    links: LocalLinks
    rows: Tensor
    result: Tensor


def share_memory(group: dist.ProcessGroup, size: int, limit: timedelta, part: float = 1.0) -> Shared:
    """Share memory among ranks (collective over the group).

    The memory and the sockets lose their names before this returns, so that the kernel removes them with the processes.

    Args:
        group: ranks of one host.
        size: bytes of a row.
        limit: longest wait for another rank.
        part: of the memory that is free for sharing, the most to take.

    Raises:
        OSError: on every rank: one of them cannot take part, or there is not enough memory.
        CommunicationError: another rank did not take part in time.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    row = -(-size // ALIGNED) * ALIGNED
    like = [torch.empty(rows * row, dtype=torch.uint8, device="meta") for rows in (ranks, 1)]
    links: dict[int, socket.socket] = {}
    try:
        _meet(rank, ranks, links, group, min(_CONNECTED, limit.total_seconds()))
        made = _on_all(lambda: _made(like, part) if rank == 0 else None, group)
        path = gather(made and made.path, "the shared memory", group)[0]
        try:
            memory = _on_all(lambda: made or Mapped(like, path), group)
        finally:
            if rank == 0:
                Path(path).unlink()
    except BaseException:
        for link in links.values():
            link.close()
        raise
    values, result = memory.vectors
    members = dist.get_process_group_ranks(group)
    sockets = {members[number]: link for number, link in links.items()}
    return Shared(LocalLinks(sockets, rank, limit), values.view(ranks, row), result)


def slice_of(length: int, rank: int, ranks: int, step: int) -> slice:
    """What a rank reduces: slices of nearly equal length that begin at multiples of a step."""
    steps = -(-length // step)
    return slice(min(rank * steps // ranks * step, length), min((rank + 1) * steps // ranks * step, length))


def _made(like: Sequence[torch.Tensor], part: float) -> Mapped:
    needed, free = sum(vector.nbytes for vector in like), shutil.disk_usage(SHARED).free
    if needed > part * free:
        raise OSError(f"{needed} bytes are more than {part:.0%} of the {free} that are free in {SHARED}")
    return Mapped(like)


def _meet(rank: int, ranks: int, links: dict[int, socket.socket], group: dist.ProcessGroup, seconds: float) -> None:
    """Connect to each other rank of a group (collective)."""
    folder = tempfile.mkdtemp(prefix="lightning-hetero-")  # which only this user can enter
    try:
        with socket.socket(socket.AF_UNIX) as listener:

            def listen() -> None:
                listener.bind(f"{folder}/{rank}")
                listener.listen(ranks)

            _on_all(listen, group)
            names = gather(f"{folder}/{rank}", "local sockets", group)
            _on_all(lambda: _connect(rank, names, listener, links, seconds), group)
    finally:
        shutil.rmtree(folder)


def _connect(
    rank: int, names: Sequence[str], listener: socket.socket, links: dict[int, socket.socket], seconds: float
) -> None:
    """Connect to the ranks before this one, and wait for those after it."""
    until = time.monotonic() + seconds
    for other in range(rank):
        links[other] = socket.socket(socket.AF_UNIX)
        links[other].settimeout(max(until - time.monotonic(), 0.001))
        links[other].connect(names[other])
        links[other].sendall(rank.to_bytes(4, "big"))
    for _ in range(rank + 1, len(names)):
        listener.settimeout(max(until - time.monotonic(), 0.001))
        link, _ = listener.accept()
        link.settimeout(max(until - time.monotonic(), 0.001))
        links[int.from_bytes(link.recv(4, socket.MSG_WAITALL), "big")] = link


def _on_all(action: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Do something on every rank (collective).

    Raises:
        OSError: on every rank, if it fails on one.
    """
    value, problem = None, None
    try:
        value = action()
    except (OSError, ValueError) as error:
        problem = str(error) or type(error).__name__
    for rank, other in enumerate(gather(problem, "shared memory", group)):
        if other is not None:
            raise OSError(f"rank {dist.get_process_group_ranks(group)[rank]}: {other}")
    return value  # type: ignore[return-value]
