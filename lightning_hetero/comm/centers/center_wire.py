"""What travels between a center's host and one of its visitors."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_hetero.comm.replica import finite


class CenterWire:
    """Values as they are: a visitor's there, its distance from the center back.

    Args:
        group: process group of host and visitors.
        other: the rank at the other end.
    """

    def __init__(self, group: dist.ProcessGroup, other: int) -> None:
        self._group, self._other = group, other

    def bytes(self, values: list[Tensor]) -> int:
        """That the values take in one direction."""
        return sum(value.nbytes for value in values)

    def send(self, tensor: Tensor) -> None:
        """A tensor to the other end."""
        dist.send(tensor, self._other, group=self._group)

    def receive(self, tensor: Tensor) -> None:
        """A tensor from the other end."""
        dist.recv(tensor, self._other, group=self._group)

    def start(self, values: Sequence[Tensor]) -> None:
        """By both: the visitor is at the center, which is here."""

    def fits(self, values: Sequence[Tensor]) -> bool:
        """By the visitor: whether this format can say where it is. If not, it will tell that it has not moved."""
        return True

    def send_values(self, values: list[Tensor]) -> None:
        """By the visitor: where it is, once it is known whether that fits."""
        for value in values:
            self.send(value)

    def receive_values(self, values: list[Tensor]) -> None:
        """By the host: where the visitor is."""
        for value in values:
            self.receive(value)

    def round_difference(self, difference: list[Tensor]) -> bool:
        """By the host: turn a difference into what the visitor will take it for; ``False``: 0, for it does not fit."""
        return True

    def send_difference(self, difference: list[Tensor]) -> None:
        """By the host: how far the visitor is from the center."""
        for value in difference:
            self.send(value)

    def receive_difference(self, difference: list[Tensor]) -> None:
        """By the visitor: receive how far it is from the center."""
        for value in difference:
            self.receive(value)


class NarrowCenterWire(CenterWire):
    """Differences in 16 bits: from where both ends take the visitor to be, that is, from the center at its last visit.

    Both ends do the same arithmetic on what has travelled, so that they always agree on that; values themselves are
    never rounded.

    Args:
        group: process group of host and visitors.
        other: the rank at the other end.
        dtype: of 16 bits.
    """

    def __init__(self, group: dist.ProcessGroup, other: int, dtype: torch.dtype) -> None:
        super().__init__(group, other)
        self._dtype = dtype
        self._known: list[Tensor] = []
        self._short: list[Tensor] = []

    @override
    def start(self, values: Sequence[Tensor]) -> None:
        self._known = [value.clone() for value in values]
        self._short = [torch.empty(value.numel(), dtype=self._dtype) for value in values]

    @override
    def bytes(self, values: list[Tensor]) -> int:
        return sum(2 * value.numel() for value in values)

    @override
    def fits(self, values: Sequence[Tensor]) -> bool:
        for value, known, short in zip(values, self._known, self._short, strict=True):
            short.copy_(value - known)
        return self._finite()

    def _finite(self) -> bool:
        if finite(self._short):
            return True
        for short in self._short:
            short.zero_()
        return False

    @override
    def send_values(self, values: list[Tensor]) -> None:
        for known, short in zip(self._known, self._short, strict=True):
            self.send(short)
            known.add_(short)

    @override
    def receive_values(self, values: list[Tensor]) -> None:
        for value, known, short in zip(values, self._known, self._short, strict=True):
            self.receive(short)
            value.copy_(known.add_(short))

    @override
    def round_difference(self, difference: list[Tensor]) -> bool:
        for value, short in zip(difference, self._short, strict=True):
            short.copy_(value)
        well = self._finite()
        for value, short in zip(difference, self._short, strict=True):
            value.copy_(short)
        return well

    @override
    def send_difference(self, difference: list[Tensor]) -> None:
        for known, short in zip(self._known, self._short, strict=True):  # as rounded
            self.send(short)
            known.sub_(short)

    @override
    def receive_difference(self, difference: list[Tensor]) -> None:
        for value, known, short in zip(difference, self._known, self._short, strict=True):
            self.receive(short)
            known.sub_(short)
            value.copy_(short)
