"""Connections between ranks of one host, by which they tell each other how far they are."""

import contextlib
import os
import socket
import time
import weakref
from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch.distributed as dist

from lightning_hetero.comm.leaving import cut_too


class LocalLinks:
    """A connected local socket to each other rank of a group.

    Ranks that share memory meet over these: nobody spins, and the end of a process is noticed at once.

    Args:
        sockets: by the ranks to which they lead.
        rank: number of this process in the group.
        limit: longest wait for another rank.
    """

    def __init__(self, sockets: dict[int, socket.socket], rank: int, limit: timedelta) -> None:
        self._sockets, self.rank, self.count = sockets, rank, len(sockets) + 1
        self._limit = limit.total_seconds()
        for link in sockets.values():
            link.settimeout(self._limit)
            cut_too(link)
        self._end = weakref.finalize(self, _end, list(sockets.values()))
        self._end.atexit = False
        _all.add(self)

    def meet(self, sign: bytes) -> None:
        """Wait until all ranks have come to the same point. It orders their reads and writes of shared memory.

        Args:
            sign: a byte that names the point.

        Raises:
            DistNetworkError: a rank has ended, is at another point, or was silent for too long.
        """
        until = time.monotonic() + self._limit
        for rank, link in self._sockets.items():
            with _of(rank, self._limit):
                link.sendall(sign)
        for rank, link in self._sockets.items():
            with _of(rank, self._limit):
                link.settimeout(max(until - time.monotonic(), 0.001))
                if (got := link.recv(1)) != sign:
                    raise ConnectionResetError if not got else ConnectionAbortedError("it is at another point")

    def close(self) -> None:
        """Close the connections; idempotent."""
        self._end()

    def after_fork(self) -> None:
        """Leave the connections to the parent, or nobody would notice its end."""
        for link in self._sockets.values():
            link.close()


_all: weakref.WeakSet[LocalLinks] = weakref.WeakSet()


def _after_fork() -> None:
    for links in _all:
        links.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _end(sockets: Iterable[socket.socket]) -> None:
    for link in sockets:
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
        link.close()


@contextlib.contextmanager
def _of(rank: int, limit: float) -> Iterator[None]:
    """Say which rank an error is about. By its class and its words it is known for one of communication.

    Where a collective raises it, the class tells; of what a hook raises, DDP keeps the words only.
    """
    who = f"rank {rank}"
    try:
        yield
    except TimeoutError as error:
        text = f"Connection closed: {who} was silent for {limit:g} s (the strategy's `timeout`)"
        raise dist.DistNetworkError(text) from error
    except OSError as error:
        raise dist.DistNetworkError(f"Connection closed by {who}: {str(error) or 'it has ended'}") from error
