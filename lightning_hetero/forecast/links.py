"""How fast ranks can talk to each other."""

import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.deadline import deadline
from lightning_hetero.forecast.cluster import Way

#: A message that takes this many seconds is long enough to tell the bandwidth.
LONG = 0.1
#: Elements of the shortest and the longest message to tell the bandwidth from, in fp32: 256 KiB and 64 MiB.
FIRST, LAST = 1 << 16, 1 << 24
ROUNDS = 30


class Link(NamedTuple):
    """The way between two ranks.

    Attributes:
        ranks: at its ends.
        latency: seconds for a message of 4 bytes, one way.
        bandwidth: bytes per second, one way.
    """

    ranks: tuple[int, int]
    latency: float
    bandwidth: float

    def all_reduce(self, size: int, members: int) -> float:
        """Seconds for a ring all-reduce of ``size`` bytes, if all links are like this one."""
        return Way(self.latency, self.bandwidth).all_reduce(size, members)


def slowest(some: Sequence[Link], size: float) -> Way | None:
    """The link over which a message of ``size`` bytes takes longest; ``None``: there is no link."""
    return max((Way(link.latency, link.bandwidth) for link in some), key=lambda way: way.pair(size), default=None)


def pairs(nodes: Sequence[Sequence[int]]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
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


def measure(chosen: Sequence[tuple[int, int]]) -> list[Link]:
    """Measure one pair of ranks after the other, over gloo (collective).

    Raises:
        CommunicationError: another rank did not take part in time.
    """
    links = []
    for pair in chosen:
        link = None
        with deadline(f"measure the link between ranks {pair[0]} and {pair[1]}"):
            if dist.get_rank() == pair[0]:
                link = _time(pair)
            elif dist.get_rank() == pair[1]:
                _answer(pair[0])
        links.append(gather(link, "the speed of links")[pair[0]])
    return [Link(*link) for link in links]


def _time(pair: tuple[int, int]) -> Link:
    _there_and_back(pair[1], 1)  # opens the connection
    latency = median(_there_and_back(pair[1], 1) for _ in range(ROUNDS)) / 2
    elements = FIRST
    while True:
        seconds = min(_there_and_back(pair[1], elements) for _ in range(2)) / 2
        if seconds >= LONG or elements >= LAST:
            break
        elements *= 4
    dist.send(torch.zeros(1, dtype=torch.int64), pair[1])  # that was all
    return Link(pair, latency, 4 * elements / max(seconds - latency, 1e-9))


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
