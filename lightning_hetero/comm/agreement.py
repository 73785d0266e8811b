"""Consistency checks: all ranks of a job have the same values, and an error of one rank is raised on all."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hetero.comm import object_collectives
from lightning_hetero.comm.failures import deadline
from lightning_hetero.comm.retry import collective
from lightning_hetero.errors import DataError, DisagreementError, HeteroError

_MISSING = "(missing)"


def gather(value: Any, what: str, group: dist.ProcessGroup | None = None) -> list[Any]:
    """One value per rank, in the order of ranks (collective). Tensors arrive on the CPU.

    Args:
        value: this rank's; anything that can be pickled.
        what: completes "rank 1 of 4 could not gather ..." in an error.
        group: the ranks. Default: all.

    Raises:
        CommunicationError: another rank did not take part in time.
    """

    def everyone() -> list[Any]:
        return object_collectives.all_gather(value, group)

    if group is None:
        return collective(f"gather {what}", everyone)
    with deadline(f"gather {what}"):
        return everyone()


def value_of_rank(value: Any, rank: int, home: torch.device = object_collectives.CPU, place: str = "") -> Any:
    """The value of one rank, on every rank (collective).

    Args:
        value: this rank's; anything that can be pickled.
        rank: which one counts.
        home: the device on which this rank computes. Tensors of the source that were on its own such device arrive on
            this one; all others on the CPU. Default: all on the CPU.
        place: names the function that asks, the same on every rank.

    Raises:
        CommunicationError: another rank did not take part in time.
        DisagreementError: that rank sends something else, as far as ``place`` and ``rank`` tell.
    """
    mine = False

    def received() -> bytes:
        nonlocal mine
        mine = dist.get_rank() == rank
        return object_collectives.broadcast(object_collectives.pack_value(value, home) if mine else b"", rank)

    message = collective(f"receive an object from rank {rank}{place and f' in {place}'}", received)
    return value if mine else object_collectives.unpack_value(message, home)


def check_equal(what: str, values: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Check that every rank has the same named values (collective).

    Args:
        what: describes the values in the error.
        values: can be pickled, and differ in their ``repr`` if they differ.
        group: the ranks. Default: all.

    Raises:
        DisagreementError: on every rank, with the names and each rank's value. If all ranks were asked, the fault is on
            those that differ from rank 0.
        CommunicationError: another rank did not take part in time.
    """
    digest = repr(sorted(values.items(), key=lambda item: item[0]))
    if len(set(gather(hash_of(digest), what, group))) == 1:
        return
    everyone = gather(dict(values), what, group)
    names = dict.fromkeys(name for one in everyone for name in one)
    differing = [name for name in names if len({repr(one.get(name, _MISSING)) for one in everyone}) > 1]
    # Where, say, strategies differ, so do the names of their options, which would only hide the cause.
    differing = [name for name in differing if all(name in one for one in everyone)] or differing
    ranks = range(len(everyone)) if group is None else dist.get_process_group_ranks(group)
    lines = [
        f"  {name}: "
        + ", ".join(f"rank {rank}: {one.get(name, _MISSING)}" for rank, one in zip(ranks, everyone, strict=True))
        for name in differing[:8]
    ]
    more = f"\n  and {len(differing) - 8} more" if len(differing) > 8 else ""
    error = DisagreementError(f"the ranks differ in {what}; make them the same:\n" + "\n".join(lines) + more)
    wrong = [rank for rank, one in enumerate(everyone) if any(_differs(one, everyone[0], name) for name in differing)]
    raise error.of_all(wrong) if group is None else error


def _differs(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> bool:
    return repr(one.get(name, _MISSING)) != repr(other.get(name, _MISSING))


def hash_of(text: str) -> str:
    """A short digest that is the same in every process."""
    return hashlib.sha256(text.encode()).hexdigest()


def raise_on_all(problem: HeteroError | None, what: str, group: dist.ProcessGroup | None = None) -> None:
    """Raise an error on every rank if any rank has a problem (collective).

    Args:
        problem: of this rank, if it has one.
        what: describes what the ranks were about to do, in the error of the other ranks.
        group: the ranks. Default: all.

    Raises:
        HeteroError: this rank's own problem.
        DisagreementError: the problem of another rank, with its number.
        CommunicationError: another rank did not take part in time.
    """
    problems = gather(None if problem is None else str(problem), what, group)
    ranks = range(len(problems)) if group is None else dist.get_process_group_ranks(group)
    wrong = {rank: text for rank, text in zip(ranks, problems, strict=True) if text is not None}
    for first, text in wrong.items():
        error = problem or DisagreementError(f"rank {first} cannot take part ({what}): {text}")
        raise error.of_all(list(wrong)) if group is None else error


class AsyncAllGather:
    """Gathers one row of numbers from each rank in the background.

    Args:
        group: a process group for CPU tensors that nothing else uses, since collectives of one group run in order.
        every: whose rows count: of the first rank, and of each rank so many after it.
    """

    def __init__(self, group: dist.ProcessGroup | None, every: int = 1) -> None:
        self._group, self._every = group, every
        self._work: dist.Work | None = None
        self._rows: list[torch.Tensor] = []

    @property
    def in_flight(self) -> bool:
        """Whether a gather has been launched and not yet collected."""
        return bool(self._rows)

    def launch(self, row: Sequence[float]) -> None:
        """Begin to gather. All ranks launch at the same step.

        Args:
            row: this rank's numbers, sent as float64.
        """
        mine = torch.tensor(row, dtype=torch.float64)
        self._rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        with deadline("send its row to all ranks"):
            self._work = dist.all_gather(self._rows, mine, group=self._group, async_op=True)

    def forget(self) -> None:
        """Drop what is in flight: a rank was lost."""
        self._rows, self._work = [], None

    def collect(self) -> list[list[float]]:
        """The rows of the ranks that count, in their order. Waits until all ranks have launched."""
        with deadline("receive the rows of all ranks"):
            if self._work is not None:
                self._work.wait()
        rows, self._rows, self._work = [row.tolist() for row in self._rows[:: self._every]], [], None
        return rows


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
        kinds = object_collectives.all_gather((tuple(tensor.shape), str(tensor.dtype)), group)
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
