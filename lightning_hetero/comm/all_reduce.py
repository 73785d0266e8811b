"""Averages vectors over replicas: one rank of each replica exchanges them with the others, and informs its replica."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.comm.buffer_pool import BufferPool
from lightning_hetero.comm.encodings import Encoding, Feedback, encoding_of
from lightning_hetero.comm.encodings.sums import encoded_sum
from lightning_hetero.comm.groups import Groups
from lightning_hetero.comm.replica import finite
from lightning_hetero.comm.topology import group_of
from lightning_hetero.comm.wire import DTYPES, sum_over
from lightning_hetero.errors import NotFiniteError

#: Which vectors of an average are computed: the mean; the mean and ``away``; or the difference from the reference.
Want = Literal["mean", "away", "difference"]
CHUNK = 1 << 16  # elements that are worked on at a time, so that several vectors of them fit into a core's cache


@dataclass(frozen=True)
class Contribution:
    """What a replica brings to an average, and what all replicas know of it.

    Attributes:
        values: floating vectors, the same on all ranks of a replica.
        weights: one per replica, at least 0, not all 0; the same on all ranks.
        reference: vectors on the CPU, in fp32 or wider, the same on all ranks. All replicas are near it: what travels
            is the difference from it.
        wire: number format of what travels between replicas.
        payload: a number for the other replicas. The one of the rank that exchanges counts.
        feedback: what earlier messages have left out, and which values travel on a low-bit wire; such wires need it.
            It is updated on all ranks.
    """

    values: Sequence[Tensor]
    weights: Sequence[float]
    reference: Sequence[Tensor]
    wire: str = "fp32"
    payload: float = math.nan
    feedback: Feedback | None = None


class Average(NamedTuple):
    """What replicas learn from an average. All but ``away`` is bitwise the same on every rank.

    Attributes:
        mean: weighted mean of the replicas' values: vectors on the CPU, in fp32 or wider. Empty if only the difference
            was asked for.
        difference: the mean minus the reference, as vectors. Empty unless asked for.
        away: the mean minus this replica's values, as vectors. Empty unless asked for.
        healthy: of each replica, whether its values were finite. The mean leaves the others out.
        distance: RMS distance of the replicas from their mean: the square root of the weighted mean of squared
            Euclidean distances, over all values. What a low-bit wire leaves out blurs it.
        displacement: RMS distance of the replicas from the reference, computed like ``distance``.
        payloads: the payload of each replica.
    """

    mean: list[Tensor]
    difference: list[Tensor]
    away: list[Tensor]
    healthy: list[bool]
    distance: float
    displacement: float
    payloads: list[float]


class Route(NamedTuple):
    """The ranks and process groups over which an average runs.

    Attributes:
        across: the exchanging rank of each replica, in the order of replicas; ``None``: there is one replica, or this
            rank does not exchange.
        inner: the ranks of this replica; ``None``: there is one.
        active: the rank of this replica that exchanges.
    """

    across: dist.ProcessGroup | None
    inner: dist.ProcessGroup | None
    active: int


class ReplicaAllReduce:
    """Takes one average at a time, over process groups of its own.

    In each replica one rank exchanges with the other replicas: its member ``i``, modulo its size.

    Args:
        rank: this process.
        replicas: the ranks of each replica.
        groups: makes the process groups.
        purpose: tells these groups from those of other uses.
        skip: whether replicas that are not finite are left out, instead of raising an error.
    """

    def __init__(self, rank: int, replicas: Sequence[Sequence[int]], groups: Groups, purpose: str, skip: bool) -> None:
        self._rank, self._replicas, self._groups = rank, replicas, groups
        self._purpose, self._skip = purpose, skip
        self._index = group_of(rank, replicas)
        self._pool = BufferPool()
        self._encodings: dict[str, Encoding] = {}

    def route(self, member: int) -> Route:
        """Make the process groups of one member per replica, unless they are there (collective; not on a thread)."""
        members = [ranks[member % len(ranks)] for ranks in self._replicas]
        active, across = members[self._index], None
        if self._rank == active:
            across = self._groups.bulk(f"{self._purpose}, across replicas, member {member}", members)
        inner = self._groups.bulk(f"{self._purpose}, within a replica", self._replicas[self._index])
        return Route(across, inner, active)

    def average(self, own: Contribution, out: Sequence[Tensor], want: Want, route: Route) -> Average:
        """Average over replicas; blocks (collective over all ranks).

        Args:
            own: what this replica brings, with vectors on the CPU that may be overwritten.
            out: where to write the mean, or the difference; of the reference's sizes and dtypes.
            want: which vectors to compute. ``"away"`` overwrites this replica's values with them.
            route: of :meth:`route`.

        Raises:
            NotFiniteError: on every rank, if one replica may not be left out, or none is left.
        """
        parts = torch.tensor(own.weights, dtype=torch.float64) / sum(own.weights)
        totals, table = self._exchange_distances(own, parts[self._index].item(), route)
        squares, payloads = table.unbind(1)
        healthy = squares.isfinite()
        if not healthy.all() and not (self._skip and (parts[healthy] > 0).any()):
            raise NotFiniteError([i for i, well in enumerate(healthy.tolist()) if not well])
        counted = parts[healthy].sum().item()
        displacement = (parts[healthy] @ squares[healthy]).item() / counted
        variance = displacement
        for i, (value, old, new) in enumerate(zip(own.values, own.reference, out, strict=True)):
            if self._rank == route.active:
                total = totals[i] if healthy[self._index] else totals[i].zero_()
                totals[i] = total if route.across is None else self._sum(route.across, total, own.feedback, i)
            self._broadcast(totals[i], route)
            for rest in () if own.feedback is None else (own.feedback.sent[i], own.feedback.summed[i]):
                self._broadcast(rest, route)  # another rank may exchange next time
            origin, from_ = None if want == "difference" else old, value if want == "away" else None
            variance -= self._arrive(totals[i], origin, new, 1 / counted, from_)
        mean, difference = ([], list(out)) if want == "difference" else (list(out), [])
        away = list(own.values) if want == "away" else []
        distance = math.sqrt(max(variance, 0.0))
        return Average(mean, difference, away, healthy.tolist(), distance, math.sqrt(displacement), payloads.tolist())

    def _exchange_distances(self, own: Contribution, part: float, route: Route) -> tuple[list[Tensor], Tensor]:
        """Tell all replicas how far this one is from the reference, and its payload.

        Returns:
            This replica's weighted differences from the reference, in the format of the wire, on the rank that
            exchanges; and a row of each replica: its squared distance from the reference, its payload.
        """
        totals = [self._pool.vector(f"total {i}", old.numel(), _dtype(own, old)) for i, old in enumerate(own.reference)]
        table = torch.empty(len(self._replicas), 2, dtype=torch.float64)
        if self._rank == route.active:
            square = 0.0
            for value, old, total in zip(own.values, own.reference, totals, strict=True):
                square += self._differ(value, old, total, part)
            row = torch.tensor([square, own.payload], dtype=torch.float64)
            if route.across is None:
                table[0] = row
            else:
                dist.all_gather(list(table), row, group=route.across)
        self._broadcast(table, route)
        return totals, table

    def _sum(self, group: dist.ProcessGroup, own: Tensor, feedback: Feedback | None, i: int) -> Tensor:
        """The sum of the ``i``-th vectors; see :func:`sum_over` and :func:`encoded_sum`."""
        if feedback is None:
            return sum_over(group, own, self._pool)
        if feedback.wire not in self._encodings:
            encoding = encoding_of(feedback.wire)
            assert encoding is not None
            self._encodings[feedback.wire] = encoding
        sent, summed = feedback.sent[i], feedback.summed[i]
        coded, exact = own[: len(sent)], own[len(sent) :]
        if len(coded):
            encoded_sum(group, coded, self._encodings[feedback.wire], sent, summed, self._pool)
        if len(exact):
            sum_over(group, exact, self._pool)  # in place, since it is in fp32
        return own

    @staticmethod
    def _broadcast(flat: Tensor, route: Route) -> None:
        if route.inner is not None and len(flat):
            dist.broadcast(flat, route.active, group=route.inner)

    def _differ(self, value: Tensor, old: Tensor, own: Tensor, part: float) -> float:
        """``own = part * (value - old)``; returns the squared norm of the difference."""
        square = 0.0
        for x, r, o in zip(value.split(CHUNK), old.split(CHUNK), own.split(CHUNK), strict=True):
            moved = torch.sub(x, r, out=self._pool.vector("chunk", len(r), r.dtype))
            square += float(moved.dot(moved))
            o.copy_(moved.mul_(part))
            if o.dtype not in (r.dtype, torch.bfloat16) and not finite([o]):
                return math.inf  # too large for the wire
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


def _dtype(own: Contribution, old: Tensor) -> torch.dtype:
    """Of the differences from a reference that are summed."""
    return torch.float32 if own.feedback is not None else DTYPES.get(own.wire) or old.dtype  # low bits: of one replica
