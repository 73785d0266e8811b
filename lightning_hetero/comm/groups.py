"""Process groups that end with the object that made them; each holds sockets and threads."""

import gc
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_hetero.comm.leaving import noting_sockets

_ended: list[dist.ProcessGroup] = []  # whose makers are gone


def new_group(maker: object, ranks: Sequence[int] | None, timeout: timedelta, backend: str = "gloo") -> Any:
    """A process group for as long as its maker lives (collective over all ranks).

    Args:
        maker: the group ends some time after it, see :func:`end_unused`.
        ranks: its members; ``None``: all.
        timeout: longest wait for another rank.
        backend: of its collectives.

    Returns:
        The group; on a rank that is no member, what stands for it there.
    """
    with noting_sockets():
        group = dist.new_group(None if ranks is None else list(ranks), timeout=timeout, backend=backend)
    if isinstance(group, dist.ProcessGroup):  # this rank is a member
        weakref.finalize(maker, _ended.append, group).atexit = False
    return group


def end_unused() -> None:
    """End the groups whose makers are gone. To be called where all ranks have just met, and so are done with them."""
    gc.collect()  # a Trainer and its strategy hold each other
    while _ended:
        with suppress(ValueError):  # the world has ended since, and this group with it
            dist.destroy_process_group(_ended.pop())
