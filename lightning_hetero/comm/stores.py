"""Connections to key-value stores. PyTorch tries for as long as its limit, also where the store's host is gone."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from lightning_hetero.comm.threads import abort_count, record_sockets

T = TypeVar("T")
_TRY = timedelta(seconds=2)


class StoreUser(Protocol):
    """Something that works through the job's store, also when the ranks of the job change."""

    def move(self, store: dist.Store) -> None:
        """Go on among other ranks (collective over them).

        Args:
            store: of these ranks, with keys of its own.
        """


def connect_with_retries(connect: Callable[[timedelta], T], limit: timedelta) -> T:
    """Connect, in short tries; give up once :func:`~lightning_hetero.comm.threads.abort_sockets` is called.

    Args:
        connect: makes it, within a time.
        limit: of all tries together.

    Raises:
        DistError: there is no connection.
    """
    before, until = abort_count(), time.monotonic() + limit.total_seconds()
    while True:
        try:
            with record_sockets(of_all=True):
                return connect(min(limit, _TRY))
        except dist.DistError:
            if abort_count() != before or time.monotonic() > until:
                raise


def store_at(address: Sequence[Any], timeout: timedelta) -> dist.Store:
    """Connect to a store.

    Args:
        address: host and port.
        timeout: longest wait for it, and later for its answers.

    Raises:
        DistError: there is no connection.
    """
    host, port = address

    def connect(limit: timedelta) -> dist.Store:
        return dist.TCPStore(str(host), int(port), is_master=False, wait_for_workers=False, timeout=limit)

    store = connect_with_retries(connect, timeout)
    store.set_timeout(timeout)
    return store


def clone_store(store: dist.Store) -> dist.Store:
    """A connection of its own to the same store, for another thread; called on the thread that uses the first one.

    Raises:
        DistError: there is no connection.
    """
    if not hasattr(store, "clone"):  # PyTorch 2.4
        return store
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]

    def connect(limit: timedelta) -> dist.Store:
        store.set_timeout(limit)  # which its copies take over
        try:
            return store.clone()
        finally:
            store.set_timeout(timeout)

    copy = connect_with_retries(connect, timeout)
    copy.set_timeout(timeout)
    return copy
