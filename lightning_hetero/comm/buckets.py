"""Chooses how many bytes of gradients to send at a time, by how fast the link is."""

import math
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_hetero.comm.deadline import deadline

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


class Travel(NamedTuple):
    """How long an all-reduce over some ranks takes.

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


def measure(group: dist.ProcessGroup | None, device: torch.device) -> Travel:
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
        latency = _quickest(1, group, device)
        elements = FIRST
        while True:
            seconds = _quickest(elements, group, device)
            if seconds - latency >= LONG or elements >= LAST:
                return Travel(latency, max(seconds - latency, 0.0) / (4 * elements))
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


def _quickest(elements: int, group: dist.ProcessGroup | None, device: torch.device) -> float:
    quickest = math.inf
    for _ in range(TRIES):
        quickest = min(quickest, _seconds(elements, group, device))
        if quickest >= SLOW:
            break
    return quickest


def _seconds(elements: int, group: dist.ProcessGroup | None, device: torch.device) -> float:
    message = torch.zeros(elements, device=device)
    _agreed(0.0, group, device)  # so that all begin together
    began = time.perf_counter()
    dist.all_reduce(message, group=group)
    message[0].item()  # waits for the device
    return _agreed(time.perf_counter() - began, group, device)


def _agreed(value: float, group: dist.ProcessGroup | None, device: torch.device) -> float:
    """The largest value of all ranks, so that all decide the same."""
    largest = torch.tensor(value, dtype=torch.float32, device=device)  # some devices have no float64
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest.item()
