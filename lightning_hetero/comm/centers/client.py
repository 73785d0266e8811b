"""How a replica uses a center: its leader does, and shares what it learns with the other ranks of the replica."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.comm.background import Background
from lightning_hetero.comm.centers.center import Center, PushPull
from lightning_hetero.comm.collective import collective
from lightning_hetero.comm.deadline import deadline
from lightning_hetero.comm.links import ReplicaLinks


class CenterClient:
    """Exchanges with a center in the background, one push-pull at a time (made by all ranks of the replica together).

    Args:
        center: open to this replica's leader.
        links: of this replica.
    """

    def __init__(self, center: Center, links: ReplicaLinks) -> None:
        self.center, self._links = center, links
        self._broadcast = links.broadcaster("the center")

    def push_pull(self, values: Sequence[Tensor], push: float) -> Callable[[], PushPull]:
        """Begin a push-pull (collective over the replica).

        Args:
            values: this replica's, of the center's sizes and dtypes. On every rank of the replica they are overwritten
                with their difference from the center.
            push: how much of the difference the center moves by.

        Returns:
            A function that waits for the result. Call it once, before the next push-pull.
        """

        def work() -> PushPull:
            table = torch.zeros(2 + len(self.center.layout.leaders), dtype=torch.float64)
            if self.center.layout.is_client:
                learned = self.center.push_pull(values, push)
                table = torch.tensor([learned.square, learned.sent, *learned.counts], dtype=torch.float64)
            with deadline("share what the center has answered with the other ranks of its replica"):
                for tensor in (table, *values):
                    self._broadcast(tensor)
            square, sent, *counts = table.tolist()
            return PushPull(square, [int(count) for count in counts], int(sent))

        background = Background(work)

        def result() -> PushPull:
            learned = background.result()
            self._links.traffic.add(learned.sent, background.seconds, background.waited)
            return learned

        return result

    def read(self, out: Sequence[Tensor]) -> list[int]:
        """Write the center into vectors, and return the counts: the same on every rank (collective over all ranks)."""
        self._links.gather(None)  # no push-pull is under way any more
        layout = self.center.layout
        counts = torch.zeros(len(layout.leaders), dtype=torch.int64)
        if layout.rank == layout.host:
            _, seen = self.center.read(out)
            counts.copy_(torch.tensor(seen))

        def received() -> list[Tensor]:
            for tensor in (counts, *out):
                dist.broadcast(tensor, layout.host)
            return [counts, *out]

        counts, *center = collective("receive the center", received)
        for own, value in zip(out, center, strict=True):
            if own is not value:  # another rank had it already, when this one had lost its connection
                own.copy_(value)
        return counts.tolist()

    def write(self, values: Sequence[Tensor], counts: Sequence[int]) -> None:
        """Set the center and the counts (collective over all ranks)."""
        if self.center.layout.is_client:
            self.center.write(values, counts)
        self._links.gather(None)
