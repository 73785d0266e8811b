"""Turns a broken or overdue collective into an error that says who waited for what."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lightning_hetero.errors import CommunicationError


@contextmanager
def deadline(what: str) -> Iterator[None]:
    """Run collectives; their process group carries the time limit.

    Raises:
        CommunicationError: another rank did not take part in time, or has gone.
    """
    try:
        yield
    except RuntimeError as error:  # gloo and NCCL raise this, and subclasses of it
        raise CommunicationError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} could not {what}: another rank has failed or was too "
            f"late (the strategy's `timeout` is the limit). Look for the first error among the other ranks. "
            f"Cause: {error}"
        ) from error
