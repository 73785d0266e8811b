"""Memory that is kept for the next time."""

import torch
from torch import Tensor


class BufferPool:
    """Gives the same vector each time it is asked: fresh pages cost far more than the arithmetic on them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def vector(self, name: str, length: int, dtype: torch.dtype) -> Tensor:
        """A vector on the CPU that holds what was last written to it under this name, or anything."""
        key = name, length, dtype
        if key not in self._kept:
            self._kept[key] = torch.zeros(length, dtype=dtype)
        return self._kept[key]
