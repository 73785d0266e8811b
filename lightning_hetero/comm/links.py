"""The wires between replicas."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.all_reduce import Average, ReplicaAllReduce, Want
from lightning_hetero.comm.background import Background
from lightning_hetero.comm.deadline import deadline
from lightning_hetero.comm.wire import Wire, bytes_sent


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
    """Lets replicas average vectors: one rank of each exchanges them, and tells its own replica.

    There are two lanes, so that an average can be taken while another is under way in the background.

    Args:
        rank: this process's.
        replicas: the ranks of each replica.
        timeout: longest wait for another replica.
        on_nan: what to do about a replica whose values are not finite: ``"error"`` on every rank, or ``"skip"`` it.

    Attributes:
        index: number of this rank's replica.
        count: number of replicas.
        leads: whether this rank is the first of its replica.
        turns: global groups that take turns in :meth:`begin`: as many as the largest replica has ranks.
        traffic: what exchanges have cost so far.
    """

    def __init__(
        self,
        rank: int,
        replicas: Sequence[Sequence[int]],
        timeout: timedelta,
        on_nan: Literal["error", "skip"] = "error",
    ) -> None:
        self.turns = max(len(ranks) for ranks in replicas)
        self._foreground = ReplicaAllReduce(rank, replicas, 1, timeout)
        self._background = ReplicaAllReduce(rank, replicas, self.turns, timeout)
        self.index, self.count = self._foreground.index, self._foreground.count
        self.leads = rank == replicas[self.index][0]
        self.traffic = Traffic()
        self._skip = on_nan == "skip"

    def gather(self, value: Any) -> list[Any]:
        """One value per rank (collective over all ranks)."""
        return gather(value, "what the replicas have")

    def broadcast(self, tensor: Tensor) -> None:
        """Give all ranks of the replica what its first has, in place (collective over the replica, on a thread)."""
        self._background.broadcast(tensor)

    def average(
        self,
        flats: Sequence[Tensor],
        weights: Sequence[float],
        reference: Sequence[Tensor],
        out: Sequence[Tensor] | None = None,
        wire: Wire = "fp32",
        payload: float = math.nan,
        want: Want = "mean",
    ) -> Average:
        """Weighted mean over replicas (collective over all ranks).

        Args:
            flats: floating vectors, the same on all ranks of a replica.
            weights: one per replica, at least 0, not all 0.
            reference: vectors on the CPU, in fp32 or wider, the same on all ranks, near which all replicas are: what
                travels is the difference.
            out: where to write the mean; like the reference. Default: new memory.
            wire: number format.
            payload: a number for the others; that of the replica's first rank counts.
            want: what of the average; ``"away"`` overwrites the vectors with it.

        Raises:
            NotFiniteError: on every rank, unless such replicas are to be skipped and there are others.
        """
        began = time.perf_counter()
        values, out = _on_cpu(flats, reference), out or [torch.empty_like(old) for old in reference]
        with deadline("average with the other replicas"):
            average = self._foreground.average(values, weights, reference, out, wire, 0, payload, self._skip, want)
        seconds = time.perf_counter() - began
        self._account(average, wire, seconds, seconds)
        return average

    def begin(
        self,
        flats: Sequence[Tensor],
        weights: Sequence[float],
        reference: Sequence[Tensor],
        out: Sequence[Tensor],
        wire: Wire,
        turn: int,
        payload: float,
        want: Want = "mean",
    ) -> "Exchange":
        """Begin to average in the background (collective over all ranks; one at a time).

        Args:
            flats: as for :meth:`average`; must not be used until the result is there.
            weights: as for :meth:`average`.
            reference: as for :meth:`average`; must not change until the result is there.
            out: as for :meth:`average`.
            wire: number format.
            turn: the global group that exchanges.
            payload: a number for the others; that of the rank that exchanges counts.
            want: as for :meth:`average`.
        """
        values = _on_cpu(flats, reference)

        def work() -> Average:
            with deadline("average with the other replicas in the background"):
                return self._background.average(values, weights, reference, out, wire, turn, payload, self._skip, want)

        return Exchange(self, work, wire)

    def _account(self, average: Average, wire: Wire, seconds: float, exposed: float) -> None:
        if self.count == 1:
            return
        sent = sum(bytes_sent(mean.numel(), mean.element_size(), wire, self.count) for mean in average.mean)
        self.traffic.add(sent, seconds, exposed)
        self.traffic.distance = average.distance
        self.traffic.skipped += [i for i, healthy in enumerate(average.healthy) if not healthy]


class Exchange:
    """An average that is being taken in the background.

    Args:
        links: that it runs over.
        work: takes the average.
        wire: number format.
    """

    def __init__(self, links: ReplicaLinks, work: Callable[[], Average], wire: Wire) -> None:
        self._links, self._wire = links, wire
        self._background = Background(work)

    def result(self) -> Average:
        """Wait for the average; to be asked once."""
        average = self._background.result()
        self._links._account(average, self._wire, self._background.seconds, self._background.waited)
        return average

    @property
    def seconds(self) -> float:
        """How long it took, once it has ended."""
        return self._background.seconds


def _on_cpu(flats: Sequence[Tensor], reference: Sequence[Tensor]) -> list[Tensor]:
    return [flat.to("cpu", old.dtype) for flat, old in zip(flats, reference, strict=True)]
