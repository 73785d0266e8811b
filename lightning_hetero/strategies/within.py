"""Chooses how the ranks of a replica average their gradients: through shared memory, or over sockets."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_hetero.comm.same_host import ALIGNED, PART, SHARED, share_memory
from lightning_hetero.comm.shared_mean import SharedMean
from lightning_hetero.errors import UnsupportedError
from lightning_hetero.strategies.replica_ddp import ReplicaDDP

if TYPE_CHECKING:
    from lightning_hetero.strategies.base import HeteroStrategy


def average_within(
    strategy: "HeteroStrategy", ddp: ReplicaDDP, ranks: Sequence[int], group: dist.ProcessGroup, hooked: bool
) -> str | None:
    """Let DDP average gradients through shared memory, where the ranks of a replica can (collective over them).

    Args:
        strategy: with the user's options.
        ddp: over the model.
        ranks: of the replica.
        group: of these ranks.
        hooked: whether DDP has the user's own hook already, which wins.

    Returns:
        How they are averaged and why, in words; ``None``: as DDP does.

    Raises:
        UnsupportedError: the user asks for shared memory, and it cannot be.
        CommunicationError: another rank did not take part in time.
    """
    way = strategy.options.within
    if way == "gloo":
        return "by ddp_comm_hook" if hooked else None
    reason = "ddp_comm_hook averages the gradients" if hooked else _unsuitable(strategy, ranks)
    if reason is None:
        trained = [p for p in ddp.module.parameters() if p.requires_grad]
        size = sum(p.numel() * p.element_size() + ALIGNED for p in trained)
        needed = -(-size // ALIGNED) * ALIGNED * (len(ranks) + 1)  # a row for each rank, and the result
        try:
            part = PART if way == "auto" else 1.0
            ddp.average_in(SharedMean(*share_memory(group, size, strategy.options.limit, part)), group)
            return "in shared memory: all are CPUs of one node"
        except OSError as error:
            reason = f"the memory cannot be shared ({error})"
            if way == "auto":
                rank_zero_warn(
                    f"Gradients are averaged over sockets: {reason}. Shared memory is faster, and needs "
                    f"{round(needed / PART)} free bytes in /dev/shm (docker run --shm-size), of which it leaves half. "
                    "within='gloo' silences this warning."
                )
    if reason is not None and way == "shm":
        raise UnsupportedError(f"within='shm', but {reason}. Set within='auto', which uses sockets then.")
    return "by ddp_comm_hook" if hooked else None


def _unsuitable(strategy: "HeteroStrategy", ranks: Sequence[int]) -> str | None:
    """Why these ranks cannot average through shared memory, if so; the same on all of them."""
    assert strategy.job is not None
    places = [strategy.job.view.topology.places[rank] for rank in ranks]
    if devices := sorted({place.device for place in places} - {"cpu"}):
        return f"gradients are on {', '.join(devices)}, not on CPUs"
    if not os.path.isdir(SHARED):
        return f"this system has no {SHARED}"
    if len({(place.host, place.node) for place in places}) > 1:
        return f"ranks {list(ranks)}, which average gradients, are on several nodes"
    return None
