"""What a center is: vectors that replicas pull towards them, one visitor at a time, whenever each likes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_hetero.comm.all_reduce import CHUNK


class CenterLayout(NamedTuple):
    """Who visits a center.

    Attributes:
        rank: this process's.
        world: number of ranks.
        leaders: the rank of each replica that visits. The first is the host: the center lives with it.
        replica: this process's, by number.
        timeout: longest wait for the center.
    """

    rank: int
    world: int
    leaders: tuple[int, ...]
    replica: int
    timeout: timedelta

    @property
    def host(self) -> int:
        """The rank with which the center lives."""
        return self.leaders[0]

    @property
    def is_client(self) -> bool:
        """Whether this rank is its replica's leader."""
        return self.rank == self.leaders[self.replica]


class PushPull(NamedTuple):
    """What a visitor learns.

    Attributes:
        square: squared Euclidean distance to the center as it was. If it is not finite, the center was left alone.
        counts: visits of each replica so far, this one included.
        sent: bytes that this rank has sent.
    """

    square: float
    counts: list[int]
    sent: int = 0


class Center(ABC):
    """Vectors on the CPU, in fp32 or wider, and a count of visits of each replica.

    To be made by all ranks together; then only leaders use it, each one call at a time.

    Args:
        layout: who visits it.
    """

    def __init__(self, layout: CenterLayout) -> None:
        self.layout = layout

    @abstractmethod
    def open(self, values: Sequence[Tensor]) -> None:
        """Begin with these values, the same on all ranks (collective over all ranks)."""

    @abstractmethod
    def push_pull(self, values: Sequence[Tensor], push: float) -> PushPull:
        """``D = values - center;  center += push D``, if ``D`` is finite.

        Args:
            values: of the center's sizes and dtypes; overwritten with ``D``.
            push: coefficient.

        Raises:
            CommunicationError: the center's host has died or does not answer within the deadline.
        """

    @abstractmethod
    def read(self, out: Sequence[Tensor] | None = None) -> tuple[list[Tensor], list[int]]:
        """A copy of the center, and the counts; for the host, and meanwhile others may come.

        Args:
            out: where to write the center. Default: new memory.
        """

    @abstractmethod
    def write(self, values: Sequence[Tensor], counts: Sequence[int]) -> None:
        """Set the center, by every leader alike, while nobody visits."""

    def leave(self) -> None:  # noqa: B027 - not all homes need it
        """No rank will visit any more (collective over all ranks)."""

    @abstractmethod
    def close(self) -> None:
        """Let go of all resources; local, idempotent, also after an error."""


def differ(values: Sequence[Tensor], center: Sequence[Tensor]) -> float:
    """``values -= center``; the squared norm of the difference."""
    square = 0.0
    for value, old in zip(values, center, strict=True):
        for x, c in zip(value.split(CHUNK), old.split(CHUNK), strict=True):
            square += float(x.sub_(c).dot(x))
    return square


def push_by(difference: Sequence[Tensor], center: Sequence[Tensor], push: float, square: float) -> None:
    """``center += push * difference``, if that is finite."""
    if math.isfinite(square):
        for old, moved in zip(center, difference, strict=True):
            old.add_(moved, alpha=push)


def copied(values: Sequence[Tensor], out: Sequence[Tensor] | None) -> list[Tensor]:
    """A copy of vectors, where it is wanted, or in new memory."""
    copies = [torch.empty_like(value) for value in values] if out is None else list(out)
    for copy, value in zip(copies, values, strict=True):
        copy.copy_(value)
    return copies
