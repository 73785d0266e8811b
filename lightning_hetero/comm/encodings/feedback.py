"""Error feedback: what a message leaves out is added to the next one."""

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor


class Feedback:
    """What the low-bit messages of a replica have left out so far.

    There is a residual for each direction: for the replica's own values on their way to the others; and, with three or
    more replicas, for the part of the sum that this replica takes and sends back.

    Args:
        wire: low-bit wire of the messages.
        lengths: of each vector that is exchanged, how many of its first values travel on the wire. The others, such as
            BatchNorm's variances, travel as they are.
        members: number of replicas.

    Attributes:
        wire: of the messages.
        sent: what the replica's own messages have left out.
        summed: what the messages with this replica's part of the sum have left out; empty vectors with two replicas,
            which need no sums from others.
    """

    def __init__(self, wire: str, lengths: Sequence[int], members: int) -> None:
        self.wire = wire
        self.sent = [torch.zeros(length) for length in lengths]
        self.summed = [torch.zeros(-(-length // members) if members > 2 else 0) for length in lengths]

    def part(self, vectors: slice) -> "Feedback":
        """The residuals of some of the vectors, in the same memory."""
        part = copy(self)
        part.sent, part.summed = self.sent[vectors], self.summed[vectors]
        return part

    def state_dict(self) -> list[Tensor]:
        """The residuals."""
        return [*self.sent, *self.summed]

    def load_state_dict(self, state: Sequence[Tensor]) -> bool:
        """Continue from :meth:`state_dict`, if it has the same sizes.

        Returns:
            Whether it has. If not, the residuals stay as they are.
        """
        own = self.state_dict()
        if [len(value) for value in state] != [len(value) for value in own]:
            return False
        for value, saved in zip(own, state, strict=True):
            value.copy_(saved)
        return True
