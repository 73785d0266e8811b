"""Cluster of a forecast: ranks, links and a model, as measured or as assumed."""

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_hetero.batching.shares import Cost, makespan, split
from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.failures import deadline
from lightning_hetero.errors import ConfigurationError

#: Part of a step during which gradients can travel: the backward pass, but for its first layers.
HIDDEN = 0.5
#: Bytes of DDP's buckets. This package makes them smaller where one would take longer than ``TRAVEL`` seconds.
BUCKET, LEAST, TRAVEL = 25 * 2**20, 2**20, 0.01
#: Bytes of parameters per second that a rank packs, mixes and unpacks around an exchange, on a core (some six passes
#: through memory); ``benchmarks/cluster/predicted.py`` compares with measurements.
HANDLING = 5e8


class LinkModel(NamedTuple):
    """A link: a message of ``n`` bytes takes ``latency + n / bandwidth`` seconds.

    Attributes:
        latency: seconds, one way.
        bandwidth: bytes per second, one way.

    Example::

        >>> from lightning_hetero.planning.cluster import LinkModel
        >>> gigabit = LinkModel(0.0002, 125e6)
        >>> round(gigabit.all_reduce(100e6, 2), 4), round(gigabit.pair(100e6), 4)
        (0.8004, 0.8002)
    """

    latency: float
    bandwidth: float

    def all_reduce(self, size: float, members: int) -> float:
        """Seconds for a ring all-reduce of ``size`` bytes among ``members``, if all links are like this one."""
        rounds = 2 * (members - 1)
        return rounds * (size / members / self.bandwidth + self.latency)

    def pair(self, size: float) -> float:
        """Seconds in which two swap ``size`` bytes, both ways at once."""
        return self.latency + size / self.bandwidth

    def visit(self, size: float) -> float:
        """Seconds in which one sends ``size`` bytes to a center, and then gets as many back."""
        return 2 * self.pair(size)


#: In place of a link that no two ranks have, so that nobody has measured it: memory.
MEMORY = LinkModel(2e-5, 5e9)


@dataclass(frozen=True)
class Cluster:
    """Ranks, links and a model.

    Attributes:
        nodes: of each node, the costs of its ranks: seconds of a step on n samples.
        samples: of all ranks together in a step.
        size: bytes of the gradients in fp32, which is that of the parameters.
        within: the way between ranks of a node.
        between: the way out of a node, which all of its ranks share.
        hidden: part of a step during which gradients can travel, if they travel in small enough buckets.
        handling: bytes of parameters per second that a rank packs, mixes and unpacks around an exchange.
        given: samples of each rank in a step, if they do not follow its speed.

    Raises:
        ConfigurationError: there is no rank, or fewer samples than ranks.

    Example: two nodes of two ranks, 25 million parameters, 0.3 s a step of 64 samples each, 1 Gbit::

        >>> from lightning_hetero.planning.cluster import Cluster, LinkModel
        >>> from lightning_hetero.batching.shares import Cost
        >>> rank = Cost(0.02, 0.28 / 64)
        >>> cluster = Cluster(((rank, rank), (rank, rank)), 256, 100e6, LinkModel(2e-5, 5e9), LinkModel(2e-4, 125e6))
        >>> cluster.world, round(cluster.even, 3), round(cluster.split, 3)
        (4, 0.3, 0.3)
    """

    nodes: tuple[tuple[Cost, ...], ...]
    samples: int
    size: float
    within: LinkModel
    between: LinkModel
    hidden: float = HIDDEN
    handling: float = HANDLING
    given: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.nodes or not all(self.nodes):
            raise ConfigurationError(f"{len(self.nodes)} nodes, some without a rank: give at least one rank each.")
        if type(self.samples) is not int or self.samples < self.world:
            raise ConfigurationError(
                f"{self.samples!r} samples for {self.world} ranks: give a whole number, at least one each."
            )
        for cost in self.ranks:
            if not cost.is_valid() or cost.fixed < 0:
                raise ConfigurationError(f"a rank has {cost}: seconds are finite, and above 0 for a sample.")
        for way in (self.within, self.between):
            if not (0 <= way.latency < math.inf and 0 < way.bandwidth < math.inf):
                raise ConfigurationError(f"a link has {way}: a latency of at least 0 s, and a bandwidth above 0.")
        if self.given and (len(self.given) != self.world or sum(self.given) != self.samples):
            raise ConfigurationError(f"given={self.given}: {self.samples} samples for {self.world} ranks are needed.")
        for value, what in ((self.size, "of parameters"), (self.handling, "of parameters packed per second")):
            if not 0 < value < math.inf:
                raise ConfigurationError(f"{value} bytes {what}: give a number above 0.")

    @property
    def ranks(self) -> tuple[Cost, ...]:
        """The costs of all ranks, node by node."""
        return tuple(cost for node in self.nodes for cost in node)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.nodes))

    @property
    def largest(self) -> int:
        """Ranks of the largest node."""
        return max(map(len, self.nodes))

    @cached_property
    def even(self) -> float:
        """Seconds of a step with the same number of samples on each rank."""
        most = -(-self.samples // self.world)
        return max(cost.seconds(most) for cost in self.ranks)

    @cached_property
    def shares(self) -> Sequence[int]:
        """Samples of each rank, split by speed, at least one each; or as given."""
        return self.given or split(self.samples, self.ranks, [1] * self.world)

    @cached_property
    def split(self) -> float:
        """Seconds of a step whose samples are split by speed."""
        return makespan(self.shares, self.ranks)

    @cached_property
    def independent_speed(self) -> float:
        """Samples per second of all ranks together, each alone with an even share."""
        each = self.samples / self.world
        return sum(each / cost.seconds(each) for cost in self.ranks)

    @cached_property
    def paces(self) -> tuple[float, ...]:
        """Seconds of a step of each rank on its share, where none waits for another."""
        return tuple(cost.seconds(share) for cost, share in zip(self.ranks, self.shares, strict=True))

    def gradients(self, size: float | None = None) -> float:
        """Seconds of an all-reduce over all ranks: one ring, which enters and leaves each node once.

        Args:
            size: bytes. Default: those of the gradients.
        """
        way = self.between if len(self.nodes) > 1 else self.within
        return way.all_reduce(self.size if size is None else size, self.world)

    def inside(self) -> float:
        """Seconds of an all-reduce of the gradients within the largest node."""
        return self.within.all_reduce(self.size, self.largest)

    def across(self, size: float | None = None) -> float:
        """Seconds of an all-reduce between one rank of each node.

        Args:
            size: bytes. Default: those of the parameters.
        """
        return self.between.all_reduce(self.size if size is None else size, len(self.nodes))

    def exposed(self, seconds: float, work: float, *, by_link: bool = True) -> float:
        """Seconds for which ranks wait for their gradients after a backward pass.

        Gradients travel a bucket at a time while the pass goes on. The last bucket is complete only when the pass is
        over, so ranks always wait for it. A model that fits in one bucket hides nothing.

        Args:
            seconds: that all gradients take.
            work: seconds of the step.
            by_link: whether the size of buckets follows the link, as in this package, or is the default of DDP.

        Example: 0.4 s of gradients behind a step of 0.6 s, in many buckets and in one::

            >>> from lightning_hetero.planning.cluster import Cluster, LinkModel
            >>> from lightning_hetero.batching.shares import Cost
            >>> nodes = ((Cost(0.2, 0.01),), (Cost(0.2, 0.01),))
            >>> cluster = Cluster(nodes, 80, 4e6, LinkModel(0, 1e9), LinkModel(0, 1e7))
            >>> round(cluster.exposed(0.4, cluster.split), 3), cluster.exposed(0.4, cluster.split, by_link=False)
            (0.105, 0.4)
        """
        if not seconds:
            return 0.0
        bucket = min(max(TRAVEL * self.size / seconds, LEAST), BUCKET) if by_link else BUCKET
        return max(seconds - self.hidden * work, seconds * min(bucket / self.size, 1.0))

    def with_nodes(self, count: int) -> "Cluster":
        """The same cluster with another number of nodes, whose kinds repeat, and as many samples for each rank."""
        nodes = tuple(self.nodes[i % len(self.nodes)] for i in range(count))
        ranks = sum(map(len, nodes))
        return replace(self, nodes=nodes, given=(), samples=max(round(self.samples / self.world * ranks), ranks))


#: A message that takes this many seconds is long enough to tell the bandwidth.
LONG = 0.1
#: Elements of the shortest and the longest message to tell the bandwidth from, in fp32: 256 KiB and 64 MiB.
FIRST, LAST = 1 << 16, 1 << 24
ROUNDS = 30


class MeasuredLink(NamedTuple):
    """The way between two ranks.

    Attributes:
        ranks: at its ends.
        latency: seconds for a message of 4 bytes, one way.
        bandwidth: bytes per second, one way.
    """

    ranks: tuple[int, int]
    latency: float
    bandwidth: float


def slowest_link(some: Sequence[MeasuredLink], size: float) -> LinkModel | None:
    """The link over which a message of ``size`` bytes takes longest; ``None``: there is no link."""
    return max((LinkModel(link.latency, link.bandwidth) for link in some), key=lambda way: way.pair(size), default=None)


def pairs_to_measure(nodes: Sequence[Sequence[int]]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs of ranks to measure.

    Returns:
        Within nodes: the first two ranks of each. Between nodes: the first rank of each with that of the next.
    """
    within = [(ranks[0], ranks[1]) for ranks in nodes if len(ranks) > 1]
    firsts = [ranks[0] for ranks in nodes]
    between = list(pairwise(firsts))
    if len(firsts) > 2:
        between.append((firsts[-1], firsts[0]))
    return within, between


def measure_links(chosen: Sequence[tuple[int, int]]) -> list[MeasuredLink]:
    """Measure one pair of ranks after the other, over gloo (collective).

    Raises:
        CommunicationError: another rank did not take part in time.
    """
    links: list[MeasuredLink] = []
    for pair in chosen:
        link = None
        with deadline(f"measure the link between ranks {pair[0]} and {pair[1]}"):
            if dist.get_rank() == pair[0]:
                link = _time(pair)
            elif dist.get_rank() == pair[1]:
                _answer(pair[0])
        links.append(gather(link, "the speed of links")[pair[0]])
    return links


def _time(pair: tuple[int, int]) -> MeasuredLink:
    _there_and_back(pair[1], 1)  # opens the connection
    latency = median(_there_and_back(pair[1], 1) for _ in range(ROUNDS)) / 2
    elements = FIRST
    while True:
        seconds = min(_there_and_back(pair[1], elements) for _ in range(2)) / 2
        if seconds >= LONG or elements >= LAST:
            break
        elements *= 4
    dist.send(torch.zeros(1, dtype=torch.int64), pair[1])  # that was all
    return MeasuredLink(pair, latency, 4 * elements / max(seconds - latency, 1e-9))


def _there_and_back(other: int, elements: int) -> float:
    message = torch.zeros(elements)
    dist.send(torch.tensor([elements]), other)
    dist.recv(torch.empty(1), other)  # it is ready, its memory at hand
    began = time.perf_counter()
    dist.send(message, other)
    dist.recv(message, other)
    return time.perf_counter() - began


def _answer(other: int) -> None:
    announced = torch.zeros(1, dtype=torch.int64)
    while True:
        dist.recv(announced, other)
        if not announced.item():
            return
        message = torch.zeros(int(announced.item()))
        dist.send(torch.zeros(1), other)
        dist.recv(message, other)
        dist.send(message, other)


def duration(seconds: float) -> str:
    """Seconds in words."""
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


def bytes_per_second(text: str) -> float:
    """A rate such as ``1gbit``, ``200mbit`` or ``125MB``, in bytes per second.

    Args:
        text: a number, then ``bit``, ``bps`` (bits), ``B``, ``byte`` or ``bytes``, perhaps after ``k``, ``m`` or ``g``.

    Raises:
        ConfigurationError: it is none, or could be of bits as well as of bytes.

    Example::

        >>> from lightning_hetero.planning.cluster import bytes_per_second
        >>> bytes_per_second("200mbit"), bytes_per_second("1.5 GB/s")
        (25000000.0, 1500000000.0)
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?([kmg]?)(bps|bit|bits|b|byte|bytes)(?:/s)?", text.strip(), re.I)
    if found is None:
        raise ConfigurationError(f"{text!r} is no rate: write 1gbit, 200mbit or 125MB")
    number, unit, what = found.groups()
    if what == "b":
        raise ConfigurationError(
            f"{text!r} can be of bits or of bytes: write {number}{unit.lower()}bit or {number}{unit.upper()}B"
        )
    return float(number) * _UNITS[unit.lower()] / (8 if what.lower() in ("bps", "bit", "bits") else 1)
