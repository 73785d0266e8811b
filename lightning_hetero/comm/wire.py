"""Number formats between replicas, and sums in them. Sums are taken in fp32; parameters are never rounded."""

from collections import deque
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.comm.buffer_pool import BufferPool

Wire = Literal["fp32", "bf16", "fp16"]
#: PyTorch 2.13 renames it. Unlike ``all_gather`` it allocates no memory.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
PIECE, AHEAD = 1 << 15, 4  # bytes of a message; messages under way in each direction: 128 KiB on the link
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def sum_over(group: dist.ProcessGroup | None, own: Tensor, pool: BufferPool) -> Tensor:
    """Sum a vector over a group (collective); blocks.

    An all-reduce in 16 bits would round every partial sum. So with three or more members each one sums one part of the
    vector in fp32, and sends the sum to the others. Each member sends ``2 (P - 1) / P`` times the vector, as in an
    all-reduce.

    Args:
        group: of ``P`` members.
        own: a vector on the CPU, in the format of the wire. It is overwritten.
        pool: gives memory. The sum may lie in it, until the next sum.

    Returns:
        The sum, bitwise the same on every member, in the same format.
    """
    members, narrow = dist.get_world_size(group), own.dtype
    if narrow.itemsize > 2 or members == 2:
        dist.all_reduce(own, group=group)
        return own
    length = -(-own.numel() // members)  # of a part, rounded up
    sent, received = (pool.vector(name, members * length, narrow) for name in ("sent", "received"))
    total, term = (pool.vector(name, length, torch.float32) for name in ("summed", "term"))
    part = pool.vector("part", length, narrow)
    sent[: own.numel()] = own
    swap_parts(group, sent.split(length), received.split(length))
    total.zero_()
    for other in received.view(members, length):
        total += term.copy_(other)  # adding another dtype directly would take new memory
    all_gather(sent, part.copy_(total), group=group)
    return sent[: own.numel()]


def swap_parts(group: dist.ProcessGroup | None, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
    """Give each member its part, one member after the other and in pieces (collective).

    Several flows over one slow link, or long messages to a member after a pause, overrun its queue and lose packets:
    sending all at once took 1.5 times as long on a link of 100 Mbit.

    Args:
        group: the members.
        sent: a vector for each member.
        received: of each member its vector for this one; this is written.
    """
    members, me = len(sent), dist.get_rank(group)
    ranks = dist.get_process_group_ranks(group)
    received[me].copy_(sent[me])
    under_way: deque[dist.Work] = deque()
    for step in range(1, members):
        to, source = (me + step) % members, (me - step) % members
        size = PIECE // sent[to].element_size()
        for own, other in zip(sent[to].split(size), received[source].split(size), strict=True):
            for work in (dist.isend(own, ranks[to], group), dist.irecv(other, ranks[source], group)):
                assert work is not None  # both take part
                under_way.append(work)
            while len(under_way) >= 2 * AHEAD:
                under_way.popleft().wait()
    for work in under_way:
        work.wait()
