"""Gathers tensors with different numbers of samples from all ranks, with gradients."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hetero.comm import objects
from lightning_hetero.comm.deadline import deadline
from lightning_hetero.errors import DataError


def gather_samples(
    tensor: Tensor,
    group: dist.ProcessGroup | None,
    sync_grads: bool,
    waiting: Callable[[], AbstractContextManager[None]],
    counts: Callable[[], bool],
) -> Tensor:
    """Gather a CPU tensor of every rank (collective).

    Args:
        tensor: of the same dtype and number of dimensions on every rank. Only the first dimension may differ.
        group: the ranks. Default: all.
        sync_grads: let gradients flow back to each rank's tensor, summed over the losses of all ranks.
        waiting: makes a context in which this rank waits for others.
        counts: whether this rank's loss counts; called in the backward pass. If not, its gradient is left out.

    Returns:
        Shape ``(ranks, *tensor.shape)`` if all shapes are equal, else ``(1, all samples, *tensor.shape[1:])``.

    Raises:
        DataError: on every rank, if dtypes differ, or more than the first dimension.
    """
    with waiting(), deadline("gather a tensor"):
        kinds = objects.all_gather((tuple(tensor.shape), str(tensor.dtype)), group)
    shapes = [shape for shape, _ in kinds]
    _check(shapes, [dtype.removeprefix("torch.") for _, dtype in kinds])
    even = len(set(shapes)) == 1
    rows, lengths = (tensor.unsqueeze(0), [1] * len(shapes)) if even else (tensor, [shape[0] for shape in shapes])
    if sync_grads and torch.is_grad_enabled():
        gathered: Tensor = _GatherRows.apply(rows, lengths, group, waiting, counts)
    else:
        gathered = _gather_rows(rows.detach(), lengths, group, waiting)
    return gathered if even else gathered.unsqueeze(0)


def _check(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> None:
    if len(set(dtypes)) > 1:
        raise DataError(f"all_gather of different dtypes: {list(dtypes)}. Convert to one before.")
    if len({shape[1:] for shape in shapes}) > 1 or len({len(shape) for shape in shapes}) > 1:
        raise DataError(
            f"all_gather of different shapes: {list(shapes)}. Only the first dimension, the samples', may differ "
            "between ranks. Pad the others to a common size, reduce first, or use a torchmetrics metric, which "
            "gathers uneven states. If they differ since shares do, put the samples first, or set balance='off'."
        )


def _gather_rows(
    rows: Tensor,
    lengths: Sequence[int],
    group: dist.ProcessGroup | None,
    waiting: Callable[[], AbstractContextManager[None]],
) -> Tensor:
    """The rows of all ranks, one below the other. They travel with padding, since gloo gathers equal shapes only."""
    padded = rows.new_zeros(max(lengths), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in lengths]
    if padded.numel():
        with waiting(), deadline("gather a tensor"):  # bytes: gloo does not know every dtype
            dist.all_gather([_bytes(part) for part in parts], _bytes(padded), group=group)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, lengths: Sequence[int], group: Any, waiting: Any, counts: Any) -> Tensor:
        ctx.how = lengths, group, waiting, counts
        return _gather_rows(rows, lengths, group, waiting)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        lengths, group, waiting, counts = ctx.how
        # The gradient of a padding batch may not be finite, and would reach all ranks. Sums in 16 bits are coarse.
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True).contiguous()
        if not counts():
            total.zero_()
        with waiting(), deadline("send gradients back to the ranks that they belong to"):
            dist.all_reduce(total, group=group)
        first = sum(lengths[: dist.get_rank(group)])
        own = total[first : first + lengths[dist.get_rank(group)]]
        return own.to(gradient.dtype), None, None, None, None
