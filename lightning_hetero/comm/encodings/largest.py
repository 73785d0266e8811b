"""The largest values alone: the others wait."""

import math

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hetero.comm.encodings.encoding import CHUNK, Encoding
from lightning_hetero.comm.encodings.rounded import Int4

_INDEX = 0xFF  # the bits of an index: groups of up to 256 values
_SIZE = 0x7FFFFFFF & ~_INDEX  # the bits of an fp32 number that say how large it is, without those of an index


class Largest(Encoding):
    """Of each group of values the one that is largest in size, in 4 bits, and an index of 8 bits.

    A chunk is a matrix, and its columns are the groups. The bits of fp32 numbers, read as whole numbers, have the order
    of the sizes. With the row's number in their lowest bits, one maximum finds both the value and where it is; sizes
    that differ by less than a 32768th count as equal.

    Args:
        density: at most this part of the values is sent, from 1/256 to 1: one of each ``ceil(1 / density)``.
    """

    def __init__(self, density: float) -> None:
        super().__init__()
        self.block = math.ceil(1 / density - 1e-9)
        self.chunk = self.block * max(CHUNK // self.block // Int4.block, 1) * Int4.block
        self._values = Int4()
        self._rows = torch.arange(self.block, dtype=torch.int32).view(-1, 1)

    @override
    def _bytes(self, length: int) -> int:
        groups = length // self.block
        return self._values.bytes(groups) + groups

    def _parts(self, message: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The bytes of the values, and the indices."""
        groups = length // self.block
        body = self._values.bytes(groups)
        return message[:body], message[body : body + groups]

    @override
    def _encode(self, values: Tensor, message: Tensor) -> None:
        body, indices = self._parts(message, len(values))
        columns = values.view(self.block, -1)
        keys = self._pool.vector("keys", len(values), torch.int32).view(columns.shape)
        torch.bitwise_and(columns.view(torch.int32), _SIZE, out=keys)
        where = keys.bitwise_or_(self._rows).amax(0).bitwise_and_(_INDEX)
        indices.copy_(where)
        rows = where.long().unsqueeze(0)
        kept = columns.gather(0, rows)
        self._values.encode(kept.view(-1), body)
        columns.scatter_(0, rows, kept)

    @override
    def _add(self, message: Tensor, out: Tensor) -> None:
        body, indices = self._parts(message, len(out))
        kept = torch.zeros(len(indices))
        self._values.add(body, kept)
        out.view(self.block, -1).scatter_add_(0, indices.long().unsqueeze(0), kept.unsqueeze(0))
