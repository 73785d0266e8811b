"""One average over replicas, from the first message to the last."""

import math
from collections.abc import Sequence
from datetime import timedelta
from itertools import repeat
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.comm.buffer_pool import BufferPool
from lightning_hetero.comm.groups import new_group
from lightning_hetero.comm.replica import finite
from lightning_hetero.comm.topology import group_of
from lightning_hetero.comm.wire import DTYPES, Wire, sum_over
from lightning_hetero.errors import NotFiniteError

#: What an average is wanted as: the mean; also how far it is from one's own values; or how far from the reference.
Want = Literal["mean", "away", "difference"]
CHUNK = 1 << 16  # elements that are worked on at a time, so that several vectors of them fit into a core's cache


class Average(NamedTuple):
    """What replicas learn when they meet; bitwise the same on every rank.

    Attributes:
        mean: weighted mean of all replicas: vectors on the CPU, in fp32 or wider. Or, if that is wanted, its difference
            from the reference.
        away: the mean minus this replica's values, as vectors, if asked for; else empty. The only one that differs
            between replicas.
        healthy: whether each replica's values were finite; the mean leaves the others out.
        distance: RMS distance of the replicas from their mean: the square root of the weighted mean of squared
            Euclidean distances, over all values.
        displacement: RMS distance of the replicas from the reference, computed like ``distance``.
        payloads: the number that each replica had for the others.
    """

    mean: list[Tensor]
    away: list[Tensor]
    healthy: list[bool]
    distance: float
    displacement: float
    payloads: list[float]


class ReplicaAllReduce:
    """Process groups for one average at a time: gloo runs the work of a group in order.

    Global group ``i`` holds one rank of each replica: its member ``i``, modulo its size. The inner group holds the
    ranks of this replica.

    Args:
        rank: this process's.
        replicas: the ranks of each replica.
        turns: global groups to make.
        timeout: longest wait for another rank.

    Attributes:
        index: number of this rank's replica.
        count: number of replicas.
    """

    def __init__(self, rank: int, replicas: Sequence[Sequence[int]], turns: int, timeout: timedelta) -> None:
        self._rank = rank
        self.index = group_of(rank, replicas)
        self.count, self._size = len(replicas), len(replicas[self.index])
        self._members = [[ranks[turn % len(ranks)] for ranks in replicas] for turn in range(turns)]
        # Every process takes part in the making of every group.
        self._across = [new_group(self, ranks, timeout) for ranks in self._members]
        self._leader = replicas[self.index][0]
        inner = [new_group(self, ranks, timeout) for ranks in replicas]
        self._inner = inner[self.index]
        self._pool = BufferPool()

    def average(
        self,
        values: Sequence[Tensor],
        weights: Sequence[float],
        reference: Sequence[Tensor],
        out: Sequence[Tensor],
        wire: Wire,
        turn: int,
        payload: float,
        skip: bool,
        want: Want,
    ) -> Average:
        """Average over replicas; blocks (collective over all ranks).

        Args:
            values: this replica's: vectors on the CPU; may be overwritten.
            weights: one per replica, at least 0, not all 0.
            reference: vectors on the CPU, in fp32 or wider, the same on all ranks, near which all replicas are: what
                travels is the difference.
            out: where to write the mean; of the reference's sizes and dtypes.
            wire: number format of the differences between replicas.
            turn: the global group that exchanges.
            payload: a number for the others; that of the rank that exchanges counts.
            skip: whether replicas that are not finite are left out.
            want: ``"away"`` overwrites the values.

        Raises:
            NotFiniteError: on every rank, if one may not be left out, or none is left.
        """
        active, across = self._members[turn][self.index], self._across[turn]
        parts = torch.tensor(weights, dtype=torch.float64) / sum(weights)
        totals = [
            self._pool.vector(f"total {i}", old.numel(), DTYPES[wire] or old.dtype) for i, old in enumerate(reference)
        ]
        table = torch.empty(self.count, 2, dtype=torch.float64)  # of each replica: its squared distance, its payload
        if self._rank == active:
            square = 0.0
            for value, old, own in zip(values, reference, totals, strict=True):
                square += self._differ(value, old, own, parts[self.index].item())
            dist.all_gather(list(table), torch.tensor([square, payload], dtype=torch.float64), group=across)
        self._broadcast(table, active)
        squares, payloads = table.unbind(1)
        healthy = squares.isfinite()
        if not healthy.all() and not (skip and (parts[healthy] > 0).any()):
            raise NotFiniteError([i for i, well in enumerate(healthy.tolist()) if not well])
        counted = parts[healthy].sum().item()
        displacement = (parts[healthy] @ squares[healthy]).item() / counted
        variance = displacement
        for i, (value, old, mean) in enumerate(zip(values, reference, out, strict=True)):
            if self._rank == active:
                own = totals[i] if healthy[self.index] else totals[i].zero_()
                totals[i] = sum_over(across, own, self._pool)
            self._broadcast(totals[i], active)
            origin, apart = None if want == "difference" else old, value if want == "away" else None
            variance -= self._arrive(totals[i], origin, mean, 1 / counted, apart)
        distances = math.sqrt(max(variance, 0.0)), math.sqrt(displacement)
        return Average(
            list(out), list(values) if want == "away" else [], healthy.tolist(), *distances, payloads.tolist()
        )

    def _differ(self, value: Tensor, old: Tensor, own: Tensor, part: float) -> float:
        """``own = part * (value - old)``; returns the squared norm of the difference."""
        square = 0.0
        for x, r, o in zip(value.split(CHUNK), old.split(CHUNK), own.split(CHUNK), strict=True):
            moved = torch.sub(x, r, out=self._pool.vector("chunk", len(r), r.dtype))
            square += float(moved.dot(moved))
            o.copy_(moved.mul_(part))
            if o.dtype == torch.float16 and not finite([o]):
                return math.inf  # too large for it
        return square

    @staticmethod
    def _arrive(total: Tensor, old: Tensor | None, mean: Tensor, factor: float, value: Tensor | None) -> float:
        """``mean = old + factor * total``; ``value = mean - value``, if any. The squared norm of ``factor * total``."""
        square = 0.0
        olds, values = (repeat(None) if tensor is None else tensor.split(CHUNK) for tensor in (old, value))
        for t, m, r, x in zip(total.split(CHUNK), mean.split(CHUNK), olds, values, strict=False):
            m.copy_(t)
            if factor != 1:
                m.mul_(factor)
            square += float(m.dot(m))
            if r is not None:
                m.add_(r)
            if x is not None:
                torch.sub(m, x, out=x)
        return square

    def broadcast(self, flat: Tensor) -> None:
        """Give all ranks of the replica the vector of its first, in place (collective over the replica)."""
        self._broadcast(flat, self._leader)

    def _broadcast(self, flat: Tensor, source: int) -> None:
        """Give all ranks of the replica the vector of one of them, in place."""
        if self._size > 1:
            dist.broadcast(flat, source, group=self._inner)
