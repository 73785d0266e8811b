"""What connects replicas: averages between them, and broadcasts within each of them."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.all_reduce import Average, Contribution, ReplicaAllReduce, Want
from lightning_hetero.comm.background import Background
from lightning_hetero.comm.deadline import deadline
from lightning_hetero.comm.encodings import Feedback, encoding_of
from lightning_hetero.comm.encodings.sums import bytes_sent
from lightning_hetero.comm.groups import Groups
from lightning_hetero.comm.topology import group_of


@dataclass
class Traffic:
    """What this replica's exchanges have cost so far.

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

    Attributes:
        index: number of this rank's replica.
        count: number of replicas.
        leads: whether this rank is the first of its replica, its leader.
        members: how many members the largest replica has, of which one exchanges in :meth:`begin`.
        traffic: what exchanges have cost so far.
    """

    def __init__(
        self,
        rank: int,
        replicas: Sequence[Sequence[int]],
        groups: Groups,
        on_nan: Literal["error", "skip"] = "error",
    ) -> None:
        skip = on_nan == "skip"
        self._foreground = ReplicaAllReduce(rank, replicas, groups, "averages", skip)
        self._background = ReplicaAllReduce(rank, replicas, groups, "averages in the background", skip)
        self._another = partial(ReplicaAllReduce, groups=groups, skip=skip)
        self._groups = groups
        self.index, self.count = group_of(rank, replicas), len(replicas)
        self._rank, self._ranks = rank, replicas[self.index]
        self.leads = rank == self._ranks[0]
        self.members = max(len(ranks) for ranks in replicas)
        self.traffic = Traffic()
        self._latest: Exchange | None = None

    def gather(self, value: Any) -> list[Any]:
        """One value per rank (collective over all ranks)."""
        return gather(value, "what the replicas have")

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
    ) -> Average:
        """Weighted mean over replicas, in the vectors' own format (collective over all ranks).

        Args:
            values: floating vectors, the same on all ranks of a replica.
            weights: one per replica, at least 0, not all 0; the same on all ranks.
            reference: vectors on the CPU, in fp32 or wider, the same on all ranks. All replicas are near it: what
                travels is the difference from it.
            out: where to write the mean; like the reference. Default: new memory.
            payload: a number for the other replicas. The one of the replica's leader counts.

        Raises:
            NotFiniteError: on every rank, if a replica's values are not finite and it may not be skipped.
        """
        return self.exchange(Contribution(values, weights, reference, payload=payload), out)

    def exchange(self, own: Contribution, out: Sequence[Tensor] | None = None, want: Want = "mean") -> Average:
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

    def averager_apart(self, replicas: Sequence[Sequence[int]]) -> Callable[[Contribution, Sequence[Tensor]], Average]:
        """Make a function that averages on a thread, whatever else is under way (collective over those who do).

        Args:
            replicas: the ranks of each replica that take part, this one among them.

        Returns:
            A function of what this replica brings, and of where to write the mean. It blocks.
        """
        apart = self._another(self._rank, replicas, purpose="averages apart")
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
        return None if encoding_of(wire) is None or self.count == 1 else Feedback(wire, lengths, self.count)

    def prepare(self) -> None:
        """Make the process groups that :meth:`begin` needs, so that it never has to (collective over all ranks)."""
        for member in range(self.members if self.count > 1 else 0):
            self._background.route(member)

    def begin(self, own: Contribution, out: Sequence[Tensor], member: int = 0, want: Want = "mean") -> "Exchange":
        """Begin to average in the background (collective over all ranks).

        If the exchange before is still under way, this one waits for it, in the background: so messages have the same
        order on all ranks.

        Args:
            own: what this replica brings. Neither its values nor its reference may change until the result is there.
            out: where to write the mean, or the difference; like the reference.
            member: which rank of each replica exchanges, modulo the size of the replica.
            want: which vectors to compute. ``"away"`` overwrites this replica's values with them.
        """
        route, own, before = self._background.route(member), _on_cpu(own), self._latest

        def work() -> Average:
            if before is not None:
                before.wait()
            with deadline("average with the other replicas in the background"):
                return self._background.average(own, out, want, route)

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
        coded = [0] * len(own.reference) if own.feedback is None else [len(rest) for rest in own.feedback.sent]
        plain = own.wire if own.feedback is None else "fp32"
        sent = 0
        for old, first in zip(own.reference, coded, strict=True):
            size = old.element_size() if own.feedback is None else 4
            sent += bytes_sent(first, 4, own.wire, self.count)
            sent += bytes_sent(old.numel() - first, size, plain, self.count)
        self.traffic.add(sent, seconds, exposed)
        self.traffic.distance = average.distance
        self.traffic.skipped += [i for i, healthy in enumerate(average.healthy) if not healthy]


class Exchange:
    """An average that is being taken in the background.

    Args:
        links: over which it runs.
        work: takes the average.
        own: what this replica brings.
    """

    def __init__(self, links: ReplicaLinks, work: Callable[[], Average], own: Contribution) -> None:
        self._links, self._own = links, own
        self._background = Background(work)

    def result(self) -> Average:
        """Wait for the average. Ask once."""
        average = self._background.result()
        self._links._account(average, self._own, self._background.seconds, self._background.waited)
        return average

    def wait(self) -> None:
        """Wait for its end, well or with an error."""
        self._background.wait()

    @property
    def seconds(self) -> float:
        """How long the average took, once it has ended."""
        return self._background.seconds


def _on_cpu(own: Contribution) -> Contribution:
    values = [value.to("cpu", old.dtype) for value, old in zip(own.values, own.reference, strict=True)]
    return replace(own, values=values)
