"""All-reduce over replicas: one rank of each replica averages vectors with the others, and informs its replica."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, repeat
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_hetero.comm.agreement import gather, value_of_rank
from lightning_hetero.comm.columns import Cut, Layout, LayoutInColumns, join, spread
from lightning_hetero.comm.compression import (
    DTYPES,
    Encoding,
    Feedback,
    bytes_sent,
    encoded_sum,
    encoding_of,
    low_bit_encoding,
    sum_over,
)
from lightning_hetero.comm.failures import deadline
from lightning_hetero.comm.groups import Groups
from lightning_hetero.comm.object_collectives import finite
from lightning_hetero.comm.staging import PIECE, BufferPool, HostStage, no_wait, pinned
from lightning_hetero.comm.threads import Background
from lightning_hetero.comm.topology import group_of
from lightning_hetero.errors import HeteroError, NotFiniteError

#: Which vectors of an average are computed: the mean; the mean and ``away``; or the difference from the reference.
AveragePart = Literal["mean", "away", "difference"]
#: How replicas exchange means for which all of them wait.
Between = Literal["auto", "nccl", "gloo"]
T = TypeVar("T")
CHUNK = 1 << 16  # elements that are worked on at a time, so that several vectors of them fit into a core's cache


def in_chunks(*lists: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Chunks of the vectors of several lists, side by side: what is computed of them takes no memory of their size."""
    for vectors in zip(*lists, strict=True):
        yield from zip(*(vector.split(CHUNK) for vector in vectors), strict=True)


@dataclass(frozen=True)
class Contribution:
    """Contribution of a replica to an average, and what all replicas know of it.

    Attributes:
        values: floating vectors, the same on all ranks of a replica.
        weights: one per replica, at least 0, not all 0; the same on all ranks.
        reference: vectors on the CPU, in fp32 or wider, the same on all ranks. All replicas are near it: what travels
            is the difference from it.
        wire: number format of what travels between replicas.
        payload: a number for the other replicas. The one of the rank that exchanges counts.
        feedback: what earlier messages have left out, and which values travel on a low-bit wire; such wires need it.
            It is updated on all ranks.
        copied: waits until the values are there; called before they are read, where they are averaged in the
            background.
        layout: of each vector, the values in it, by name. Default: those of the replica's vectors, in order.
    """

    values: Sequence[Tensor]
    weights: Sequence[float]
    reference: Sequence[Tensor]
    wire: str = "fp32"
    payload: float = math.nan
    feedback: Feedback | None = None
    copied: Callable[[], object] = no_wait
    layout: Layout | None = None


class Average(NamedTuple):
    """Result of an average on each replica. All but ``away`` is bitwise the same on every rank.

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
            rank does not exchange. With shards all ranks.
        inner: the ranks of this replica; ``None``: there is one, or each has a shard of its own.
        active: the rank of this replica that exchanges; with shards this one.
        columns: with shards, the ranks with which this one exchanges parts of them.
    """

    across: dist.ProcessGroup | None
    inner: dist.ProcessGroup | None
    active: int
    columns: tuple[dist.ProcessGroup | None, ...] = ()


@dataclass(eq=False)
class ReplicaAllReduce:
    """Takes one average at a time, over process groups of its own.

    In each replica one rank exchanges with the other replicas: its member ``i``, modulo its size.

    Attributes:
        rank: this process.
        replicas: the ranks of each replica.
        groups: makes the process groups.
        skip: whether replicas that are not finite are left out, instead of raising an error.
        columns: where each rank has a shard of its replica's values, the ranks with which this one exchanges parts of
            its own, one of each replica. All ranks exchange at once then.
        cut: cuts values into the parts for each column; ``None``: there is one column.
        purpose: tells these groups from those of other uses.
        on_devices: sums over the first ranks of all replicas by way of their devices, where it is faster.
        layout: of each vector of the replica, the values in it, by name.
    """

    rank: int
    replicas: Sequence[Sequence[int]]
    groups: Groups
    skip: bool
    columns: Sequence[Sequence[int]]
    cut: Cut | None
    purpose: str
    on_devices: "DeviceAllReduce | None" = None
    layout: Layout = ()
    _pool: BufferPool = field(default_factory=BufferPool, init=False)
    _encodings: dict[str, Encoding] = field(default_factory=dict, init=False)

    @property
    def _index(self) -> int:
        return group_of(self.rank, self.replicas)

    def route(self, member: int) -> Route:
        """Make the process groups of one member per replica, unless they are there (collective; not on a thread).

        They are gloo's; where all members are on one host, shared memory (:meth:`Groups.bulk`).
        """
        if self.columns:
            columns = [self.groups.bulk(f"{self.purpose}, column {list(own)}", own) for own in self.columns]
            everyone = self.groups.get(f"{self.purpose}, distances", sorted(chain(*self.replicas)))
            return Route(everyone, None, self.rank, tuple(columns))
        members = [ranks[member % len(ranks)] for ranks in self.replicas]
        active, across = members[self._index], None
        if self.rank == active:
            across = self.groups.bulk(f"{self.purpose}, across replicas, member {member}", members)
        inner = self.groups.bulk(f"{self.purpose}, within a replica", self.replicas[self._index])
        return Route(across, inner, active)

    def average(self, own: Contribution, out: Sequence[Tensor], want: AveragePart, route: Route) -> Average:
        """Average over replicas; blocks (collective over all ranks).

        Args:
            own: what this replica brings, with vectors on the CPU that may be overwritten.
            out: where to write the mean, or the difference; of the reference's sizes and dtypes, in other memory.
            want: which vectors to compute. ``"away"`` overwrites this replica's values with them.
            route: of :meth:`route`.

        Raises:
            NotFiniteError: on every rank, if one replica may not be left out, or none is left.
        """
        parts = torch.tensor(own.weights, dtype=torch.float64) / sum(own.weights)
        # What travels lies where its sum will, if it is of that format: so it takes no memory of its own.
        totals = [
            new if new.dtype == (wire := _dtype(own, old)) else self._pool.vector(f"total {i}", old.numel(), wire)
            for i, (old, new) in enumerate(zip(own.reference, out, strict=True))
        ]
        table = self._exchange_distances(own, parts[self._index].item(), totals, route)
        squares, payloads = table.unbind(1)
        healthy = squares.isfinite()
        if not healthy.all() and not (self.skip and (parts[healthy] > 0).any()):
            raise NotFiniteError([i for i, well in enumerate(healthy.tolist()) if not well])
        counted = parts[healthy].sum().item()
        displacement = (parts[healthy] @ squares[healthy]).item() / counted
        arrived = 0.0
        for i, (value, old, new) in enumerate(zip(own.values, own.reference, out, strict=True)):
            if self.rank == route.active:
                total = totals[i] if healthy[self._index] else totals[i].zero_()
                totals[i] = self._sum_over_replicas(route, total, own, i)
            self._broadcast(totals[i], route)
            for rest in () if own.feedback is None else (own.feedback.sent[i], own.feedback.summed[i]):
                self._broadcast(rest, route)  # another rank may exchange next time
            origin = None if want == "difference" else old
            away_from = value if want == "away" else None
            arrived += self._arrive(totals[i], origin, new, 1 / counted, away_from)
        if route.columns:  # this rank knows a part of it
            arrived = _summed(arrived, route.across) / len(self.replicas)
        variance = displacement - arrived
        mean, difference = ([], list(out)) if want == "difference" else (list(out), [])
        away = list(own.values) if want == "away" else []
        distance = math.sqrt(max(variance, 0.0))
        return Average(mean, difference, away, healthy.tolist(), distance, math.sqrt(displacement), payloads.tolist())

    def _exchange_distances(self, own: Contribution, part: float, totals: Sequence[Tensor], route: Route) -> Tensor:
        """Tell all replicas how far this one is from the reference, and its payload.

        Args:
            own: what this replica brings.
            part: its weight, 0 to 1.
            totals: where to write its weighted differences from the reference, on the rank that exchanges.
            route: of the average.

        Returns:
            A row of each replica: its squared distance from the reference, its payload.
        """
        table = torch.empty(len(self.replicas), 2, dtype=torch.float64)
        if self.rank == route.active:
            square = 0.0
            for value, old, total in zip(own.values, own.reference, totals, strict=True):
                square += self._differ(value, old, total, part)
            row = torch.tensor([square, own.payload], dtype=torch.float64)
            if route.across is None:
                table[0] = row
            elif route.columns:  # of each replica the sum over its shards, and the payload of its leader
                rows = row.new_empty(sum(map(len, self.replicas)), 2)
                dist.all_gather(list(rows), row, group=route.across)
                for i, ranks in enumerate(self.replicas):
                    table[i, 0], table[i, 1] = rows[list(ranks), 0].sum(), rows[ranks[0], 1]
            else:
                dist.all_gather(list(table), row, group=route.across)
        self._broadcast(table, route)
        return table

    def _sum_over_replicas(self, route: Route, total: Tensor, own: Contribution, i: int) -> Tensor:
        """The sum of the ``i``-th vectors of all replicas, in place: ``total`` is this replica's at first."""
        if not route.columns:
            return total if route.across is None else self._sum(route.across, total, own.feedback, i)
        if self.cut is None:
            [everyone] = route.columns
            return total if everyone is None else self._sum(everyone, total, own.feedback, i)
        columns = LayoutInColumns(own.layout or self.layout, self.cut)
        if len(total) != columns.sizes[i]:
            raise HeteroError(
                f"a vector of {len(total)} values was to be exchanged between replicas of unequal size, and vector {i} "
                f"of the replica has {columns.sizes[i]}. Say which values they are: average(..., layout=...)."
            )
        segments = columns.segments(i)
        joined = [join(total, segments, column) for column in range(len(route.columns))]  # some values are in several
        for column, group in enumerate(route.columns):
            if not len(joined[column]) or group is None:
                continue
            feedback, all_of = None, own.feedback
            if all_of is not None:
                feedback = all_of.of_message(i, column, join(all_of.sent[i], segments, column))
            spread(self._sum(group, joined[column], feedback, 0), total, segments, column)
            if all_of is not None and feedback is not None:
                spread(feedback.sent[0], all_of.sent[i], segments, column)
        return total

    def _sum(self, group: dist.ProcessGroup, own: Tensor, feedback: Feedback | None, i: int) -> Tensor:
        """The sum of the ``i``-th vectors; see :func:`sum_over` and :func:`encoded_sum`."""
        if feedback is None:
            if self.on_devices is not None and own.dtype.itemsize > 2 and self.on_devices.is_faster(group):
                return self.on_devices.sum(own)
            return sum_over(group, own, self._pool)
        if feedback.wire not in self._encodings:
            self._encodings[feedback.wire] = low_bit_encoding(feedback.wire)
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


def _summed(value: float, group: dist.ProcessGroup | None) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return total.item()


def _dtype(own: Contribution, old: Tensor) -> torch.dtype:
    """The dtype in which differences from a reference are summed."""
    return torch.float32 if own.feedback is not None else DTYPES.get(own.wire) or old.dtype  # low bits: of one replica


@dataclass
class Traffic:
    """Cost of this replica's exchanges so far.

    Attributes:
        exchanges: with other replicas.
        bytes: that this replica has sent to others, without the network's own headers.
        seconds: for which exchanges were under way.
        exposed: of these, seconds for which this rank waited.
        distance: RMS distance of the replicas from their mean at the last exchange.
        skipped: replicas that were left out, once for each time.
    """

    exchanges: int = 0
    bytes: int = 0
    seconds: float = 0.0
    exposed: float = 0.0
    distance: float = math.nan
    skipped: list[int] = field(default_factory=list)

    def add(self, sent: int, seconds: float, exposed: float) -> None:
        """Count an exchange: its bytes, for how long it was under way, and for how much of that this rank waited."""
        self.exchanges += 1
        self.bytes += sent
        self.seconds += seconds
        self.exposed += exposed


class ReplicaLinks:
    """Lets replicas average vectors, and the ranks of a replica share what its leader knows.

    An average can be taken while another one is under way in the background: each has process groups of its own, and so
    have broadcasts. Groups are made when they are first needed.

    Args:
        rank: this process.
        replicas: the ranks of each replica.
        groups: makes the process groups.
        on_nan: what to do about a replica with values that are not finite: ``"error"`` on every rank, or ``"skip"`` it.
        on_devices: of this rank, if replicas may exchange by way of their devices while they wait for the result.
        columns: where each rank has a shard of its replica's values, the ranks with which this one exchanges parts of
            its own. Each rank is the leader for its shard then, and has nothing to tell its replica.
        cut: cuts values into the parts for each column; ``None``: there is one column.

    Attributes:
        index: number of this rank's replica.
        count: number of replicas.
        is_leader: whether this rank is the first of its replica, its leader.
        members: how many members the largest replica has, of which one exchanges in :meth:`begin`.
        traffic: what exchanges have cost so far.
    """

    def __init__(
        self,
        rank: int,
        replicas: Sequence[Sequence[int]],
        groups: Groups,
        on_nan: Literal["error", "skip"] = "error",
        on_devices: "DeviceAllReduce | None" = None,
        columns: Sequence[Sequence[int]] = (),
        cut: Cut | None = None,
    ) -> None:
        skip = on_nan == "skip"
        self._foreground = ReplicaAllReduce(rank, replicas, groups, skip, columns, cut, "averages", on_devices)
        self._background = replace(self._foreground, purpose="averages in the background", on_devices=None)
        self._groups, self._replicas = groups, replicas
        self.index, self.count = group_of(rank, replicas), len(replicas)
        self._rank, self._ranks = rank, (rank,) if columns else replicas[self.index]
        self._columns, self._cut = list(map(tuple, columns)), cut
        self.is_leader = rank == self._ranks[0]
        self.members = 1 if columns else max(len(ranks) for ranks in replicas)
        self.traffic = Traffic()
        self._latest: Exchange | None = None

    def lay_out(self, layout: Layout) -> None:
        """Say which values are in the vectors of this rank's replica, by name; those of shards may be in columns."""
        self._foreground.layout = self._background.layout = layout

    @property
    def columns(self) -> list[tuple[int, ...]]:
        """The ranks, one of each replica, with which this one exchanges vectors, or parts of them; if it does."""
        return self._columns or [self._leaders][: self.is_leader]

    @property
    def _leaders(self) -> tuple[int, ...]:
        return tuple(ranks[0] for ranks in self._replicas)

    @property
    def in_columns(self) -> LayoutInColumns | None:
        """The cut of this rank's vectors into parts for several columns; ``None``: there is one column."""
        return self.cut(self._foreground.layout)

    def cut(self, layout: Layout) -> LayoutInColumns | None:
        """The cut of vectors of a layout into parts for several columns; ``None``: there is one column."""
        return None if self._cut is None else LayoutInColumns(layout, self._cut)

    def gather(self, value: Any) -> list[Any]:
        """One value per rank (collective over all ranks)."""
        return gather(value, "what the replicas have")

    def gather_of_replicas(self, value: T) -> list[T]:
        """One value per replica: its leader's, or where each rank has a shard, that of the rank that has this one's.

        Collective over all ranks.
        """
        return self.gather_in_columns([value] * max(len(self._columns), 1))[0]

    def gather_in_columns(self, values: Sequence[T]) -> list[list[T]]:
        """Of each column of this rank one value per replica; see :meth:`gather_of_replicas`.

        Args:
            values: of this rank, one for each of its columns; one where it has no shard.
        """
        columns = self._columns or [self._leaders]
        everyone = self.gather(dict(zip(columns, values, strict=True)))
        return [[everyone[rank][ranks] for rank in ranks] for ranks in columns]

    def broadcast_from_first(self, tensors: Sequence[Tensor], cut: LayoutInColumns | None = None) -> None:
        """Give all ranks the tensors of the first replica, in place; where each has a shard, those of this shard.

        Collective over all ranks.

        Args:
            tensors: vectors, the same on all ranks of a replica, or of this rank's shard.
            cut: of the vectors into parts for several columns. Default: each column has all of them.
        """
        if not self._columns:
            for tensor in tensors:
                dist.broadcast(tensor, self._replicas[0][0])
            return
        received = list[list[Tensor]]()
        for number, ranks in enumerate(self._columns):
            group = self._groups.get("from one rank to those with its shard", ranks)
            received.append([t.clone() for t in tensors] if cut is None else cut.parts(tensors, number))
            for part in received[-1] if group is not None else ():
                dist.broadcast(part, ranks[0], group=group)
        if cut is not None:
            cut.put(received, tensors)
            return
        for tensor, part in zip(tensors, received[0], strict=True):
            tensor.copy_(part)

    def value_of(self, rank: int, value: T) -> T:
        """The value of a rank; where each has a shard, of the one of its replica that has this one's.

        Collective over all ranks.
        """
        if not self._columns:
            return value_of_rank(value, rank)
        index, columns, theirs = group_of(rank, self._replicas), self.in_columns, list[Any]()
        for number, ranks in enumerate(self._columns):
            group = self._groups.get("values of those with the same shard", ranks)
            part = value if columns is None else columns.pieces(value, number)
            theirs.append(part if group is None else gather(part, "the state of a replica", group)[index])
        return theirs[0] if columns is None else columns.whole(theirs)

    def broadcast(self, tensor: Tensor) -> None:
        """Give all ranks of the replica the tensor of its leader, in place (collective over the replica).

        It may be called while an average is under way in the background. Work in the background needs
        :meth:`broadcaster`.
        """
        self.broadcaster("broadcasts")(tensor)

    def broadcaster(self, purpose: str) -> Callable[[Tensor], None]:
        """Make a function like :meth:`broadcast` for work in the background (collective over the replica).

        Args:
            purpose: broadcasts that run at the same time need different ones.
        """
        group = self._groups.bulk(f"{purpose}, within a replica", self._ranks)

        def broadcast(tensor: Tensor) -> None:
            if group is not None:
                dist.broadcast(tensor, self._ranks[0], group=group)

        return broadcast

    def average(
        self,
        values: Sequence[Tensor],
        weights: Sequence[float],
        reference: Sequence[Tensor],
        out: Sequence[Tensor] | None = None,
        payload: float = math.nan,
        layout: Layout | None = None,
    ) -> Average:
        """Weighted mean over replicas, in the vectors' own format (collective over all ranks).

        Args:
            values: floating vectors, the same on all ranks of a replica.
            weights: one per replica, at least 0, not all 0; the same on all ranks.
            reference: vectors on the CPU, in fp32 or wider, the same on all ranks. All replicas are near it: what
                travels is the difference from it.
            out: where to write the mean; like the reference. Default: new memory.
            payload: a number for the other replicas. The one of the replica's leader counts.
            layout: of each vector, the values in it, by name. Default: those of the replica's vectors, in order.

        Raises:
            NotFiniteError: on every rank, if a replica's values are not finite and it may not be skipped.
        """
        return self.exchange(Contribution(values, weights, reference, payload=payload, layout=layout), out)

    def exchange(self, own: Contribution, out: Sequence[Tensor] | None = None, want: AveragePart = "mean") -> Average:
        """Average over replicas with all options, and wait for the result (collective over all ranks).

        Args:
            own: what this replica brings.
            out: where to write the mean, or the difference; like the reference. Default: new memory.
            want: which vectors to compute. ``"away"`` overwrites this replica's values with them.

        Raises:
            NotFiniteError: on every rank, if a replica's values are not finite and it may not be skipped.
        """
        began = time.perf_counter()
        out = out or [torch.empty_like(old) for old in own.reference]
        route = self._foreground.route(0)
        with deadline("average with the other replicas"):
            average = self._foreground.average(_on_cpu(own), out, want, route)
        seconds = time.perf_counter() - began
        self._account(average, own, seconds, seconds)
        return average

    def background_averager(
        self, replicas: Sequence[Sequence[int]]
    ) -> Callable[[Contribution, Sequence[Tensor]], Average]:
        """Make a function that averages on a thread, whatever else is under way (collective over those who do).

        Args:
            replicas: the ranks of each replica that take part, this one among them.

        Returns:
            A function of what this replica brings, and of where to write the mean. It blocks.
        """
        apart = replace(self._background, replicas=replicas, purpose="averages apart")
        route = apart.route(0)

        def average(own: Contribution, out: Sequence[Tensor]) -> Average:
            began = time.perf_counter()
            with deadline("average with the other replicas, to save it"):
                result = apart.average(_on_cpu(own), out, "mean", route)
            self._account(result, own, time.perf_counter() - began, 0.0)
            return result

        return average

    def feedback(self, wire: str, lengths: Sequence[int]) -> Feedback | None:
        """Make what a low-bit wire needs; ``None`` for other wires, and where there is one replica.

        Args:
            wire: number format of exchanges.
            lengths: of each vector, how many of its first values travel on the wire.
        """
        if encoding_of(wire) is None or self.count == 1:
            return None
        in_columns = [self._lengths(None, i, length) for i, length in enumerate(lengths)]
        return Feedback(wire, in_columns, self.count)

    def _lengths(self, layout: Layout | None, i: int, stop: int) -> list[int]:
        """Of each column, how many of the first values of a vector it exchanges."""
        if self._cut is None:
            return [stop]
        segments = LayoutInColumns(layout or self._foreground.layout, self._cut).segments(i)
        return [
            sum(end - start for column, start, end in segments if column == number and end <= stop)
            for number in range(len(self._columns))
        ]

    def prepare(self) -> None:
        """Make the process groups that :meth:`begin` needs, so that it never has to (collective over all ranks)."""
        for member in range(self.members if self.count > 1 else 0):
            self._background.route(member)

    def begin(
        self, own: Contribution, out: Sequence[Tensor], member: int = 0, want: AveragePart = "mean"
    ) -> "Exchange":
        """Begin to average in the background (collective over all ranks).

        If the exchange before is still under way, this one waits for it, in the background: so messages have the same
        order on all ranks.

        Args:
            own: what this replica brings. Neither its values nor its reference may change until the result is there.
            out: where to write the mean, or the difference; like the reference.
            member: which rank of each replica exchanges, modulo the size of the replica.
            want: which vectors to compute. ``"away"`` overwrites this replica's values with them.
        """
        route, before = self._background.route(member), self._latest

        def work() -> Average:
            if before is not None:
                before.wait()
            own.copied()
            with deadline("average with the other replicas in the background"):
                return self._background.average(_on_cpu(own), out, want, route)

        self._latest = Exchange(self, work, own)
        return self._latest

    def abandon(self) -> None:
        """Wait until what is under way in the background has ended; its connections are broken already."""
        if self._latest is not None:
            self._latest.wait()
            self._latest = None

    def _account(self, average: Average, own: Contribution, seconds: float, exposed: float) -> None:
        if self.count == 1:
            return
        plain = own.wire if own.feedback is None else "fp32"
        sent = 0
        for i, old in enumerate(own.reference):
            size, coded = (old.element_size(), 0) if own.feedback is None else (4, len(own.feedback.sent[i]))
            ends = (self._lengths(own.layout, i, end) for end in (coded, old.numel()))
            for first, length in zip(*ends, strict=True):
                sent += bytes_sent(first, 4, own.wire, self.count)
                sent += bytes_sent(length - first, size, plain, self.count)
        self.traffic.add(sent, seconds, exposed)
        self.traffic.distance = average.distance
        self.traffic.skipped += [i for i, healthy in enumerate(average.healthy) if not healthy]


class Exchange(Background[Average]):
    """An average that is being taken in the background. Its result counts as an exchange: ask for it once.

    Args:
        links: over which it runs.
        work: takes the average.
        own: what this replica brings.
    """

    def __init__(self, links: ReplicaLinks, work: Callable[[], Average], own: Contribution) -> None:
        self._links, self._own = links, own
        super().__init__(work)

    @override
    def result(self, seconds: float | None = None) -> Average:
        average = super().result(seconds)
        self._links._account(average, self._own, self.seconds, self.waited)
        return average


class DeviceAllReduce:
    """All-reduce of vectors of the host over GPUs that NCCL connects: a piece at a time, by way of their memory.

    Args:
        group: of these GPUs, one of each replica.
        device: of this rank.
        measure: whether to use it only if it is faster than the network of the hosts, which is tried once.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, measure: bool) -> None:
        self._group, self._device, self._stage = group, device, HostStage(device)
        self._is_faster = None if measure else True

    def is_faster(self, hosts: dist.ProcessGroup) -> bool:
        """Whether this route is to be taken; the same on all ranks (collective when called first).

        Args:
            hosts: the same ranks, connected by the network of their hosts.
        """
        if self._is_faster is None:
            message = pinned(LAST, torch.float32).zero_()
            self.sum(message)  # opens the connections
            routes = partial(dist.all_reduce, message, group=hosts), partial(self.sum, message)
            on_hosts, on_devices = (_quickest(route, hosts, message.device) for route in routes)
            self._is_faster = on_devices < on_hosts
            rank_zero_info(
                f"Replicas exchange {'over NCCL' if self._is_faster else 'over gloo'}: 4 MiB take "
                f"{1e3 * on_devices:.1f} ms over NCCL, {1e3 * on_hosts:.1f} ms over gloo (between='auto')."
            )
        return self._is_faster

    def sum(self, own: Tensor) -> Tensor:
        """Sum a vector in place (collective); blocks.

        Args:
            own: on the host, in fp32 or wider, best in pinned memory.

        Returns:
            The same vector.
        """
        size = max(PIECE // own.element_size(), len(own) // 16, 1)
        memory = torch.empty(min(size, len(own)), dtype=own.dtype, device=self._device)
        for piece in own.split(size):
            there = memory[: len(piece)]
            there.copy_(piece, non_blocking=self._stage.has_streams)
            dist.all_reduce(there, group=self._group)
            piece.copy_(there, non_blocking=self._stage.has_streams)
        if (done := self._stage.ready()) is not None:
            done.synchronize()
        return own


def _on_cpu(own: Contribution) -> Contribution:
    values = [value.to("cpu", old.dtype) for value, old in zip(own.values, own.reference, strict=True)]
    return replace(own, values=values)


MEBIBYTE = 1 << 20
#: Seconds that a bucket should take. The last bucket costs about that much, since no computation is left to hide it.
TRAVEL = 0.01
#: The fixed cost of sending a bucket may be at most this part of its time.
OVERHEAD = 0.1
#: PyTorch's own bucket size in MiB. Buckets never get larger than that, nor smaller than 1 MiB.
DEFAULT = 25
#: Elements of the first and the longest message to measure with, in fp32: 64 KiB and 4 MiB.
FIRST, LAST = 1 << 14, 1 << 20
#: The fastest of so many messages counts: other processes may delay some of them.
TRIES = 5
#: A message shows the speed of the link if it takes so many seconds longer than a few bytes do.
LONG = 0.02
#: A message that takes so many seconds is sent only once.
SLOW = 0.1


class AllReduceTime(NamedTuple):
    """Time model of an all-reduce over some ranks.

    Attributes:
        latency: seconds, for a few bytes.
        seconds_per_byte: for each further byte.
    """

    latency: float
    seconds_per_byte: float

    def bucket_mib(self) -> int | None:
        """The size of DDP's buckets in MiB, a power of 2; ``None``: PyTorch's own size.

        DDP sends a bucket when the last of its gradients is ready. If one bucket holds nearly all gradients, nothing is
        left to compute while it travels. If buckets are too small, they pay the link's latency too often.
        """
        bytes_ = max(TRAVEL, self.latency / OVERHEAD) / max(self.seconds_per_byte, 1e-15)
        if bytes_ >= DEFAULT * MEBIBYTE:
            return None
        size = 1
        while 2 * size * MEBIBYTE <= bytes_:
            size *= 2
        return size


def measure_all_reduce(group: dist.ProcessGroup | None, device: torch.device) -> AllReduceTime:
    """Time a few all-reduces (collective). Takes some tenths of a second, and longer on links far below 100 Mbit.

    Args:
        group: the ranks that average gradients.
        device: where their gradients are.

    Returns:
        The times of the slowest rank, the same on every rank.

    Raises:
        CommunicationError: another rank did not take part in time.
    """
    with deadline("measure how fast gradients travel"):
        _agreed(0.0, group, device)  # opens the connections
        latency = _quickest(_message(1, group, device), group, device)
        elements = FIRST
        while True:
            seconds = _quickest(_message(elements, group, device), group, device)
            if seconds - latency >= LONG or elements >= LAST:
                return AllReduceTime(latency, max(seconds - latency, 0.0) / (4 * elements))
            elements *= 4


def all_agree(yes: bool, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether all ranks of a group say yes (collective).

    Args:
        yes: this rank's answer.
        group: the ranks.
        device: of the message.
    """
    with deadline("settle the size of gradient buckets"):
        return _agreed(float(not yes), group, device) == 0


def _message(elements: int, group: dist.ProcessGroup | None, device: torch.device) -> Callable[[], object]:
    """Sends a message of some elements, and waits for it."""
    message = torch.zeros(elements, device=device)

    def send() -> None:
        dist.all_reduce(message, group=group)
        message[0].item()  # waits for the device

    return send


def _quickest(send: Callable[[], object], group: dist.ProcessGroup | None, device: torch.device) -> float:
    """The fewest seconds that something has taken on the slowest rank; the same on every rank (collective)."""
    quickest = math.inf
    for _ in range(TRIES):
        _agreed(0.0, group, device)  # so that all begin together
        began = time.perf_counter()
        send()
        quickest = min(quickest, _agreed(time.perf_counter() - began, group, device))
        if quickest >= SLOW:
            break
    return quickest


def _agreed(value: float, group: dist.ProcessGroup | None, device: torch.device) -> float:
    """The largest value of all ranks, so that all decide the same."""
    largest = torch.tensor(value, dtype=torch.float32, device=device)  # some devices have no float64
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest.item()
