"""One average over replicas, from the first message to the last."""

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.comm.wire import DTYPES, Wire, sum_over
from lightning_hetero.errors import NotFiniteError


class Average(NamedTuple):
    """What replicas learn when they meet; bitwise the same on every rank.

    Attributes:
        mean: weighted mean of all replicas: vectors on the CPU, in fp32 or wider.
        healthy: whether each replica's values were finite; the mean leaves the others out.
        distance: RMS distance of the replicas from their mean: the square root of the weighted mean of squared
            Euclidean distances, over all values.
        notes: the number that each replica had for the others.
    """

    mean: list[Tensor]
    healthy: list[bool]
    distance: float
    notes: list[float]


class Lane:
    """Process groups for one average at a time: gloo runs the work of a group in order.

    Global group ``i`` holds one rank of each replica: its member ``i``, modulo its size. The inner group holds the
    ranks of this replica.

    Args:
        rank: this process's.
        replicas: the ranks of each replica.
        turns: global groups to make.
        timeout: longest wait for another rank.
    """

    def __init__(self, rank: int, replicas: Sequence[Sequence[int]], turns: int, timeout: timedelta) -> None:
        self._rank = rank
        self.index = next(i for i, ranks in enumerate(replicas) if rank in ranks)
        self.count, self._size = len(replicas), len(replicas[self.index])
        self._members = [[ranks[turn % len(ranks)] for ranks in replicas] for turn in range(turns)]
        # Every process takes part in the making of every group.
        self._across = [dist.new_group(ranks, timeout=timeout, backend="gloo") for ranks in self._members]
        inner = [dist.new_group(list(ranks), timeout=timeout, backend="gloo") for ranks in replicas]
        self._inner = inner[self.index]

    def average(
        self,
        moved: Sequence[Tensor],
        weights: Sequence[float],
        reference: Sequence[Tensor],
        wire: Wire,
        turn: int,
        note: float,
        skip: bool,
    ) -> Average:
        """Average over replicas; blocks (collective over all ranks).

        Args:
            moved: by how much this replica's values differ from the reference; overwritten.
            weights: one per replica, at least 0, not all 0.
            reference: the same on all ranks.
            wire: number format of the differences between replicas.
            turn: the global group that exchanges.
            note: a number for the others; that of the rank that exchanges counts.
            skip: whether replicas that are not finite are left out.

        Raises:
            NotFiniteError: on every rank, if one may not be left out, or none is left.
        """
        active, across = self._members[turn][self.index], self._across[turn]
        square = sum(float(move.dot(move)) for move in moved)
        table = torch.empty(self.count, 2, dtype=torch.float64)  # of each replica: its squared distance, its note
        if self._rank == active:
            dist.all_gather(list(table), torch.tensor([square, note], dtype=torch.float64), group=across)
        self._tell(table, active)
        squares, notes = table.unbind(1)
        healthy = squares.isfinite()
        if not healthy.all() and not (skip and healthy.any()):
            raise NotFiniteError([i for i, well in enumerate(healthy.tolist()) if not well])
        shares = torch.tensor(weights, dtype=torch.float64) * healthy
        shares /= shares.sum()
        share, mean = shares[self.index].item(), []
        variance = float(shares @ squares.nan_to_num(0.0, 0.0))
        for move, old in zip(moved, reference, strict=True):
            total = move.mul_(share) if healthy[self.index] else move.zero_()
            if self._rank == active:
                total = sum_over(across, total, wire)
            elif DTYPES[wire] is not None:
                total = torch.empty_like(total, dtype=DTYPES[wire])
            self._tell(total, active)
            total = total.to(old.dtype)
            variance -= float(total.dot(total))
            mean.append(total.add_(old))
        return Average(mean, healthy.tolist(), math.sqrt(max(variance, 0.0)), notes.tolist())

    def _tell(self, flat: Tensor, source: int) -> None:
        """Give all ranks of the replica the vector of one of them, in place."""
        if self._size > 1:
            dist.broadcast(flat, source, group=self._inner)
