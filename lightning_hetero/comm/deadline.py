"""Turns a collective that broke or took too long into an error that says what failed, and which rank failed first."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lightning_hetero.comm import failures, waits
from lightning_hetero.errors import CommunicationError

_SOON = 5.0  # seconds to wait for news of a rank that has ended; of a rank that is only late there may be none
_LATE = 1.0
_waits_for_news = True


def wait_for_news(wait: bool) -> None:
    """Whether an error waits until it is known which rank failed first. Where lost ranks are survived it need not."""
    global _waits_for_news
    _waits_for_news = wait
    failures.wake_up(wait)


@contextmanager
def deadline(what: str, busy: Callable[[], bool] | None = None) -> Iterator[None]:
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
        with waits.waiting(what, *filter(None, [busy])):
            yield
    except RuntimeError as error:
        if isinstance(error, CommunicationError) or not _broken(error):
            raise
        me = failures.this_rank() if dist.is_initialized() else "this process"
        raise CommunicationError(f"{me} could not {what}: {failures.stopped() or cause(error, began)}") from error


def cause(error: BaseException, began: float | None = None) -> str:
    """Why a collective failed, in words: the rank that failed first, if that is known in time, and what broke here.

    Args:
        error: with which it failed.
        began: when it began, by ``time.monotonic()``: from then on it counts where the ranks were.
    """
    seconds = (_LATE if "imed out" in str(error) else _SOON) if _waits_for_news else 0.0
    if (failure := failures.first(seconds)) is not None:
        return f"{failure}. What has broken here: {error}"
    where = failures.places(began) if began is not None else ""
    return (
        "another rank has failed or was too late (the strategy's `timeout` is the limit). "
        f"{where or 'Look for the first error among the other ranks.'} Cause: {error}"
    )


def of_communication(error: BaseException) -> bool:
    """Whether an error means that another rank has ended or was too late."""
    return not failures.stopped() and _broken(error)


def _broken(error: BaseException) -> bool:
    # NCCL and the store have their own classes; gloo raises plain RuntimeErrors.
    signs = ("gloo", "pair closure", "Connection closed", "Connection reset", "Broken pipe")
    return isinstance(error, CommunicationError | dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )
