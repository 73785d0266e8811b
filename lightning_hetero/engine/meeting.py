"""How a process meets the others of its job, where the launcher says."""

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from lightning_hetero.comm import failures
from lightning_hetero.comm.address import interface_towards
from lightning_hetero.comm.background import Background
from lightning_hetero.comm.deadline import deadline
from lightning_hetero.comm.own_group import default_store
from lightning_hetero.errors import CommunicationError

_LOOK = 0.5  # seconds from one look at the other processes to the next, while they join
_LONG = 15.0  # seconds after which a process says that it waits


class Address(NamedTuple):
    """Where ranks meet, as the launcher says.

    Attributes:
        host: of rank 0.
        port: at which rank 0 listens.
        rank: this process.
        world: number of ranks.
    """

    host: str
    port: int
    rank: int
    world: int


def meet(
    connect: Callable[[], None],
    address: Address,
    timeout: timedelta,
    ended: Callable[[], str | None] = lambda: None,
    hint: str = "",
    began: float | None = None,
) -> None:
    """Join the world's process group, and listen for other ranks' failures (collective).

    Args:
        connect: makes the process group. On a thread, since PyTorch waits without a limit for a program that accepts
            the connection and then says nothing.
        address: where ranks meet.
        timeout: longest wait for the others.
        ended: says which other process has ended before it could join, if it is known that one has.
        hint: what else to say where this process waits for long.
        began: when this process began to wait for its job, by ``time.monotonic()``. Default: now.

    Raises:
        CommunicationError: not all ranks have come in time, or another job's have.
    """
    seconds, made = timeout.total_seconds(), dist.is_initialized()
    with deadline("join the job"):
        try:
            began = time.monotonic() if began is None else began
            _await(Background(connect), began, seconds, ended, lambda: _say_that_it_waits(address, seconds, hint))
        except _EndedError as error:
            raise CommunicationError(
                f"rank {address.rank} of {address.world} could not join the job: {error} before it had joined, so that "
                "not all can come. Its own error, if it had one, is above."
            ) from None
        except RuntimeError as error:
            if "EADDRINUSE" not in str(error):
                if address.rank == 0:
                    raise
                raise CommunicationError(
                    f"rank {address.rank} of {address.world} could not join the job at {address.host}:{address.port}: "
                    "who holds that port is not this job's rank 0, or has ended. Look for an error of rank 0. If "
                    "another job of this machine holds the port, set MASTER_PORT to a free one, the same for all ranks."
                ) from error
            raise CommunicationError(
                f"rank {address.rank} of {address.world} could not join the job: another program of this machine, or "
                f"another job, holds port {address.port}. Set MASTER_PORT to a free one, the same for all ranks."
            ) from error
        except TimeoutError as error:
            if address.rank == 0:
                why = (
                    f"not all of the others have come to {address.host}:{address.port}. Look for an error of theirs, "
                    "and check that they can reach this address. If this process was started again, the job seems to "
                    "have ended: start all of its processes again."
                )
            elif not _listened_to(address):
                why = (
                    f"nobody listens at {address.host}:{address.port}. The job seems to have ended, or its rank 0 was "
                    "not started, or has failed: look for an error of rank 0, and start all processes of the job again."
                )
            else:
                why = (
                    f"rank 0 did not let it in at {address.host}:{address.port}. Look for an error of rank 0. If "
                    "there is none, another job, or another program, may hold that port: set MASTER_PORT to a free "
                    "one, the same for all ranks."
                )
            raise CommunicationError(
                f"rank {address.rank} of {address.world} could not join the job within {seconds:g} s (the "
                f"strategy's `timeout`): {why}"
            ) from error
    if not made:
        _take_place(address)
    with deadline("learn where failures are told"):
        failures.watch(interface_towards(address.host), seconds)


def _take_place(address: Address) -> None:
    """Enter this process as its rank. A store lets in whoever comes, also ranks of a second job at the same port."""
    mine = f"process {os.getpid()} of {socket.gethostname()}"
    with deadline("take its place in the job"):
        theirs = default_store().compare_set(f"rank {address.rank} is", "", mine).decode()
    if theirs != mine:
        raise CommunicationError(
            f"rank {address.rank} of {address.world} could not join the job at {address.host}:{address.port}: rank "
            f"{address.rank} there is {theirs}, and this is {mine}. So another job holds that port. Set MASTER_PORT to "
            "a free one, the same for all ranks."
        )


def _listened_to(address: Address) -> bool:
    """Whether there is a program at an address."""
    try:
        socket.create_connection((address.host, address.port), _LOOK).close()
    except TimeoutError:
        return True  # it may be
    except OSError:
        return False
    return True


class _EndedError(Exception):
    """A process has ended before it could join."""


def _say_that_it_waits(address: Address, seconds: float, hint: str) -> None:
    who = "rank 0" if address.rank else "the other ranks"
    print(
        f"lightning_hetero: rank {address.rank} of {address.world} has waited for {_LONG:g} s to meet {who} at "
        f"{address.host}:{address.port}, and waits for up to {seconds:g} s (the strategy's `timeout`). {hint}".rstrip(),
        flush=True,
    )


def _await(
    joining: Background[None],
    began: float,
    seconds: float,
    ended: Callable[[], str | None],
    waits: Callable[[], None],
) -> None:
    told, until = time.monotonic() - began > _LONG, began + seconds
    while (left := until - time.monotonic()) > _LOOK:
        if not told and time.monotonic() - began > _LONG:
            told = True
            waits()
        try:
            return joining.result(_LOOK)
        except TimeoutError:
            if joining.running and (which := ended()) is not None:
                raise _EndedError(which) from None
            if not joining.running and isinstance(joining.error, TimeoutError):
                raise
    return joining.result(max(left, 0.0))
