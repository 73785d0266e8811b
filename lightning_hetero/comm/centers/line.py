"""What travels between a center's host and one of its visitors."""

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override


class Line:
    """Values as they are: a visitor's there, its distance from the center back.

    Args:
        group: process group of host and visitors.
        other: the rank at the other end.
    """

    def __init__(self, group: dist.ProcessGroup, other: int) -> None:
        self._group, self._other = group, other

    def bytes(self, values: list[Tensor]) -> int:
        """That the values take in one direction."""
        return sum(value.numel() * value.element_size() for value in values)

    def send(self, tensor: Tensor) -> None:
        """A tensor to the other end."""
        dist.send(tensor, self._other, group=self._group)

    def receive(self, tensor: Tensor) -> None:
        """A tensor from the other end."""
        dist.recv(tensor, self._other, group=self._group)

    def tell(self, values: list[Tensor]) -> bool:
        """By the visitor: where it is. ``False`` if that cannot be said in this format; then nothing has moved."""
        for value in values:
            self.send(value)
        return True

    def hear(self, values: list[Tensor]) -> None:
        """By the host: where the visitor is."""
        for value in values:
            self.receive(value)

    def round(self, difference: list[Tensor]) -> None:
        """By the host: turn a difference into what the visitor will take it for."""

    def answer(self, difference: list[Tensor]) -> None:
        """By the host: how far the visitor is from the center."""
        for value in difference:
            self.send(value)

    def learn(self, difference: list[Tensor]) -> None:
        """By the visitor: likewise."""
        for value in difference:
            self.receive(value)


class NarrowLine(Line):
    """Differences in 16 bits: from where both ends know the visitor to have been, that is, at the center as it was.

    Both ends do the same arithmetic on what has travelled. So what rounding leaves out of one visit is in the next.

    Args:
        group: process group of host and visitors.
        other: the rank at the other end.
        start: where the visitor is at first.
        dtype: of 16 bits.
    """

    def __init__(self, group: dist.ProcessGroup, other: int, start: list[Tensor], dtype: torch.dtype) -> None:
        super().__init__(group, other)
        self._known = [value.clone() for value in start]
        self._short = [torch.empty(value.numel(), dtype=dtype) for value in start]

    @override
    def bytes(self, values: list[Tensor]) -> int:
        return sum(2 * value.numel() for value in values)

    @override
    def tell(self, values: list[Tensor]) -> bool:
        for value, known, short in zip(values, self._known, self._short, strict=True):
            short.copy_(value.sub_(known))
        well = all(bool(short.isfinite().all()) for short in self._short)
        for known, short in zip(self._known, self._short, strict=True):
            if not well:
                short.zero_()
            self.send(short)
            known.add_(short)
        return well

    @override
    def hear(self, values: list[Tensor]) -> None:
        for value, known, short in zip(values, self._known, self._short, strict=True):
            self.receive(short)
            value.copy_(known.add_(short))

    @override
    def round(self, difference: list[Tensor]) -> None:
        for value, short in zip(difference, self._short, strict=True):
            value.copy_(short.copy_(value))

    @override
    def answer(self, difference: list[Tensor]) -> None:
        for known, short in zip(self._known, self._short, strict=True):  # as rounded
            self.send(short)
            known.sub_(short)

    @override
    def learn(self, difference: list[Tensor]) -> None:
        for value, known, short in zip(difference, self._known, self._short, strict=True):
            self.receive(short)
            known.sub_(short)
            value.copy_(short)
