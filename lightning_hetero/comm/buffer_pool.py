"""Memory that is used again instead of being allocated anew."""

import torch
from torch import Tensor


class BufferPool:
    """Gives the same vector at each request. New pages of memory cost far more than the arithmetic on them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def vector(self, name: str, length: int, dtype: torch.dtype) -> Tensor:
        """A vector on the CPU. It contains what was last written to it, or anything.

        Args:
            name: requests with the same name, length and dtype get the same memory.
            length: number of elements.
            dtype: of the elements.
        """
        key = name, length, dtype
        if key not in self._kept:
            self._kept[key] = torch.zeros(length, dtype=dtype)
        return self._kept[key]
