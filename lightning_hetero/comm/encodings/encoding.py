"""What a low-bit encoding of a vector is."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lightning_hetero.comm.buffer_pool import BufferPool

#: Values that are worked on at a time: 1 MiB, which stays in a core's cache. With fewer, calls cost more than the work.
CHUNK = 1 << 18
_ALIGNED = 4  # bytes; messages that lie one behind the other begin where an fp32 number may


class Encoding(ABC):
    """Turns fp32 vectors into bytes and back, chunk by chunk. One thread at a time may use an instance.

    Attributes:
        block: values that are encoded together. A chunk is a multiple of it; the last chunk is filled up with zeros.
        chunk: values of a chunk.

    Example::

        import torch

        from lightning_hetero.comm.encodings import encoding_of

        encoding, values = encoding_of("int8"), torch.randn(1000)
        message, arrived = torch.empty(encoding.bytes(1000), dtype=torch.uint8), torch.zeros(1000)
        rest = values.clone()
        encoding.encode(rest, message)  # now the message and the rest make up the values
        encoding.add(message, arrived)
        torch.testing.assert_close(arrived + rest, values)
    """

    block: int
    chunk: int = CHUNK

    def __init__(self) -> None:
        self._pool = BufferPool()

    def bytes(self, length: int) -> int:
        """Bytes of the message that encodes a vector of a length; a multiple of 4."""
        full, rest = divmod(length, self.chunk)
        size = full * self._bytes(self.chunk) + (self._bytes(self._filled(rest)) if rest else 0)
        return -(-size // _ALIGNED) * _ALIGNED

    def encode(self, values: Tensor, message: Tensor) -> None:
        """Encode a vector. What the message leaves out remains in the vector.

        Args:
            values: a vector on the CPU, in fp32, finite.
            message: of :meth:`bytes` elements of dtype ``uint8``, aligned to 4 bytes.
        """
        for part, piece in self._pieces(values, message):
            whole = self._whole(part)
            if whole is not part:
                whole[: len(part)] = part
            self._encode(whole, piece)
            if whole is not part:
                part.copy_(whole[: len(part)])

    def add(self, message: Tensor, out: Tensor) -> None:
        """Add what a message says to a vector.

        Products are rounded before they are added, so that processors with and without fused operations agree bitwise.

        Args:
            message: of :meth:`encode`.
            out: a vector on the CPU, in fp32, of the length of the encoded one.
        """
        for part, piece in self._pieces(out, message):
            whole = self._whole(part)
            self._add(piece, whole)
            if whole is not part:
                part.add_(whole[: len(part)])

    def _pieces(self, values: Tensor, message: Tensor) -> list[tuple[Tensor, Tensor]]:
        return list(zip(values.split(self.chunk), message.split(self._bytes(self.chunk)), strict=False))

    def _filled(self, length: int) -> int:
        return -(-length // self.block) * self.block

    def _whole(self, part: Tensor) -> Tensor:
        """A chunk itself, or zeros of the size that it is filled up to."""
        size = self._filled(len(part))
        return part if size == len(part) else self._pool.vector("whole", size, torch.float32).zero_()

    @abstractmethod
    def _bytes(self, length: int) -> int:
        """Bytes of a chunk of some blocks."""

    @abstractmethod
    def _encode(self, values: Tensor, message: Tensor) -> None:
        """Encode a chunk of whole blocks; what the message leaves out remains in it."""

    @abstractmethod
    def _add(self, message: Tensor, out: Tensor) -> None:
        """Add a chunk of whole blocks."""
