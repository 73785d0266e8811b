"""How many bytes of gradients to send at a time, by how long they take to travel."""

import math
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_hetero.comm.deadline import deadline

MEBIBYTE = 1 << 20
#: Seconds that a bucket should travel: the last one, which nothing is left to hide behind, costs about so much.
TRAVEL = 0.01
#: What sending a bucket costs whatever its size may be this part of its time at most.
OVERHEAD = 0.1
#: PyTorch's own bucket size in MiB: buckets never get larger than that, nor smaller than 1 MiB.
DEFAULT = 25
#: Elements of the first and the longest message to measure with, in fp32: 64 KiB and 4 MiB.
FIRST, LAST = 1 << 14, 1 << 20
#: The quickest of so many messages counts: other processes may hold some of them up.
TRIES = 5
#: A message that takes so many seconds longer than a few bytes tells the speed of the link.
LONG = 0.02
#: A message that takes so many seconds is sent once only.
SLOW = 0.1


class Travel(NamedTuple):
    """How long an all-reduce over some ranks takes.

    Attributes:
        latency: seconds, for a few bytes.
        seconds_per_byte: for each byte more.
    """

    latency: float
    seconds_per_byte: float

    def bucket_mib(self) -> int | None:
        """How large DDP's buckets should be, in MiB, a power of 2; ``None``: as PyTorch has them.

        DDP sends a bucket when the last of its gradients is ready. If one bucket holds nearly all gradients, it is sent
        when there is nothing left to compute meanwhile. Buckets that are too small pay the link's latency too often.
        """
        bytes_ = max(TRAVEL, self.latency / OVERHEAD) / max(self.seconds_per_byte, 1e-15)
        if bytes_ >= DEFAULT * MEBIBYTE:
            return None
        size = 1
        while 2 * size * MEBIBYTE <= bytes_:
            size *= 2
        return size


def measure(group: dist.ProcessGroup | None, device: torch.device) -> Travel:
    """Time a few all-reduces (collective): some tenths of a second at most but on links far below 100 Mbit.

    Args:
        group: the ranks that average gradients.
        device: where their gradients are.

    Returns:
        The same on every rank: the times of the slowest.

    Raises:
        CommunicationError: another rank did not take part in time.
    """
    with deadline("measure how fast gradients travel"):
        _agreed(0.0, group, device)  # opens the connections
        latency = _quickest(1, group, device)
        elements = FIRST
        while True:
            seconds = _quickest(elements, group, device)
            if seconds - latency >= LONG or elements >= LAST:
                return Travel(latency, max(seconds - latency, 0.0) / (4 * elements))
            elements *= 4


def all_agree(yes: bool, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether all ranks of a group say yes (collective)."""
    with deadline("settle the size of gradient buckets"):
        return _agreed(float(not yes), group, device) == 0


def _quickest(elements: int, group: dist.ProcessGroup | None, device: torch.device) -> float:
    quickest = math.inf
    for _ in range(TRIES):
        quickest = min(quickest, _seconds(elements, group, device))
        if quickest >= SLOW:
            break
    return quickest


def _seconds(elements: int, group: dist.ProcessGroup | None, device: torch.device) -> float:
    message = torch.zeros(elements, device=device)
    _agreed(0.0, group, device)  # all begin together
    began = time.perf_counter()
    dist.all_reduce(message, group=group)
    message[0].item()  # waits for a device that computes behind the host's back
    return _agreed(time.perf_counter() - began, group, device)


def _agreed(value: float, group: dist.ProcessGroup | None, device: torch.device) -> float:
    """The largest value of all ranks, so that all decide alike."""
    largest = torch.tensor(value, dtype=torch.float32, device=device)  # some devices have no float64
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest.item()
