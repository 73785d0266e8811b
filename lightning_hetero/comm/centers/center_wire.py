"""What travels between the host of a center and one of its clients."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_hetero.comm.replica import finite


class CenterWire:
    """Sends values as they are: those of the client to the host, and their difference from the center back.

    Args:
        group: process group of the host and its clients.
        other: the rank at the other end.
    """

    def __init__(self, group: dist.ProcessGroup, other: int) -> None:
        self._group, self._other = group, other

    def bytes(self, values: list[Tensor]) -> int:
        """Bytes of values in one direction."""
        return sum(value.nbytes for value in values)

    def send(self, tensor: Tensor) -> None:
        """Send a tensor to the other end."""
        dist.send(tensor, self._other, group=self._group)

    def receive(self, tensor: Tensor) -> None:
        """Receive a tensor from the other end."""
        dist.recv(tensor, self._other, group=self._group)

    def start(self, values: Sequence[Tensor]) -> None:
        """On both ends: begin, or begin again.

        Args:
            values: of the center, with which the client begins.
        """

    def fits(self, values: Sequence[Tensor]) -> bool:
        """On the client: whether its values fit into this format. If not, zeros will be sent in their place."""
        return True

    def send_values(self, values: list[Tensor]) -> None:
        """On the client: send its values, after :meth:`fits`."""
        for value in values:
            self.send(value)

    def receive_values(self, values: list[Tensor]) -> None:
        """On the host: receive the values of the client."""
        for value in values:
            self.receive(value)

    def round_difference(self, difference: list[Tensor]) -> bool:
        """On the host: round a difference as the client will see it. ``False``: it does not fit, and becomes 0."""
        return True

    def send_difference(self, difference: list[Tensor]) -> None:
        """On the host: send the difference from the center."""
        for value in difference:
            self.send(value)

    def receive_difference(self, difference: list[Tensor]) -> None:
        """On the client: receive the difference from the center."""
        for value in difference:
            self.receive(value)


class NarrowCenterWire(CenterWire):
    """Sends differences in 16 bits: from the values that both ends know, those of the center at the last push-pull.

    Both ends do the same arithmetic on what was sent, so they always know the same values. The values themselves are
    never rounded.

    Args:
        group: process group of the host and its clients.
        other: the rank at the other end.
        dtype: a dtype of 16 bits.
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
