"""Values rounded to few bits, in blocks with one scale each."""

from abc import abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hetero.comm.encodings.encoding import Encoding

_HUGE = 3e38  # below the largest number in fp32; stands for the reciprocal of 0


class Rounded(Encoding):
    """Each value as a whole number from ``-levels`` to ``levels``, times the scale of its block.

    The scale of a block is an fp16 number from 0 to 1, times an fp32 number for the chunk. So values may be as large
    and as small as fp32 allows.

    Attributes:
        levels: whole numbers on each side of 0.
        per_byte: values in a byte.
    """

    block = 256
    levels: int
    per_byte: int

    @override
    def _bytes(self, length: int) -> int:
        return 4 + 2 * (length // self.block) + length // self.per_byte

    def _parts(self, message: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """The chunk's unit, the blocks' scales, and the bytes of the values in rows of a block."""
        blocks, body = length // self.block, 4 + 2 * (length // self.block)
        rows = message[body : self._bytes(length)].view(blocks, self.block // self.per_byte)
        return message[:4].view(torch.float32), message[4:body].view(torch.float16).view(blocks, 1), rows

    @override
    def _encode(self, values: Tensor, message: Tensor) -> None:
        unit, scales, rows = self._parts(message, len(values))
        x = values.view(len(scales), self.block)
        work = self._pool.vector("work", len(values), torch.float32).view(x.shape)
        wanted = torch.maximum(x.amax(1, keepdim=True), x.amin(1, keepdim=True).neg_()).div_(self.levels)
        wanted.abs_()  # no -0, which has another reciprocal
        unit.copy_(wanted.max().clamp_(min=torch.finfo(torch.float32).tiny))
        scales.copy_(wanted / unit)
        scale = scales.float().mul_(unit)  # as it will be decoded: a little more or less than wanted, or 0
        factor = torch.maximum(scale, wanted).reciprocal_().clamp_(max=_HUGE)  # no number is beyond the levels
        torch.mul(x, factor, out=work).round_()
        self._pack(work, rows)
        x.sub_(work.mul_(scale))

    @override
    def _add(self, message: Tensor, out: Tensor) -> None:
        unit, scales, rows = self._parts(message, len(out))
        x = out.view(len(scales), self.block)
        work = self._pool.vector("work", len(out), torch.float32).view(x.shape)
        self._unpack(rows, work)
        x.add_(work.mul_(scales.float().mul_(unit)))

    @abstractmethod
    def _pack(self, numbers: Tensor, rows: Tensor) -> None:
        """Write whole numbers into bytes."""

    @abstractmethod
    def _unpack(self, rows: Tensor, numbers: Tensor) -> None:
        """Read whole numbers from bytes."""


class Int8(Rounded):
    """From -127 to 127: a quarter of fp32's bytes."""

    levels, per_byte = 127, 1

    @override
    def _pack(self, numbers: Tensor, rows: Tensor) -> None:
        rows.view(torch.int8).copy_(numbers)

    @override
    def _unpack(self, rows: Tensor, numbers: Tensor) -> None:
        numbers.copy_(rows.view(torch.int8))


class Int4(Rounded):
    """From -7 to 7: an eighth of fp32's bytes. A byte holds a value of a block's first half and one of its second."""

    levels, per_byte = 7, 2

    @override
    def _pack(self, numbers: Tensor, rows: Tensor) -> None:
        first, second = numbers.split(self.block // 2, dim=1)
        both = self._pool.vector("both", rows.numel(), torch.float32).view(rows.shape)
        rows.copy_(torch.add(first, second, alpha=16, out=both).add_(8 + 16 * 8))

    @override
    def _unpack(self, rows: Tensor, numbers: Tensor) -> None:
        first, second = numbers.split(self.block // 2, dim=1)
        half = self._pool.vector("half", rows.numel(), torch.uint8).view(rows.shape)
        first.copy_(torch.bitwise_and(rows, 15, out=half)).sub_(8)
        second.copy_(torch.bitwise_right_shift(rows, 4, out=half)).sub_(8)
