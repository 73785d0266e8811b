"""Turns a broken or overdue collective into an error that says who waited for what, and which rank failed first."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lightning_hetero.comm import failures
from lightning_hetero.errors import CommunicationError

_SOON = 5.0  # seconds within which all ranks hear of one that has ended; of one that is late there may be no news
_LATE = 1.0


@contextmanager
def deadline(what: str) -> Iterator[None]:
    """Run collectives, perhaps among other things; their process group carries the time limit.

    Args:
        what: completes "rank 1 of 4 could not ...".

    Raises:
        CommunicationError: another rank did not take part in time, or has gone. Other errors pass through.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, CommunicationError) or not of_communication(error):
            raise
        me = f"rank {dist.get_rank()} of {dist.get_world_size()}" if dist.is_initialized() else "this process"
        raise CommunicationError(f"{me} could not {what}: {cause(error)}") from error


def cause(error: BaseException) -> str:
    """Why another rank could not be met: the one that failed first, as soon as that is known; and what has broken."""
    if (failure := failures.first(_LATE if "imed out" in str(error) else _SOON)) is not None:
        return f"{failure}. What has broken here: {error}"
    return (
        "another rank has failed or was too late (the strategy's `timeout` is the limit). "
        f"Look for the first error among the other ranks. Cause: {error}"
    )


def of_communication(error: BaseException) -> bool:
    """Whether an error means that another rank could not be met."""
    # NCCL and the store have their own classes; gloo raises plain RuntimeErrors.
    signs = ("gloo", "pair closure", "Connection closed", "Connection reset", "Broken pipe")
    return isinstance(error, CommunicationError | dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )
