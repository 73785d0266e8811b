"""A replica's values in few flat vectors: one message is far cheaper than one per layer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Replica:
    """What replicas exchange: trainable floating parameters, and floating buffers such as BatchNorm's statistics.

    Frozen parameters do not travel, nor do buffers that are not finite at first: masks, which have no mean. Tied
    parameters travel once.

    Args:
        module: the model, on its device.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = [p for p in module.parameters() if p.requires_grad and p.is_floating_point()]
        buffers = [b for b in module.buffers() if b.is_floating_point() and b.isfinite().all()]
        self._names = {id(value): name for name, value in (*module.named_parameters(), *module.named_buffers())}
        self._groups: dict[torch.dtype, list[Tensor]] = {}
        for value in parameters + buffers:
            self._groups.setdefault(value.dtype, []).append(value)

    @property
    def bytes(self) -> int:
        """Size of one message, in bytes, as stored."""
        return sum(t.numel() * t.element_size() for group in self._groups.values() for t in group)

    def broken(self) -> str | None:
        """The first value that is not finite, by name."""
        values = (value for group in self._groups.values() for value in group)
        return next((self._names[id(value)] for value in values if not value.isfinite().all()), None)

    def pack(self) -> list[Tensor]:
        """A copy of the values: one vector per dtype, on the model's device."""
        return [flatten(group) for group in self._groups.values()]

    @torch.no_grad()
    def unpack(self, flats: Sequence[Tensor]) -> None:
        """Write vectors as :meth:`pack` returns them into the model, from any device and floating dtype."""
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


def wide(flat: Tensor) -> torch.dtype:
    """The dtype to reckon in: fp32, or the vector's own if that is wider."""
    return torch.promote_types(flat.dtype, torch.float32)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """One vector of all elements, detached."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


@torch.no_grad()
def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write the parts of a vector into tensors, all of one dtype and device."""
    parts = flat.to(tensors[0].device, tensors[0].dtype).split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(list(tensors), [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])
