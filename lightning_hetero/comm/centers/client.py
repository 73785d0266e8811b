"""A replica's way to a center: its first rank goes, and tells the others what it has learned."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.comm.background import Background
from lightning_hetero.comm.centers.center import Center, PushPull
from lightning_hetero.comm.deadline import deadline
from lightning_hetero.comm.links import ReplicaLinks


class CenterClient:
    """Visits a center in the background, one visit at a time.

    Args:
        center: open to this replica's leader.
        links: the wires of this replica.
    """

    def __init__(self, center: Center, links: ReplicaLinks) -> None:
        self.center, self._links = center, links

    def push_pull(self, values: Sequence[Tensor], push: float) -> Callable[[], PushPull]:
        """Begin a visit (collective over the replica).

        Args:
            values: as for :meth:`~lightning_hetero.comm.centers.center.Center.visit`; overwritten with the difference,
                on every rank of the replica.
            push: how much of the difference the center moves by.

        Returns:
            Waits for what the visit brings; to be called once, before the next visit.
        """

        def work() -> PushPull:
            table = torch.zeros(2 + len(self.center.layout.leaders), dtype=torch.float64)
            if self.center.layout.is_client:
                visit = self.center.push_pull(values, push)
                table = torch.tensor([visit.square, visit.sent, *visit.counts], dtype=torch.float64)
            with deadline("tell its replica of the center"):
                for tensor in (table, *values):
                    self._links.broadcast(tensor)
            square, sent, *counts = table.tolist()
            return PushPull(square, [int(count) for count in counts], int(sent))

        background = Background(work)

        def result() -> PushPull:
            visit = background.result()
            self._links.traffic.add(visit.sent, background.seconds, background.waited)
            return visit

        return result

    def read(self, out: Sequence[Tensor]) -> list[int]:
        """Write the center into vectors, and return the counts: the same on every rank (collective over all ranks)."""
        self._links.gather(None)  # nobody visits any more
        layout = self.center.layout
        counts = torch.zeros(len(layout.leaders), dtype=torch.int64)
        if layout.rank == layout.host:
            _, seen = self.center.read(out)
            counts.copy_(torch.tensor(seen))
        with deadline("receive the center"):
            for tensor in (counts, *out):
                dist.broadcast(tensor, layout.host)
        return counts.tolist()

    def write(self, values: Sequence[Tensor], counts: Sequence[int]) -> None:
        """Set the center and the counts (collective over all ranks)."""
        if self.center.layout.is_client:
            self.center.write(values, counts)
        self._links.gather(None)
