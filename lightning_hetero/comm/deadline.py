"""Turns a broken or overdue collective into an error that says who waited for what."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lightning_hetero.errors import CommunicationError


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
        if not _is_of_communication(error):
            raise
        me = f"rank {dist.get_rank()} of {dist.get_world_size()}" if dist.is_initialized() else "this process"
        raise CommunicationError(
            f"{me} could not {what}: another rank has failed or was too late (the strategy's `timeout` is the limit). "
            f"Look for the first error among the other ranks. Cause: {error}"
        ) from error


def _is_of_communication(error: RuntimeError) -> bool:
    # NCCL and the store have their own classes; gloo raises plain RuntimeErrors.
    signs = ("gloo", "pair closure", "Connection closed", "Connection reset", "Broken pipe")
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)
