"""Interface of a parameter center: vectors towards which replicas pull, one after the other, in any order."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_hetero.comm.all_reduce import CHUNK


class CenterLayout(NamedTuple):
    """Ranks that use a center.

    Attributes:
        rank: this process.
        world: number of ranks.
        leaders: the rank of each replica that uses the center. The first is the host: the center lives with it.
        replica: number of this process's replica.
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
        """Whether this rank uses the center: it is the leader of its replica."""
        return self.rank == self.leaders[self.replica]


class PushPull(NamedTuple):
    """Result of a push-pull, on the client.

    Attributes:
        square: squared Euclidean distance from the center as it was. If it is not finite, the center did not change.
        counts: push-pulls of each replica so far, this one included.
        sent: bytes that this rank has sent.
    """

    square: float
    counts: list[int]
    sent: int = 0


class CenterRule:
    """Rule of a push-pull: the elastic one, ``D = values - center;  center += push D``, and ``D`` is the answer."""

    def travelling(self, center: Sequence[Tensor]) -> Sequence[Tensor]:
        """Those vectors of the center for which a client sends values, and gets an answer; the first ones."""
        return center

    def measure(self, values: Sequence[Tensor], center: Sequence[Tensor]) -> float:
        """Before the center moves: the square in :class:`PushPull`. May overwrite the values."""
        return subtract_center(values, center)

    def move(self, values: Sequence[Tensor], center: Sequence[Tensor], push: float, square: float) -> None:
        """Move the center, if the square is finite, and overwrite the values with the answer."""
        push_center(values, center, push, square)


class CenterPart(NamedTuple):
    """Part of a center that one push-pull exchanges, such as a fragment of the model.

    Attributes:
        rule: what a push-pull does.
        known: for a low-bit wire: what this client knows the center to be, in the center's first travelling vectors.
            Its values are changes since then, and an answer says where the center is; its owner takes that over.
        lengths: of these vectors, how many of the first values travel in low bits.
        left_out: of these values, what earlier messages of this client have left out, in fp32.
    """

    rule: CenterRule = CenterRule()
    known: Sequence[Tensor] = ()
    lengths: Sequence[int] = ()
    left_out: Sequence[Tensor] = ()


class Center(ABC):
    """Vectors on the CPU, in fp32 or wider, and the number of push-pulls of each replica.

    All ranks make it together. Then only leaders use it, each of them one call at a time.

    Args:
        layout: which ranks use it.
        parts: that are exchanged one by one. Default: all of it, by the elastic rule.
    """

    def __init__(self, layout: CenterLayout, parts: Sequence[CenterPart] = (CenterPart(),)) -> None:
        self.layout, self.parts = layout, parts

    @abstractmethod
    def open(self, values: Sequence[Tensor]) -> None:
        """Begin (collective over all ranks).

        Args:
            values: of the center, the same on all ranks.
        """

    @abstractmethod
    def push_pull(self, values: Sequence[Tensor], push: float, part: int = 0) -> PushPull:
        """Exchange by the rule; by default ``D = values - center;  center += push D``, if ``D`` is finite.

        Args:
            values: vectors of the center's sizes and dtypes. They are overwritten with the answer, by default ``D``.
            push: how much of the difference the center moves by.
            part: number of the part of the center.

        Raises:
            CommunicationError: the host of the center has ended, or does not answer in time.
        """

    @abstractmethod
    def read(self, out: Sequence[Tensor] | None = None) -> tuple[list[Tensor], list[int]]:
        """A copy of the center, and the counts; on the host. Other replicas may use the center meanwhile.

        Args:
            out: where to write the center. Default: new memory.
        """

    def peek(self) -> tuple[list[Tensor], list[int]] | None:
        """A copy of the center, and the counts, if they are at hand on this rank; nobody uses the center meanwhile."""
        return None

    @abstractmethod
    def write(self, values: Sequence[Tensor], counts: Sequence[int]) -> None:
        """Set the center and the counts. All leaders call it, while no push-pull is under way.

        Args:
            values: of the center.
            counts: push-pulls of each replica.
        """

    def leave(self) -> None:  # noqa: B027 - not all homes need it
        """End: no rank uses the center any more (collective over all ranks)."""

    @abstractmethod
    def close(self) -> None:
        """Free all resources; local, idempotent, also after an error."""


def subtract_center(values: Sequence[Tensor], center: Sequence[Tensor]) -> float:
    """``values -= center``; the squared norm of the difference."""
    square = 0.0
    for value, old in zip(values, center, strict=True):
        for x, c in zip(value.split(CHUNK), old.split(CHUNK), strict=True):
            square += float(x.sub_(c).dot(x))
    return square


def push_center(difference: Sequence[Tensor], center: Sequence[Tensor], push: float, square: float) -> None:
    """``center += push * difference``, if that is finite."""
    if math.isfinite(square):
        for old, moved in zip(center, difference, strict=True):
            old.add_(moved, alpha=push)


def copy_vectors(values: Sequence[Tensor], out: Sequence[Tensor] | None) -> list[Tensor]:
    """A copy of vectors, in given memory or in new memory."""
    copies = [torch.empty_like(value) for value in values] if out is None else list(out)
    for copy, value in zip(copies, values, strict=True):
        copy.copy_(value)
    return copies
