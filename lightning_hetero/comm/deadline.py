"""Turns a collective that broke or took too long into an error that says what failed, and which rank failed first."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lightning_hetero.comm import failures
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
def deadline(what: str) -> Iterator[None]:
    """Run a block with collectives, and turn their errors into ours. The process group sets the time limit.

    Args:
        what: completes "rank 1 of 4 could not ...".

    Raises:
        CommunicationError: another rank did not take part in time, or has ended. Other errors are not changed.
    """
    try:
        with failures.waiting():
            yield
    except RuntimeError as error:
        if isinstance(error, CommunicationError) or not of_communication(error):
            raise
        me = failures.this_rank() if dist.is_initialized() else "this process"
        raise CommunicationError(f"{me} could not {what}: {cause(error)}") from error


def cause(error: BaseException) -> str:
    """Why a collective failed, in words: the rank that failed first, if that is known in time, and what broke here."""
    seconds = (_LATE if "imed out" in str(error) else _SOON) if _waits_for_news else 0.0
    if (failure := failures.first(seconds)) is not None:
        return f"{failure}. What has broken here: {error}"
    return (
        "another rank has failed or was too late (the strategy's `timeout` is the limit). "
        f"Look for the first error among the other ranks. Cause: {error}"
    )


def of_communication(error: BaseException) -> bool:
    """Whether an error means that another rank has ended or was too late."""
    # NCCL and the store have their own classes; gloo raises plain RuntimeErrors.
    signs = ("gloo", "pair closure", "Connection closed", "Connection reset", "Broken pipe")
    return isinstance(error, CommunicationError | dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )
