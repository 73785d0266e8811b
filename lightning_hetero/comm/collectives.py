"""Collectives that Lightning and users call on a strategy: weighted by samples, and timed as waiting."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_hetero.comm.agreement import gather, gather_samples, value_of_rank
from lightning_hetero.comm.object_collectives import CPU, check_sum, collective_number
from lightning_hetero.comm.retry import collective
from lightning_hetero.comm.staging import pinned, stage_of
from lightning_hetero.comm.topology import widest_float
from lightning_hetero.errors import UnsupportedError

_REDUCTIONS = ("mean", "avg", "sum", "min", "max", "product")
_LOGGED = ("mean", "sum", "min", "max")  # reductions of values that are logged
#: Values in a message, on which its size does not depend: where ranks log other numbers of values, they still meet.
_SLOTS = 64


class TrialBatch(NamedTuple):
    """Batch that a rank tries alone.

    Attributes:
        samples: of this rank, each with the number that all ranks of a step would have; of the whole batch, and of each
            loader's part of it.
        world: number of ranks.
    """

    samples: Mapping[int, int]
    world: int

    def gathered(self, tensor: Tensor, sync_grads: bool) -> Tensor:
        """Stands in for the tensors of all ranks, as large as they would be together."""
        own = tensor if sync_grads else tensor.detach()
        if tensor.ndim == 0 or tensor.shape[0] not in self.samples:  # such as a loss
            return own.expand(self.world, *tensor.shape).clone()
        total = self.samples[tensor.shape[0]]
        return own[torch.arange(total, device=tensor.device) % tensor.shape[0]][None]


class Logged(NamedTuple):
    """Value that is being logged.

    Attributes:
        name: under which it is logged.
        place: names the function that logs, the same on all ranks.
        given: whether the user has said how many samples it stands for.
    """

    name: str
    place: str
    given: bool


class LoggedValue(NamedTuple):
    """Scalar of this rank that is logged, and is to be reduced over all ranks.

    Attributes:
        logged: under which name, and where.
        reduction: one of ``"mean"``, ``"sum"``, ``"min"`` and ``"max"``.
        own: this rank's value.
        samples: for which it stands; ``None``: unknown.
        result: becomes that of all ranks.
    """

    logged: Logged
    reduction: str
    own: Tensor
    samples: float | None
    result: Tensor


class RowsToCheck(NamedTuple):
    """Values of all ranks on a device, which the host checks later.

    Attributes:
        rows: a message per rank, in pinned memory.
        ready: an event that passes once they are there.
        values: of this rank, that are reduced.
        what: all that is logged, in words, of which each message ends with a number.
    """

    rows: Tensor
    ready: Any
    values: Sequence[LoggedValue]
    what: str


class Collectives:
    """Collectives over all ranks, on a gloo world of CPUs and GPUs; tensors on an accelerator pass through the CPU.

    Where a library connects the accelerators of all ranks, values of a training step are reduced there, and the host
    does not wait for them.

    Args:
        waiting: gives a block of which the time counts as waiting, not as this rank's work.
        alone: whether there is nobody to meet, so that a collective returns what it was given.
        loss_counts: whether this rank's loss has a part in the gradient; asked in a backward pass.
        on_devices: gives the group of all ranks' accelerators for tensors on a device, if a library connects them.
    """

    def __init__(
        self,
        waiting: Callable[[], AbstractContextManager[None]],
        alone: Callable[[], bool],
        loss_counts: Callable[[], bool],
        on_devices: Callable[[torch.device], dist.ProcessGroup | None] = lambda device: None,
    ) -> None:
        self.alone, self._waiting, self._loss_counts = alone, waiting, loss_counts
        self._on_devices = on_devices
        self._unchecked: list[RowsToCheck] = []
        self._samples: Callable[[], float | None] | None = None  # of this rank in the running step; outside of one None
        self._warned = False  # that a mean could not be weighted
        self._trial: TrialBatch | None = None  # under way, if one is
        self._logged: Logged | None = None  # what is being logged
        self._deferred: list[LoggedValue] | None = None  # in a training step: what it has logged
        self._explained: set[str] = set()  # names of values of which nothing was left
        self._before: Callable[[], None] | None = None  # the next collective

    @contextmanager
    def weighing(self, samples: Callable[[], float | None], logged: Logged | None = None) -> Iterator[None]:
        """Let means in this block weigh this rank by its samples.

        Args:
            samples: their number, ``None`` if it is unknown; asked only if something is reduced.
            logged: the value that is logged in this block, if one is.
        """
        before = self._samples, self._logged
        self._samples, self._logged = samples, logged
        try:
            yield
        finally:
            self._samples, self._logged = before

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Reduce what is logged in this block at its end, as one message (collective, if something is logged).

        Before another collective over all ranks it is reduced, too: the order is then the same where only some ranks
        have read a value.
        """
        self._deferred = []
        try:
            yield
            self.settle()  # what the step before has left, while the device is busy with this one
            self.reduce_deferred()
        finally:  # after an error they are dropped
            self._deferred = None

    def reduce_deferred(self) -> None:
        """Reduce what was logged in a block of :meth:`deferring` until now (collective, if something was)."""
        if self._deferred:
            values, self._deferred = self._deferred, []
            self._reduce_logged(values, "training_step")

    @contextmanager
    def preceding(self, call: Callable[[], None]) -> Iterator[None]:
        """Call a function before each collective in this block that reduces or gathers over all ranks."""
        self._before = call
        try:
            yield
        finally:
            self._before = None

    def explain_nan(self, name: str) -> None:
        """Say once why a logged value is not a number."""
        if name not in self._explained:
            self._explained.add(name)
            rank_zero_warn(
                f"What self.log({name!r}, ...) gave is NaN: its batch_size was 0 throughout, so that no value counts. "
                "Give the samples that a value stands for; 0 only where another rank or batch has some."
            )

    @contextmanager
    def trying(self, trial: TrialBatch) -> Iterator[None]:
        """In this block, in which this rank is alone, what is gathered is made of its own samples."""
        self._trial = trial
        try:
            yield
        finally:
            self._trial = None

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if not self.alone():
            self.reduce_deferred()
            with self._waiting():
                collective("pass a barrier", dist.barrier)

    def gather(self, value: Any, what: str) -> list[Any]:
        """One value per rank, in the order of ranks.

        Args:
            value: this rank's; anything that can be pickled.
            what: completes "rank 1 of 4 could not gather ..." in an error.
        """
        if self.alone():
            return [value]
        with self._waiting():
            return gather(value, what)

    def broadcast(self, obj: Any, src: int = 0, home: torch.device = CPU, place: str = "") -> Any:
        """The object of rank ``src``, on every rank.

        Args:
            obj: that of the source counts; anything that can be pickled.
            src: the source.
            home: the device on which this rank computes, for tensors that are on that of the source. All others, and
                by default these too, arrive on the CPU.
            place: names the function that asks, the same on every rank.

        Raises:
            DisagreementError: rank ``src`` broadcasts in another place.
        """
        if self.alone():
            return obj
        self.reduce_deferred()
        with self._waiting():
            return value_of_rank(obj, src, home, place)

    def reduce(self, tensor: Any, group: Any | None, reduce_op: ReduceOp | str | None) -> Any:
        """Reduce a tensor over all ranks.

        Within a step, a mean weighs each rank by its samples, as ``self.log(..., sync_dist=True)`` means it: by the
        ``batch_size`` given to ``self.log``, else by what the batch holds. If that is unknown on some rank, every
        rank counts the same, with a warning. At the end of an epoch Lightning has weighted the values itself. The mean
        of integers is not truncated. What ``training_step`` logs is there once it returns, or
        is read; see :meth:`deferring`.

        Args:
            tensor: of any shape and dtype; anything else is returned as it is.
            group: a process group; default: all ranks.
            reduce_op: ``"mean"``, ``"avg"``, ``"sum"``, ``"min"``, ``"max"`` or a ``ReduceOp``; ``None`` is a sum.

        Returns:
            The result on every rank, of the same dtype; a mean of integers in float64, or fp32 on devices without it.

        Raises:
            UnsupportedError: an unknown ``reduce_op``.
            DisagreementError: on every rank, if one of them logs another value, or takes the mean of one.
        """
        if not isinstance(tensor, Tensor) or self.alone():
            return tensor
        everyone = group in (None, dist.group.WORLD)
        if self._before is not None and everyone:
            self._before()
        name = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
        if isinstance(name, str) and name not in _REDUCTIONS:
            raise UnsupportedError(f"reduce_op={reduce_op!r} must be one of {', '.join(map(repr, _REDUCTIONS))}.")
        mean = name in ("mean", "avg", ReduceOp.AVG)
        wide = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else torch.float64
        scalar = tensor.is_floating_point() and tensor.numel() == 1
        if self._logged is not None and everyone and scalar and name in _LOGGED:
            return self._log(tensor, name, self._logged)
        if everyone:
            self.reduce_deferred()
        logged = "a tensor" if self._logged is None else f"what {self._logged.place} logs as {self._logged.name!r}"
        what = f"reduce {logged}"
        value = tensor.detach().to("cpu", wide if mean else tensor.dtype, copy=True).reshape(-1)
        if mean:
            value = self._with_weight(value)
        op: Any = ReduceOp.SUM
        if not mean and name is not None:
            op = getattr(ReduceOp, name.upper()) if isinstance(name, str) else name

        def reduced() -> Tensor:
            number = collective_number(what, group)
            total = torch.cat([value, value.new_tensor([number])]) if mean else value.clone()
            dist.all_reduce(total, op=op, group=group)
            if not mean:
                return total
            check_sum(total[-1].item(), number, group)
            return total[:-1]

        with self._waiting():
            total = collective(what, reduced)
        value = self._mean(total) if mean else total
        whole = widest_float(tensor.device) if mean else value.dtype  # of integers
        return value.reshape(tensor.shape).to(tensor.device, tensor.dtype if tensor.is_floating_point() else whole)

    def _with_weight(self, value: Tensor) -> Tensor:
        """Rows to sum over ranks for a mean: weighted and plain values, weights, ranks, and how many know no weight."""
        samples = self._samples() if self._samples is not None else 1.0
        weight = 1.0 if samples is None else samples
        plain = value if weight else torch.zeros_like(value)  # that of a padding batch may not be finite
        numbers = [value.new_full((1,), x) for x in (weight, weight != 0, samples is None)]
        return torch.cat([plain * weight, plain, *numbers])

    def _mean(self, sums: Tensor) -> Tensor:
        """The mean that summed rows of :meth:`_with_weight` make; the same on every rank."""
        weighted, plain = sums[:-3].chunk(2)
        weight, ranks, unknown = sums[-3:].tolist()
        self._explain(self._logged, weight, unknown)
        return plain / ranks if unknown else weighted / weight

    def _explain(self, logged: Logged | None, weight: float, unknown: float) -> None:
        """Warn of a mean of nothing, and of one that could not be weighted."""
        if not unknown:
            if not weight and logged is not None and logged.given:
                self.explain_nan(logged.name)
        elif not self._warned:
            self._warned = True
            rank_zero_warn(
                f"A mean over ranks counted every rank the same: on {int(unknown)} of them nobody can tell how many "
                "samples the batch holds. Pass `batch_size=` to `self.log`; elsewhere reduce sums of values and of "
                "samples (`reduce_op='sum'`) and divide them."
            )

    def _log(self, tensor: Tensor, reduction: str, logged: Logged) -> Tensor:
        """The value over all ranks of one that is logged; in a training step it comes at the end."""
        samples = self._samples() if self._samples is not None else 1.0
        with torch.inference_mode(False):  # it is changed outside of such a block
            result = torch.full_like(tensor, torch.nan, requires_grad=False)
        value = LoggedValue(logged, reduction, tensor.detach(), samples, result)
        if self._deferred is not None:
            self._deferred.append(value)
        else:
            self._reduce_logged([value], logged.place)
        return result

    def _reduce_logged(self, values: Sequence[LoggedValue], place: str) -> None:
        """Reduce values as one message; those on devices that a library connects as another one."""
        values = sorted(values, key=lambda value: value.logged.name)
        kinds = ["" if value.reduction == "mean" else f" ({value.reduction})" for value in values]
        names = [f"{value.logged.name!r}{kind}" for value, kind in zip(values, kinds, strict=True)]
        what = f"what {place} logs as {', '.join(names)}"
        groups = [self._on_devices(value.own.device) for value in values]
        on_host = [value for value, group in zip(values, groups, strict=True) if group is None]
        on_devices = [value for value, group in zip(values, groups, strict=True) if group is not None]
        library = next((group for group in groups if group is not None), None)
        for first in range(0, len(on_devices), _SLOTS):
            self._reduce_on_devices(on_devices[first : first + _SLOTS], what, library)
        for first in range(0, len(on_host), _SLOTS):
            self._reduce_on_hosts(on_host[first : first + _SLOTS], what)

    def _reduce_on_hosts(self, values: Sequence[LoggedValue], what: str) -> None:
        """Reduce values on the host, which waits for one copy from each device."""
        places = dict[torch.device, list[int]]()
        for place, value in enumerate(values):
            places.setdefault(value.own.device, []).append(place)
        own = torch.zeros(_SLOTS, dtype=torch.float64)
        for here in places.values():
            own[here] = _plain([values[place] for place in here]).to("cpu", torch.float64)

        def everyone() -> Tensor:
            return _rows(torch.cat([own, torch.tensor(_weights(values, what), dtype=torch.float64)]), None)

        with self._waiting():
            rows = collective(f"reduce {what}", everyone)
        sums = self._checked(rows, values, what)
        found = _reduced(values, rows, sums)
        for device, here in places.items():
            _fill([values[place] for place in here], _uploaded(found[here], device))

    def _reduce_on_devices(self, values: Sequence[LoggedValue], what: str, library: dist.ProcessGroup | None) -> None:
        """Reduce values on all ranks' devices, for which the host does not wait; :meth:`settle` checks them."""
        device = values[0].own.device
        padding = torch.zeros(_SLOTS - len(values), dtype=widest_float(device), device=device)
        weights = _uploaded(torch.tensor(_weights(values, what), dtype=torch.float64), device)
        with self._waiting():
            rows = _rows(torch.cat([_plain(values), padding, weights]), library)
        _fill(values, _reduced(values, rows, _sums(rows)))
        stage = stage_of(device)
        there = pinned(rows.numel(), rows.dtype) if stage.has_streams else torch.empty(rows.numel(), dtype=rows.dtype)
        there = there.view(rows.shape).copy_(rows, non_blocking=stage.has_streams)
        self._unchecked.append(RowsToCheck(there, stage.ready(), values, what))

    def settle(self) -> None:
        """Check what was reduced on devices; after the step that has done so, in which nobody waits for that.

        Raises:
            DisagreementError: on every rank, if one of them has logged another value.
        """
        unchecked, self._unchecked = self._unchecked, []
        for rows, ready, values, what in unchecked:
            if ready is not None:
                ready.synchronize()
            self._checked(rows, values, what)

    def _checked(self, rows: Tensor, values: Sequence[LoggedValue], what: str) -> Tensor:
        """The sums of rows of all ranks, all of which log the same; warns of means that are not what was asked for."""
        if len(set(rows[:, -1].tolist())) > 1:
            self.gather(None, what)  # raises the error, which says what each rank logs
        sums = _sums(rows)
        for value, weight, unknown in zip(values, sums[2].tolist(), sums[4].tolist(), strict=False):
            if value.reduction == "mean":
                self._explain(value.logged, weight, unknown)
        return sums

    def all_gather(self, tensor: Tensor, group: Any | None, sync_grads: bool) -> Tensor:
        """Gather the tensors of all ranks.

        Ranks may have different numbers of samples. ``gathered.flatten(0, 1)`` holds all samples either way, in the
        order of ranks.

        Args:
            tensor: of the same shape on every rank, except for its first dimension.
            group: a process group; default: all ranks.
            sync_grads: let gradients flow back to each rank's tensor.

        Returns:
            On every rank the same: if all shapes are equal, a tensor of shape ``(ranks, *tensor.shape)``, as Lightning
            returns it; else of shape ``(1, samples of all ranks, *tensor.shape[1:])``.

        Raises:
            DataError: on every rank, if dtypes differ, or more than the first dimension.
        """
        if self._trial is not None:
            return self._trial.gathered(tensor, sync_grads)
        if self.alone():
            return tensor
        if group in (None, dist.group.WORLD):
            if self._before is not None:
                self._before()
            self.reduce_deferred()

        def gathering() -> Tensor:
            return gather_samples(tensor.to("cpu"), group, sync_grads, self._waiting, self._loss_counts)

        gathered = collective("gather a tensor", gathering)
        return gathered.to(tensor.device)


def _plain(values: Sequence[LoggedValue]) -> Tensor:
    """This rank's values, of one device; 0 in place of one that has no part in a mean: it may not be finite."""
    own = [value.own.reshape(1) for value in values]
    none = [value.reduction == "mean" and value.samples == 0 for value in values]
    kept = [torch.zeros_like(tensor) if nothing else tensor for tensor, nothing in zip(own, none, strict=True)]
    return torch.cat(kept).to(widest_float(kept[0].device))


def _weights(values: Sequence[LoggedValue], what: str) -> list[float]:
    """The weight of each value in a mean, NaN if that is unknown; and a number for all that is logged."""
    weights = [math.nan if value.samples is None else float(value.samples) for value in values]
    return [*weights, *[0.0] * (_SLOTS - len(values)), float(collective_number(what, None))]


def _rows(message: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The messages of all ranks: values, their weights, a number."""
    rows = message.new_empty(dist.get_world_size(group), len(message))
    dist.all_gather(list(rows), message, group=group)
    return rows


def _sums(rows: Tensor) -> Tensor:
    """Sums over ranks of the values: weighted, plain, of weights, of ranks that count, of weights that are unknown.

    Ranks are added one after the other: devices and CPUs of all kinds then come to the same sums.
    """
    plain, weights = rows[:, :_SLOTS], rows[:, _SLOTS:-1]
    unknown = weights.isnan()
    weights = weights.masked_fill(unknown, 1.0)
    summed = torch.stack([plain * weights, plain, weights, (weights != 0).to(plain), unknown.to(plain)], 1)
    return functools.reduce(torch.add, summed)


def _reduced(values: Sequence[LoggedValue], rows: Tensor, sums: Tensor) -> Tensor:
    """The values over all ranks."""
    weighted, total, weight, ranks, unknown = sums
    plain = rows[:, :_SLOTS]
    found = {
        "mean": torch.where(unknown > 0, total / ranks, weighted / weight),
        "sum": total,
        "min": plain.amin(0),
        "max": plain.amax(0),
    }
    return torch.stack([found[value.reduction][place] for place, value in enumerate(values)])


def _uploaded(values: Tensor, device: torch.device) -> Tensor:
    """Values of the host on a device, for which the host does not wait."""
    values, stage = values.to(widest_float(device)), stage_of(device)
    if not stage.has_streams:
        return values.to(device)
    return pinned(len(values), values.dtype).copy_(values).to(device, non_blocking=True)


def _fill(values: Sequence[LoggedValue], found: Tensor) -> None:
    for value, result in zip(values, found, strict=True):
        value.result.copy_(result.reshape(value.result.shape))
