"""How what a step logs counts: by the samples of this rank."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_hetero._lightning import logged_metric, step_value_kept
from lightning_hetero.comm.devices import widest
from lightning_hetero.engine.collectives import Collectives

_END = "_epoch_end"
_EPOCH = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end")  # hooks of a fit that are about no batch


def count(
    results: Any | None,
    collectives: Collectives,
    samples: Callable[[], float | None],
    epoch: Callable[[], float | None],
) -> None:
    """From now on, until :func:`count_as_ever`, what is logged counts by this rank's samples.

    What a step logs, and in training its hooks, counts by the samples of the batch; what a hook logs at the end of an
    epoch by those of the epoch. ``self.log(..., batch_size=n)`` goes before this.

    Nothing that is logged while a batch has none, as on a padding batch, adds to any sum, mean, minimum or maximum, and
    the value of the step before stays. It is logged all the same: with ``sync_dist=True`` the other ranks wait for it.

    Args:
        results: the Trainer's collection of logged values, if it has one.
        collectives: what reduces.
        samples: this rank's samples of the batch; ``None`` if they are unknown.
        epoch: those of the epoch.
    """
    if results is None:
        return

    def log(fx: str, name: str, value: Any, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
        plain = partial(type(results).log, results, fx, name)
        if not fx.endswith("_step") and (not results.training or fx in _EPOCH):
            if batch_size is None and fx.endswith(_END):
                batch_size = int(epoch() or 0) or None
            plain(value, *args, batch_size=batch_size, **kwargs)
            return
        found, given, indexed = samples(), batch_size, kwargs.get("add_dataloader_idx", True)
        kept: AbstractContextManager[Any] = nullcontext()
        if found == 0:
            batch_size, given, kept = 0, None, step_value_kept(results, fx, name, indexed)
            if isinstance(value, Tensor):
                value = _nothing_like(value, kwargs.get("reduce_fx", torch.mean))
        elif given is not None:
            found = float(given)
        elif found is not None and not results.training:  # Lightning may look into the batch of the step before
            batch_size = int(found)
        with collectives.weighing(lambda: found, None if given is None else name, _words(fx, name)), kept:
            plain(value, *args, batch_size=batch_size, **kwargs)
        _prepare(results, logged_metric(results, fx, name, indexed), found)
        if given == 0:
            _explain(results, name, collectives.tell_of_nothing)

    results.log = log


def _words(fx: str, name: str) -> str:
    return f"what {fx} logs as {name!r}"


def count_as_ever(results: Any | None) -> None:
    """End what :func:`count` has begun; idempotent."""
    if results is not None:
        vars(results).pop("log", None)


def nothing(reduction: str) -> float:
    """What adds nothing to a mean, sum, maximum or minimum."""
    return {"max": float("-inf"), "min": float("inf")}.get(reduction, 0.0)


def _nothing_like(value: Tensor, reduce_fx: Any) -> Tensor:
    reduction = getattr(reduce_fx, "__name__", str(reduce_fx))
    return torch.full_like(
        value, nothing(reduction.lower()), dtype=value.dtype if value.is_floating_point() else torch.float32
    )


_SAMPLES = "samples_of_step"  # of a metric of Lightning's: how many its latest value stands for


def samples_of_step(metric: Any) -> float:
    """The samples for which the latest value of a logged metric stands; 1 if that is not known."""
    return getattr(metric, _SAMPLES, 1.0)


def _prepare(results: Any, metric: Any, samples: float | None) -> None:
    """Note what a value of a step stands for, and let a mean of all ranks over an epoch be summed in float64."""
    if not metric.is_tensor:
        return
    if metric.meta.on_step and results.training:
        setattr(metric, _SAMPLES, 1.0 if samples is None else samples)
    if metric.meta.on_epoch and metric.meta.is_mean_reduction and metric.meta.sync.should:
        metric.value = metric.value.to(widest(metric.value.device))  # as is the mean number of samples, its divisor


def _explain(results: Any, name: str, tell: Callable[[str], None]) -> None:
    """Let it be told if no value of a mean over an epoch counts.

    Args:
        results: the Trainer's collection of logged values.
        name: of the value.
        tell: called with the name if the mean is not a number for that reason.
    """
    for metric in results.values():
        if metric.meta.name != name or not (metric.is_tensor and metric.meta.is_mean_reduction):
            continue
        if getattr(metric.compute, "explains", False):
            continue

        def compute(metric: Any = metric, compute: Callable[[], Tensor] = metric.compute) -> Tensor:
            value = compute()
            if not metric.cumulated_batch_size.any() and metric.value.isfinite().all() and value.isnan().any():
                tell(name)
            return value

        compute.explains = True  # type: ignore[attr-defined]
        metric.compute = compute
