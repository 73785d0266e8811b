"""Sums over replicas of vectors that travel encoded."""

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.comm.buffer_pool import BufferPool
from lightning_hetero.comm.encodings.encoding import Encoding
from lightning_hetero.comm.encodings.spelling import encoding_of
from lightning_hetero.comm.wire import DTYPES, all_gather, swap_parts


def encoded_sum(
    group: dist.ProcessGroup | None, own: Tensor, encoding: Encoding, sent: Tensor, summed: Tensor, pool: BufferPool
) -> Tensor:
    """Sum a vector over a group (collective); blocks.

    Two members swap their messages. With more, each one sums one part of the vector in fp32, and sends the encoded sum
    to the others.

    Args:
        group: of ``P`` members.
        own: a vector on the CPU, in fp32. It is overwritten.
        encoding: of the messages.
        sent: what this member's messages have left out so far. It is added, and updated.
        summed: the same of its sums, with more than two members.
        pool: gives memory.

    Returns:
        ``own`` with the sum of what has arrived, bitwise the same on every member.
    """
    members, me = dist.get_world_size(group), dist.get_rank(group)
    sent.add_(own)
    if members == 2:
        messages = _messages(encoding, "both", own.numel(), members, pool)
        encoding.encode(sent, messages[me])
        swap_parts(group, [messages[me]] * 2, messages)
        return _decoded(encoding, messages, [own.zero_()] * 2)
    length = -(-own.numel() // members)  # of a part, rounded up
    mine, others = (_messages(encoding, name, length, members, pool) for name in ("mine", "others"))
    filled = pool.vector("filled", members * length, torch.float32)
    parts = filled.split(length)
    filled.zero_()[: own.numel()] = sent
    for part, message in zip(parts, mine, strict=True):
        encoding.encode(part, message)
    sent.copy_(filled[: own.numel()])
    swap_parts(group, mine, others)
    encoding.encode(_decoded(encoding, others, [summed] * members), mine[me])
    everything = pool.vector("everything", members * len(mine[me]), torch.uint8)
    all_gather(everything, mine[me], group=group)
    _decoded(encoding, list(everything.split(len(mine[me]))), list(filled.zero_().split(length)))
    return own.copy_(filled[: own.numel()])


def _messages(encoding: Encoding, name: str, length: int, members: int, pool: BufferPool) -> list[Tensor]:
    size = encoding.bytes(length)
    return list(pool.vector(name, members * size, torch.uint8).split(size))


def _decoded(encoding: Encoding, messages: list[Tensor], out: list[Tensor]) -> Tensor:
    for message, vector in zip(messages, out, strict=True):
        encoding.add(message, vector)
    return out[0]


def bytes_sent(elements: int, size: int, wire: str, members: int) -> int:
    """Bytes that each member sends for a sum, without the headers of the network.

    Args:
        elements: length of the vector.
        size: bytes of an element in memory.
        wire: number format on the wire.
        members: number of members.
    """
    encoding = encoding_of(wire)
    if encoding is None:
        return round(2 * (members - 1) / members * elements * (size if DTYPES[wire] is None else 2))
    if members == 2:
        return encoding.bytes(elements)
    return 2 * (members - 1) * encoding.bytes(-(-elements // members))
