"""How what a step logs counts: by the samples of this rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_hetero._lightning import logged_metric, step_value_kept
from lightning_hetero.comm.devices import widest
from lightning_hetero.engine.collectives import Collectives

_END = "_epoch_end"
_EPOCH = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end")  # hooks that are about no batch


@contextmanager
def counting(
    collectives: Collectives, samples: Callable[[], float | None], results: Any | None, infers: bool = False
) -> Iterator[None]:
    """While a step runs, means over ranks weigh this rank by its samples.

    What ``self.log(..., batch_size=n)`` says about one value goes before what is known about the step.

    Args:
        collectives: what reduces.
        samples: this rank's samples in the step, ``None`` if they are unknown; asked only if something is reduced.
        results: the Trainer's collection of logged values, if the step can log.
        infers: tell Lightning these samples where the user has given no ``batch_size``. Where a step fetches its own
            batches, Lightning would look into the batch of the step before.
    """

    def log(fx: str, name: str, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
        given = batch_size
        if batch_size is None and infers and (found := samples()) is not None:
            batch_size = int(found)
        counts = samples if batch_size is None else lambda: float(batch_size)
        with collectives.weighing(counts, None if given is None else name, _words(fx, name)):
            type(results).log(results, fx, name, *args, batch_size=batch_size, **kwargs)  # type: ignore[union-attr]
        _prepare(results, logged_metric(results, fx, name, kwargs.get("add_dataloader_idx", True)), counts)
        if given == 0:
            _explain(results, name, collectives.tell_of_nothing)

    with collectives.weighing(samples), _logging_by(results, log):
        yield


def count_batch(
    collectives: Collectives, samples: Callable[[], float], epoch: Callable[[], float], results: Any | None
) -> None:
    """From now on, what is logged about the running batch counts by this rank's samples, in its step and in its hooks.

    Nothing that is logged while there are none, as on a padding batch, adds to any sum, mean, minimum or maximum, and
    the value of the step before stays. It is logged all the same: with ``sync_dist=True`` the other ranks wait for it.

    Args:
        collectives: what reduces.
        samples: this rank's samples of the batch.
        epoch: those of the epoch, by which a value counts that a hook logs at its end.
        results: the Trainer's collection of logged values, if the step can log.
    """
    if results is None:
        return

    def log(fx: str, name: str, value: Any, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
        plain = partial(type(results).log, results, fx, name)
        if fx in _EPOCH:
            if batch_size is None and fx.endswith(_END):
                batch_size = int(epoch()) or None
            plain(value, *args, batch_size=batch_size, **kwargs)
            return
        if not (count := samples()):
            if isinstance(value, Tensor):
                value = _nothing_like(value, kwargs.get("reduce_fx", torch.mean))
            indexed = kwargs.get("add_dataloader_idx", True)
            with (
                collectives.weighing(lambda: 0.0, logged=_words(fx, name)),
                step_value_kept(results, fx, name, indexed),
            ):
                plain(value, *args, batch_size=0, **kwargs)
            _prepare(results, logged_metric(results, fx, name, indexed), lambda: 0.0)
            return
        counts, given = (count, None) if batch_size is None else (float(batch_size), name)
        with collectives.weighing(lambda: counts, given, _words(fx, name)):
            plain(value, *args, batch_size=batch_size, **kwargs)
        _prepare(results, logged_metric(results, fx, name, kwargs.get("add_dataloader_idx", True)), lambda: counts)
        if batch_size == 0:
            _explain(results, name, collectives.tell_of_nothing)

    results.log = log


def _words(fx: str, name: str) -> str:
    return f"what {fx} logs as {name!r}"


def count_epoch(results: Any | None, samples: float | None) -> None:
    """From now on, a value that a hook logs at the end of an epoch counts by the samples of this rank in the epoch.

    Lightning would count all ranks alike. ``batch_size=`` goes before this.

    Args:
        results: the Trainer's collection of logged values, if it has one.
        samples: of this rank in the epoch; ``None`` if they are unknown.
    """
    if results is None:
        return

    def log(fx: str, name: str, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
        if batch_size is None and samples and fx.endswith(_END):
            batch_size = int(samples)
        type(results).log(results, fx, name, *args, batch_size=batch_size, **kwargs)

    results.log = log


def count_as_ever(results: Any | None) -> None:
    """End what :func:`count_batch` or :func:`count_epoch` has begun; idempotent."""
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


def _prepare(results: Any, metric: Any, samples: Callable[[], float | None]) -> None:
    """Note what a value of a step stands for, and let a mean of all ranks over an epoch be summed in float64."""
    if not metric.is_tensor:
        return
    if metric.meta.on_step and results.training:
        setattr(metric, _SAMPLES, 1.0 if (found := samples()) is None else found)
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


@contextmanager
def _logging_by(results: Any | None, log: Callable[..., None]) -> Iterator[None]:
    if results is None:
        yield
        return
    results.log = log
    try:
        yield
    finally:
        count_as_ever(results)
