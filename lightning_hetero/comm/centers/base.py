"""Interface of a parameter center: vectors towards which replicas pull, one after the other, in any order."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_hetero.comm.agreement import raise_on_all
from lightning_hetero.comm.all_reduce import CHUNK
from lightning_hetero.comm.centers.rounds import Quorum
from lightning_hetero.comm.columns import LayoutInColumns
from lightning_hetero.errors import CommunicationError, HeteroError

T = TypeVar("T")


class CenterLayout(NamedTuple):
    """Ranks that use a center.

    Attributes:
        rank: this process.
        world: number of ranks.
        leaders: the rank of each replica that uses the center. The first is the host: the center lives with it.
        replica: number of this process's replica.
        timeout: longest wait for the center.
        group: of the leaders, if they make it; ``None``: all ranks make it together.
    """

    rank: int
    world: int
    leaders: tuple[int, ...]
    replica: int
    timeout: timedelta
    group: dist.ProcessGroup | None = None

    @property
    def host(self) -> int:
        """The rank with which the center lives."""
        return self.leaders[0]

    @property
    def is_host(self) -> bool:
        """Whether the center lives with this rank."""
        return self.rank == self.host

    @property
    def is_client(self) -> bool:
        """Whether this rank uses the center: it is the leader of its replica."""
        return self.rank == self.leaders[self.replica]

    @property
    def place(self) -> int:
        """The number of the host among those that make the center."""
        return self.host if self.group is None else 0


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

    def travelling(self, center: Sequence[T]) -> Sequence[T]:
        """Those vectors of the center for which a client sends values, and gets an answer; the first ones."""
        return center

    def measure(self, values: Sequence[Tensor], center: Sequence[Tensor]) -> float:
        """Before the center moves: the square in :class:`PushPull`. May overwrite the values."""
        return subtract_center(values, center)

    def move(self, values: Sequence[Tensor], center: Sequence[Tensor], push: float, square: float) -> None:
        """Move the center, if the square is finite, and overwrite the values with the answer."""
        push_center(values, center, push, square)


class RoundRule(CenterRule, ABC):
    """Rule of push-pulls in rounds: what they bring is added up, and moves the center when their round closes.

    A push-pull of the open round is answered when the round has closed. One of an earlier round, which is late, takes
    part in the open one and is answered at once. Only a thread can keep such a center.

    Attributes:
        quorum: condition on which rounds close.
    """

    quorum: Quorum

    @abstractmethod
    def rounds(self, center: Sequence[Tensor]) -> tuple[int, int]:
        """The number of push-pulls of the open round that have come, and of the rounds that have closed."""

    @abstractmethod
    def arrive(self, values: Sequence[Tensor], center: Sequence[Tensor], late: bool) -> None:
        """Count a push-pull, before the center moves: of the open round, unless it is late."""

    @abstractmethod
    def close(self, center: Sequence[Tensor]) -> None:
        """Close the open round: move the center."""

    @abstractmethod
    def answer(self, values: Sequence[Tensor], center: Sequence[Tensor]) -> None:
        """Overwrite values with the answer to a push-pull."""


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

    All ranks make it together, or the leaders do. Then only leaders use it, each of them one call at a time.

    Args:
        layout: which ranks use it.
        parts: that are exchanged one by one. Default: all of it, by the elastic rule.

    Attributes:
        cut: of its vectors, where this rank meets the other replicas in several columns; ``None``: there is one.
    """

    cut: LayoutInColumns | None = None

    def __init__(self, layout: CenterLayout, parts: Sequence[CenterPart] = (CenterPart(),)) -> None:
        self.layout, self.parts = layout, parts

    @abstractmethod
    def open(self, values: Sequence[Tensor]) -> None:
        """Begin (collective over all ranks).

        Args:
            values: of the center, the same on all ranks.
        """

    @abstractmethod
    def push_pull(self, values: Sequence[Tensor], push: float, part: int = 0, turn: int = 0) -> PushPull:
        """Exchange by the rule; by default ``D = values - center;  center += push D``, if ``D`` is finite.

        Args:
            values: vectors of the center's sizes and dtypes. They are overwritten with the answer, by default ``D``.
            push: how much of the difference the center moves by.
            part: number of the part of the center.
            turn: number of the round for which this is, from 1, by a rule that has rounds.

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

    def _too_late(self, awaited: str) -> CommunicationError:
        return CommunicationError(
            f"rank {self.layout.rank} waited {self.layout.timeout.total_seconds():g} s for {awaited} (the strategy's "
            "`timeout` is the limit)."
        )


class CenterInColumns(Center):
    """A center in parts: one for each column of this rank. A push-pull visits one after the other.

    Args:
        centers: of the columns, in an order that all ranks share.
        cut: cuts the vectors of the center.
    """

    def __init__(self, centers: Sequence[Center], cut: LayoutInColumns) -> None:
        super().__init__(centers[0].layout, centers[0].parts)
        self._centers = centers
        self._cut = self.cut = cut

    def _parts(self, values: Sequence[Tensor]) -> list[tuple[Center, list[Tensor]]]:
        return [(center, self._cut.parts(values, number)) for number, center in enumerate(self._centers)]

    @override
    def open(self, values: Sequence[Tensor]) -> None:
        problem = None
        for center, part in self._parts(values):
            try:
                center.open(part)
            except HeteroError as error:  # on all ranks of the column; others wait in the next one
                problem = problem or error
        raise_on_all(problem, "the center")

    @override
    def push_pull(self, values: Sequence[Tensor], push: float, part: int = 0, turn: int = 0) -> PushPull:
        cut = self._cut.of(self.parts[part].rule.travelling(range(len(self._cut.sizes))))
        columns = [cut.parts(values, number) for number in range(len(self._centers))]
        seen = [center.push_pull(own, push, part, turn) for center, own in zip(self._centers, columns, strict=True)]
        cut.put(columns, values)
        return PushPull(sum(each.square for each in seen), seen[0].counts, sum(each.sent for each in seen))

    @override
    def read(self, out: Sequence[Tensor] | None = None) -> tuple[list[Tensor], list[int]]:
        return self._whole([center.read() for center in self._centers], out)

    @override
    def peek(self) -> tuple[list[Tensor], list[int]] | None:
        seen = [found for center in self._centers if (found := center.peek()) is not None]
        return self._whole(seen) if len(seen) == len(self._centers) else None

    def _whole(
        self, seen: Sequence[tuple[list[Tensor], list[int]]], out: Sequence[Tensor] | None = None
    ) -> tuple[list[Tensor], list[int]]:
        parts, counts = zip(*seen, strict=True)
        return self._cut.put(parts, out), counts[0]

    @override
    def write(self, values: Sequence[Tensor], counts: Sequence[int]) -> None:
        for center, part in self._parts(values):
            center.write(part, counts)

    @override
    def leave(self) -> None:
        for center in self._centers:
            center.leave()

    @override
    def close(self) -> None:
        for center in self._centers:
            center.close()


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
