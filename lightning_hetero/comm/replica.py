"""A replica's values in few flat vectors: one message is far cheaper than one per layer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Replica:
    """What replicas exchange: trainable floating parameters, and floating buffers such as BatchNorm's statistics.

    Frozen parameters do not travel. Tied parameters travel once.

    Args:
        module: the model, on its device.
    """

    def __init__(self, module: nn.Module) -> None:
        values = [p for p in module.parameters() if p.requires_grad] + list(module.buffers())
        self._groups: dict[torch.dtype, list[Tensor]] = {}
        for value in values:
            if value.is_floating_point():
                self._groups.setdefault(value.dtype, []).append(value)

    @property
    def bytes(self) -> int:
        """Size of one message, in bytes, as stored."""
        return sum(t.numel() * t.element_size() for group in self._groups.values() for t in group)

    def pack(self) -> list[Tensor]:
        """A copy of the values: one vector per dtype, on the model's device."""
        return [flatten(group) for group in self._groups.values()]

    @torch.no_grad()
    def unpack(self, flats: Sequence[Tensor]) -> None:
        """Write vectors as :meth:`pack` returns them into the model; they may come from another device."""
        for group, flat in zip(self._groups.values(), flats, strict=True):
            unflatten(flat, group)

    @contextmanager
    def holding(self, flats: Sequence[Tensor]) -> Iterator[None]:
        """Let the model hold other values for a while."""
        own = self.pack()
        self.unpack(flats)
        try:
            yield
        finally:
            self.unpack(own)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """One vector of all elements, detached."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


@torch.no_grad()
def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write the parts of a vector into tensors of the same dtype, of any device."""
    parts = flat.to(tensors[0].device).split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(list(tensors), [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])
