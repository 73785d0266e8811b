"""Collectives that Lightning and users call on a strategy: weighted by samples, and timed as waiting."""

from collections.abc import Callable, Iterator, Mapping
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


class SumToCheck(NamedTuple):
    """Sum on a device, which the host checks later.

    Attributes:
        values: in pinned memory: the weights, how many ranks know none, and the sum of the collective's numbers.
        ready: an event that passes once they are there.
        number: of the collective, on this rank.
        name: of the value, if the user has given its weight.
    """

    values: Tensor
    ready: Any
    number: int
    name: str | None


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
        self._unchecked: list[SumToCheck] = []
        self._samples: Callable[[], float | None] | None = None  # of this rank in the running step; outside of one None
        self._warned = False  # that a mean could not be weighted
        self._trial: TrialBatch | None = None  # under way, if one is
        self._name: str | None = None  # of the value that is being logged with a weight of its own
        self._logged = ""  # the value that is being logged, in words
        self._explained: set[str] = set()  # names of values of which nothing was left
        self._before: Callable[[], None] | None = None  # the next collective

    @contextmanager
    def weighing(
        self, samples: Callable[[], float | None], name: str | None = None, logged: str = ""
    ) -> Iterator[None]:
        """Let means in this block weigh this rank by its samples.

        Args:
            samples: their number, ``None`` if it is unknown; asked only if something is reduced.
            name: of the value to which the user has given this number.
            logged: the value that is logged in this block, in words, the same on all ranks.
        """
        before = self._samples, self._name, self._logged
        self._samples, self._name, self._logged = samples, name, logged
        try:
            yield
        finally:
            self._samples, self._name, self._logged = before

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
        with self._waiting():
            return value_of_rank(obj, src, home, place)

    def reduce(self, tensor: Any, group: Any | None, reduce_op: ReduceOp | str | None) -> Any:
        """Reduce a tensor over all ranks.

        Within a step, a mean weighs each rank by its samples, as ``self.log(..., sync_dist=True)`` means it: by the
        ``batch_size`` given to ``self.log``, else by what the batch holds. If that is unknown on some rank, every
        rank counts the same, with a warning. At the end of an epoch Lightning has weighted the values itself. The mean
        of integers is not truncated.

        Args:
            tensor: of any shape and dtype; anything else is returned as it is.
            group: a process group; default: all ranks.
            reduce_op: ``"mean"``, ``"avg"``, ``"sum"``, ``"min"``, ``"max"`` or a ``ReduceOp``; ``None`` is a sum.

        Returns:
            The result on every rank, of the same dtype; a mean of integers in float64, or fp32 on devices without it.

        Raises:
            UnsupportedError: an unknown ``reduce_op``.
            DisagreementError: of a mean, on every rank, if one of them logs another value.
        """
        if not isinstance(tensor, Tensor) or self.alone():
            return tensor
        if self._before is not None and group in (None, dist.group.WORLD):
            self._before()
        name = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
        if isinstance(name, str) and name not in _REDUCTIONS:
            raise UnsupportedError(f"reduce_op={reduce_op!r} must be one of {', '.join(map(repr, _REDUCTIONS))}.")
        mean = name in ("mean", "avg", ReduceOp.AVG)
        wide = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else torch.float64
        what = f"reduce {self._logged or 'a tensor'}"
        logged = mean and self._logged and tensor.is_floating_point() and group in (None, dist.group.WORLD)
        if logged and (devices := self._on_devices(tensor.device)) is not None:
            found = self._mean_on_devices(tensor.detach().to(wide).reshape(-1), what, devices)
            return found.to(tensor.dtype).reshape(tensor.shape)
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
        self._explain(self._name, weight, unknown)
        return plain / ranks if unknown else weighted / weight

    def _explain(self, name: str | None, weight: float, unknown: float) -> None:
        """Warn of a mean of nothing, and of one that could not be weighted."""
        if not unknown:
            if not weight and name is not None:
                self.explain_nan(name)
        elif not self._warned:
            self._warned = True
            rank_zero_warn(
                f"A mean over ranks counted every rank the same: on {int(unknown)} of them nobody can tell how many "
                "samples the batch holds. Pass `batch_size=` to `self.log`; elsewhere reduce sums of values and of "
                "samples (`reduce_op='sum'`) and divide them."
            )

    def _mean_on_devices(self, value: Tensor, what: str, devices: dist.ProcessGroup) -> Tensor:
        """The mean over all ranks' devices, for which the host does not wait; :meth:`settle` checks it."""
        number = collective_number(what, None)
        sums = torch.cat([self._with_weight(value), value.new_full((1,), number)])
        with self._waiting():
            dist.all_reduce(sums, group=devices)
        weighted, plain = sums[:-4].chunk(2)
        weight, ranks, unknown, _ = sums[-4:].unbind()
        stage = stage_of(value.device)
        values = pinned(4, value.dtype) if stage.has_streams else torch.empty(4, dtype=value.dtype)
        values.copy_(sums[-4:], non_blocking=stage.has_streams)
        self._unchecked.append(SumToCheck(values, stage.ready(), number, self._name))
        return torch.where(unknown > 0, plain / ranks, weighted / weight)

    def settle(self) -> None:
        """Check the means that were taken on devices; after the step that took them, in which nobody waits for that.

        Raises:
            DisagreementError: on every rank, if one of them has logged another value.
        """
        unchecked, self._unchecked = self._unchecked, []
        for values, ready, number, name in unchecked:
            if ready is not None:
                ready.synchronize()
            weight, _, unknown, summed = values.tolist()
            check_sum(summed, number, None)
            self._explain(name, weight, unknown)

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
        if self._before is not None and group in (None, dist.group.WORLD):
            self._before()

        def gathering() -> Tensor:
            return gather_samples(tensor.to("cpu"), group, sync_grads, self._waiting, self._loss_counts)

        gathered = collective("gather a tensor", gathering)
        return gathered.to(tensor.device)
