"""What PyTorch needs to know of process groups whose classes are this package's own."""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import distributed_c10d


def default_store() -> dist.Store:
    """The store with which all ranks have met; on the rank that hosts it, it ends with this object."""
    return distributed_c10d._get_default_store()


def register(group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Let PyTorch know a group of our own class: what reports an error asks for its backend and its ranks."""
    distributed_c10d._world.pg_map[group] = ("gloo", default_store())
    distributed_c10d._world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}


def unregister(group: dist.ProcessGroup) -> None:
    """Let PyTorch forget a group of :func:`register`."""
    distributed_c10d._world.pg_map.pop(group, None)
    distributed_c10d._world.pg_group_ranks.pop(group, None)
