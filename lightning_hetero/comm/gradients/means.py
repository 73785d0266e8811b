"""Means of gradients over ranks, in few bytes and with error feedback."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_hetero.comm.buffer_pool import BufferPool
from lightning_hetero.comm.encodings import Feedback, encoding_of
from lightning_hetero.comm.encodings.sums import encoded_sum


class Mean(ABC):
    """Takes the means of a bundle's gradients, step after step, and keeps what messages leave out for the next one."""

    @abstractmethod
    def take(self, own: Tensor) -> None:
        """Take the mean over all ranks (collective); blocks.

        Args:
            own: this rank's gradients, a vector on the CPU. It is overwritten by the mean, the same on every rank.
        """

    @abstractmethod
    def state(self) -> list[Tensor]:
        """What goes from step to step, in the memory in which it is kept."""

    @abstractmethod
    def reset(self) -> None:
        """Begin anew."""


class EncodedMean(Mean):
    """A mean of encoded gradients; see :mod:`lightning_hetero.comm.encodings`.

    Args:
        wire: a low-bit one.
        length: number of values.
        group: the ranks.
        pool: gives memory.
    """

    def __init__(self, wire: str, length: int, group: dist.ProcessGroup, pool: BufferPool) -> None:
        encoding = encoding_of(wire)
        assert encoding is not None
        self._encoding, self._group, self._pool = encoding, group, pool
        self._feedback = Feedback(wire, [length], dist.get_world_size(group))

    @override
    def take(self, own: Tensor) -> None:
        own.div_(dist.get_world_size(self._group))
        feedback = self._feedback
        encoded_sum(self._group, own, self._encoding, feedback.sent[0], feedback.summed[0], self._pool)

    @override
    def state(self) -> list[Tensor]:
        return self._feedback.state_dict()

    @override
    def reset(self) -> None:
        for residual in self.state():
            residual.zero_()


class LowRankMean(Mean):
    r"""A mean of matrices of low rank, as in PowerSGD (Vogels et al. 2019, algorithms 1 and 2).

    With the gradient :math:`M_w` of rank w, to which its residual has been added, and Q of the step before:

    .. math::
        P = \text{orthogonal}(\text{mean}_w M_w Q), \quad Q_w = M_w^T P, \quad Q = \text{mean}_w Q_w

    The mean is :math:`P Q^T`, and the new residual :math:`M_w - P Q_w^T`. Tensors with more than two dimensions are
    matrices with a row for each index of the first one. Those with one dimension, and all others to which this would
    give no fewer bytes, travel as they are.

    Args:
        rank: of the matrices.
        shapes: of the gradients.
        dtype: of the gradients.
        group: the ranks.
        seed: of the first Q; the same on all ranks.
    """

    def __init__(
        self, rank: int, shapes: Sequence[Sequence[int]], dtype: torch.dtype, group: dist.ProcessGroup, seed: int
    ) -> None:
        self._group, self._seed = group, seed
        self._sizes = [int(torch.Size(shape).numel()) for shape in shapes]
        self._matrices: list[tuple[int, int, int] | None] = []  # rows, columns, rank; None: travels as it is
        for shape, size in zip(shapes, self._sizes, strict=True):
            rows = shape[0] if len(shape) > 1 and size else 1
            columns = size // rows
            least = min(rank, rows, columns)
            smaller = len(shape) > 1 and least * (rows + columns) < size
            self._matrices.append((rows, columns, least) if smaller else None)
        self._residual = torch.zeros(sum(self._sizes), dtype=dtype)
        self._q = [torch.empty(m[1], m[2], dtype=dtype) for m in self._matrices if m is not None]
        self.reset()

    @override
    def reset(self) -> None:
        self._residual.zero_()
        generator = torch.Generator().manual_seed(self._seed)
        for q in self._q:
            q.copy_(torch.randn(q.shape, generator=generator, dtype=torch.float64))

    @override
    def state(self) -> list[Tensor]:
        return [self._residual, *self._q]

    @override
    def take(self, own: Tensor) -> None:
        own.add_(self._residual)
        parts, shapes = own.split(self._sizes), self._matrices
        matrices = [part.view(shape[:2]) for part, shape in zip(parts, shapes, strict=True) if shape is not None]
        others = [part for part, shape in zip(parts, shapes, strict=True) if shape is None]
        ps = [m @ q for m, q in zip(matrices, self._q, strict=True)]
        *means, plain = self._means([*ps, torch.cat([*others, own[:0]])])
        bases = [torch.linalg.qr(mean).Q for mean in means]
        qs = [m.T @ p for m, p in zip(matrices, bases, strict=True)]
        for m, p, q in zip(matrices, bases, qs, strict=True):
            m.addmm_(p, q.T, alpha=-1)
        for other in others:
            other.zero_()
        self._residual.copy_(own)
        for kept, mean in zip(self._q, self._means(qs), strict=True):
            kept.copy_(mean)
        for m, p, q in zip(matrices, bases, self._q, strict=True):
            torch.mm(p, q.T, out=m)
        for other, mean in zip(others, plain.split([len(other) for other in others]), strict=True):
            other.copy_(mean)

    def _means(self, own: Sequence[Tensor]) -> list[Tensor]:
        """The means of some tensors, in one message."""
        if not own:
            return []
        message = torch.cat([tensor.reshape(-1) for tensor in own])
        dist.all_reduce(message, group=self._group)
        message.div_(dist.get_world_size(self._group))
        parts = message.split([tensor.numel() for tensor in own])
        return [part.view(tensor.shape) for part, tensor in zip(parts, own, strict=True)]
