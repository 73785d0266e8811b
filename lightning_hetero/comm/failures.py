"""Watch over the ranks of a job: which one failed first, where each waits, and what that makes of errors here."""

import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from lightning_hetero.comm import device_exit, object_collectives, waits
from lightning_hetero.comm.failure_reports import Failure, Kind
from lightning_hetero.comm.membership import Membership
from lightning_hetero.comm.threads import abort_sockets
from lightning_hetero.comm.waits import WaitWatchdog
from lightning_hetero.errors import CommunicationError

_membership: Membership | None = None  # of the ranks that are watched
_waits: WaitWatchdog | None = None
_world: object = None  # the process group of all ranks for which these were made
_numbers: Sequence[int] = ()  # by which users know the ranks; their own, if empty

_SOON = 3.0  # seconds in which who waits for a rank that has failed gets an error by itself, if its process ends


def _after_fork() -> None:
    if _waits is not None:
        _waits.leave_signals()


os.register_at_fork(after_in_child=_after_fork)


def watch_ranks(interface: str, seconds: float) -> None:
    """Begin to watch all ranks, or begin a new run of them (collective over all ranks the first time).

    Args:
        interface: address of this machine on the network of the job.
        seconds: longest wait for rank 0.
    """
    global _membership, _waits, _world
    if _world is not dist.group.WORLD:
        stop_watching()
        _world = dist.group.WORLD
        if (world := dist.get_world_size()) > 1:
            _waits = WaitWatchdog(dist.get_rank(), range(world), seconds)
            _membership = _connected(interface, seconds, _waits)
            _waits.begin(_membership.tell)
    if _membership is not None and _waits is not None:
        _membership.begin_run()
        _waits.stopped = ""


def continue_to_watch(numbers: Sequence[int]) -> None:
    """Go on with the ranks that remain: they have a process group of their own now.

    Args:
        numbers: that they had at first; messages name them so.
    """
    global _world, _numbers
    _world, _numbers = dist.group.WORLD, tuple(numbers)
    if _waits is not None:
        _waits.ranks = _numbers


def stop_watching() -> None:
    """Watch nobody any more: this process does not belong to those ranks now. Local, idempotent.

    A membership whose members go on without lost ones is to be closed by who has asked for that.
    """
    global _membership, _waits, _world, _numbers
    if _waits is not None:
        _waits.close()
    if _membership is not None and not _membership.survives:
        _membership.close()
    _membership, _waits, _world, _numbers = None, None, None, ()


def membership() -> Membership | None:
    """The membership of the ranks that are watched; ``None``: none are, or there is one rank."""
    return _membership


def waiting() -> set[int]:
    """The other ranks that wait for others now, by their own word; empty if ranks are not watched."""
    numbers = set() if _waits is None else _waits.waiting()
    return {rank for rank in range(dist.get_world_size()) if number(rank) in numbers}


def watched() -> bool:
    """Whether the ranks of the present process group are watched."""
    return dist.is_initialized() and _world is dist.group.WORLD


def _connected(interface: str, seconds: float, waiting: WaitWatchdog) -> Membership:
    """The membership of all ranks (collective over them)."""
    me = dist.get_rank()
    token = object_collectives.broadcast(object_collectives.pack_value(secrets.token_hex(16)), 0)
    membership = Membership(me, interface, object_collectives.unpack_value(token), _failed, waiting.heard)
    addresses = dict(enumerate(object_collectives.all_gather(membership.address)))
    if not membership.begin(addresses, seconds):
        warnings.warn(
            f"rank {me} cannot reach rank 0 at {addresses[0]} within {seconds:g} s. Errors will not be able to name a "
            "rank that has ended.",
            stacklevel=3,
        )
    return membership


def announce(kind: Kind, how: str) -> None:
    """Let all ranks know what has happened to this one, before it ends.

    Args:
        kind: of failure.
        how: completes "rank 2 ...".
    """
    if _membership is not None:
        _membership.announce(kind, how)


def first_failure(seconds: float) -> Failure | None:
    """The failure of another rank that came first; ``None``: none is known.

    Args:
        seconds: longest wait for one.
    """
    if _membership is None:
        return None
    reports = _membership.reports
    _membership.wait(lambda: reports.first() is not None, seconds)
    return reports.first()


def errors() -> list[Failure]:
    """The errors of ranks in this run, this one's among them, in the same order on all ranks; without echoes."""
    return [] if _membership is None else _membership.reports.errors()


def told(rank: int, seconds: float = 0.0) -> bool:
    """Whether a rank's error is on the terminal.

    Args:
        rank: which one.
        seconds: longest wait for it, or for the end of that rank.
    """
    if _membership is None:
        return False
    reports = _membership.reports
    _membership.wait(lambda: not reports.silent(rank), seconds)
    return reports.told(rank)


def places(since: float | None = None) -> str:
    """Places of the ranks while one waits for long, as the last notice has said.

    Args:
        since: from when on a notice counts, by ``time.monotonic()``. Default: it is no older than they come.
    """
    return "" if _waits is None else _waits.places(since)


def stop_signal() -> str:
    """The signal that has ended a wait of this process in this run, in a sentence; empty: none has."""
    return "" if _waits is None else _waits.stopped


def number(rank: int) -> int:
    """The number by which users know a rank: the one that it had at first."""
    return _numbers[rank] if _numbers else rank


def this_rank() -> str:
    """This rank in words, by the number that it had at first."""
    me, world = number(dist.get_rank()), dist.get_world_size()
    return f"rank {me} (one of the {world} that remain)" if _numbers else f"rank {me} of {world}"


# -- who waits for a rank that has failed --------------------------------------------------------------


def _failed(failure: Failure) -> None:
    """A rank has failed. Its process may live on, so that connections to it do not break."""
    device_exit.another_failed(lambda: first_failure(0.0))
    if failure.kind != "failed":
        return
    heard = time.monotonic()

    def wake() -> None:
        time.sleep(_SOON)
        while _waits_for_news and first_failure(0.0) is not None:  # until a new run begins
            if any(time.monotonic() - max(since, heard) >= _SOON for since in waits.since()):
                abort_sockets()
                return
            time.sleep(0.2)

    threading.Thread(target=wake, name="failure-news", daemon=True).start()


_SECONDS_FOR_NEWS = 5.0  # to wait for news of a rank that has ended; of a rank that is only late there may be none
_LATE = 1.0
_waits_for_news = True


def wait_for_news(wait: bool) -> None:
    """Whether news of a failed rank counts: an error waits for it, and it ends waits. Not where ranks may be lost."""
    global _waits_for_news
    _waits_for_news = wait


@contextmanager
def deadline(what: str, busy: Callable[[], bool] = waits.never) -> Iterator[None]:
    """Run a block with collectives, and turn their errors into ours. The process group sets the time limit.

    Args:
        what: completes "rank 1 of 4 could not ...".
        busy: whether this rank still works on its own in the block, if it may; called on other threads.

    Raises:
        CommunicationError: another rank did not take part in time, or has ended, or a signal has ended the wait. Other
            errors are not changed.
    """
    began = time.monotonic()
    try:
        with waits.waiting(what, busy):
            yield
    except RuntimeError as error:
        if isinstance(error, CommunicationError) or not _broken(error):
            raise
        me = this_rank() if dist.is_initialized() else "this process"
        raise CommunicationError(f"{me} could not {what}: {stop_signal() or cause(error, began)}") from error


def cause(error: BaseException, began: float | None = None) -> str:
    """The cause of a failed collective, in words: the rank that failed first, if known in time, and what broke here.

    Args:
        error: with which it failed.
        began: when it began, by ``time.monotonic()``: from then on it counts where the ranks were.
    """
    seconds = (_LATE if "imed out" in str(error) else _SECONDS_FOR_NEWS) if _waits_for_news else 0.0
    if (failure := first_failure(seconds)) is not None:
        return f"{failure}. What has broken here: {error}"
    where = places(began) if began is not None else ""
    return (
        "another rank has failed or was too late (the strategy's `timeout` is the limit). "
        f"{where or 'Look for the first error among the other ranks.'} Cause: {error}"
    )


def is_communication_error(error: BaseException) -> bool:
    """Whether an error means that another rank has ended or was too late."""
    return not stop_signal() and _broken(error)


def _broken(error: BaseException) -> bool:
    # NCCL and the store have their own classes; gloo raises plain RuntimeErrors.
    signs = ("gloo", "pair closure", "Connection closed", "Connection reset", "Broken pipe")
    return isinstance(error, CommunicationError | dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )
