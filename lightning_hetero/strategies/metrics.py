"""Logged values and torchmetrics over ranks with different numbers of samples."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_hetero.comm.collectives import Collectives, Logged
from lightning_hetero.comm.object_collectives import on_device_of
from lightning_hetero.comm.retry import collective
from lightning_hetero.comm.topology import widest_float
from lightning_hetero.errors import ConfigurationError, not_none
from lightning_hetero.lightning_compat import (
    AgreedMetrics,
    Unsynced,
    let_callbacks_find,
    logged_key,
    logged_metric,
    logged_names,
    monitored_by,
    results_of,
    step_value_kept,
    unsynced,
)
from lightning_hetero.strategies.default_groups import WEIGHTED_TWICE

if TYPE_CHECKING:
    import lightning.pytorch as pl

_END = "_epoch_end"
_EPOCH = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end")  # hooks of a fit that are about no batch


class LoggedInPasses:
    """Values that a training step logs in several passes on a batch: logged once, in the last pass.

    Ranks may run different numbers of passes, and yet meet as often. A mean weighs passes by their samples, or by the
    ``batch_size`` that is given.
    """

    def __init__(self) -> None:
        self._latest: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}  # by name, what was logged last
        self.begin([0])

    def repeat(self, results: Any | None) -> None:
        """Log once more what training steps have logged: a rank without samples runs none, and others wait for it."""
        for name, (value, args, kwargs) in list(self._latest.items()):
            if isinstance(value, Metric):
                value._update_count = max(value._update_count, 1)  # or it warns that it knows nothing
            not_none(results, "what it was logged to").log("training_step", name, value, *args, **kwargs)

    def agree(self, module: "pl.LightningModule", collectives: Collectives, follows: bool) -> None:
        """Let ranks have logged the same in an epoch in which some have left out steps (collective).

        Values of an epoch are reduced one after the other. If names come up, or are not logged any more, while a rank
        has no samples, ranks would wait for each other there.

        Args:
            module: that logs; it knows the metrics.
            collectives: tell what rank 0 has logged, which leaves out no step.
            follows: whether this rank has left out steps. What it logs now counts for nothing.
        """
        trainer = module.trainer
        results = not_none(results_of(trainer), "what is logged")
        here = {name: key for name in self._latest if (key := logged_key(results, "training_step", name))}
        own = dict[str, Any](sync_dist_fn=None, sync_dist_group=None)  # of each rank
        told = {
            name: (None if isinstance(value, Metric) else value, args, {**kwargs, **own})
            for name, (value, args, kwargs) in self._latest.items()
            if name in here
        }
        told, order = collectives.broadcast((told, list(results)), home=module.device, place="what is logged")
        if not follows:
            return
        for name in here.keys() - told:
            results[here[name]].reset()  # it was not logged
        self.begin([0])
        kept, self._latest = {name: self._latest[name] for name in here if name in told}, {}
        for name in told.keys() - here:
            value, args, kwargs = told[name]
            value = module.get_submodule(kwargs["metric_attribute"]) if value is None else value
            self._latest[name] = value, args, {**kwargs, "sync_dist_fn": trainer.strategy.reduce}
        self.repeat(results)
        self._latest |= kept
        for key in filter(results.__contains__, order):
            results[key] = results.pop(key)

    def begin(self, sizes: Sequence[float]) -> None:
        """A batch has come; ``sizes``: samples of each pass on it."""
        self._sizes, self._number = sizes, 0
        self._values: dict[str, list[tuple[Tensor, float]]] = {}
        self._calls: dict[str, Callable[..., None]] = {}
        self.under_way = False  # whether a value is being logged

    @property
    def several(self) -> bool:
        """Whether there are several passes."""
        return len(self._sizes) > 1

    def ended(self) -> None:
        """A pass has ended."""
        self._number += 1
        if self._number == len(self._sizes):  # what the last pass has not logged
            for name in list(self._values):
                self._log(name)

    def take(self, log: Callable[..., None], fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a value, now or in the last pass; arguments after ``log`` are like its own."""
        if fx == "training_step":
            nothing = torch.zeros_like(value.detach()) if isinstance(value, Tensor) else value
            self._latest[name] = nothing, args, dict(kwargs)
        if not self.several or fx != "training_step" or not isinstance(value, Tensor):
            self._now(log, fx, name, value, *args, **kwargs)
            return
        given = kwargs.pop("batch_size", None)
        self._values.setdefault(name, []).append(
            (value.detach(), self._sizes[self._number] if given is None else given)
        )
        how = getattr(reduce_fx := kwargs.get("reduce_fx", torch.mean), "__name__", str(reduce_fx)).lower()

        def together() -> None:
            values, weights = zip(*self._values.pop(name), strict=True)
            whole = torch.stack(values)
            if how in ("sum", "max", "min"):
                whole = getattr(whole, how if how == "sum" else f"a{how}")(0)
            else:
                whole = sum(value * weight for value, weight in zip(values, weights, strict=True)) / (sum(weights) or 1)
            log(fx, name, whole, *args, batch_size=None if given is None else int(sum(weights)), **kwargs)

        self._calls[name] = together
        if self._number + 1 == len(self._sizes):
            self._log(name)

    def _log(self, name: str) -> None:
        self._now(self._calls[name])

    def _now(self, log: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self.under_way = True
        log(*args, **kwargs)
        self.under_way = False


def weigh_logged(
    results: Any | None,
    collectives: Collectives,
    samples: Callable[[], float | None],
    epoch: Callable[[], float | None],
    passes: LoggedInPasses | None = None,
) -> None:
    """From now on, until :func:`restore_logged`, what is logged counts by this rank's samples.

    What a step logs, and in training its hooks, counts by the samples of the batch; what a hook logs at the end of an
    epoch by those of the epoch. ``self.log(..., batch_size=n)`` goes before this.

    Nothing that is logged while a batch has none, as on a padding batch, adds to any sum, mean, minimum or maximum, and
    the value of the step before stays. It is logged all the same: with ``sync_dist=True`` the other ranks wait for it.

    Args:
        results: the Trainer's collection of logged values, if it has one.
        collectives: what reduces.
        samples: this rank's samples of the batch; ``None`` if they are unknown.
        epoch: those of the epoch.
        passes: on the batch, in training.
    """
    if results is None:
        return

    def log(fx: str, name: str, value: Any, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
        plain = partial(type(results).log, results, fx, name)
        if not fx.endswith("_step") and (not results.training or fx in _EPOCH):
            count = None
            if batch_size is None and fx.endswith(_END):
                count = epoch()
                batch_size = int(count or 0) or None
                if count == 0 and kwargs.get("sync_dist") and isinstance(value, Tensor):
                    batch_size, value = 0, _nothing_like(value, kwargs.get("reduce_fx", torch.mean))
            plain(value, *args, batch_size=batch_size, **kwargs)
            if count is not None:  # for callbacks that go by it without sync_dist
                indexed = kwargs.get("add_dataloader_idx", True)
                setattr(logged_metric(results, fx, name, indexed), _SAMPLES, count)
            return
        found, given, indexed = samples(), batch_size, kwargs.get("add_dataloader_idx", True)
        kept: AbstractContextManager[Any] = nullcontext()
        if found == 0:
            batch_size, given, kept = 0, None, step_value_kept(results, fx, name, indexed)
            if isinstance(value, Tensor):
                value = _nothing_like(value, kwargs.get("reduce_fx", torch.mean))
        elif given is not None:
            found = float(given)
        elif found is not None and (not results.training or (passes and passes.several)):
            # Lightning may look into the batch of the step before, or of one pass.
            batch_size = int(found)
        with collectives.weighing(lambda: found, Logged(name, fx, given is not None)), kept:
            plain(value, *args, batch_size=batch_size, **kwargs)
        _prepare(results, logged_metric(results, fx, name, indexed), found)
        if given == 0:
            _explain(results, name, collectives.explain_nan)

    def metrics(*args: Any) -> Any:
        collectives.reduce_deferred()
        return type(results).metrics(results, *args)

    results.log = log if passes is None else partial(passes.take, log)
    results.metrics = metrics


def restore_logged(results: Any | None) -> None:
    """End what :func:`weigh_logged` has begun; idempotent."""
    for name in ("log", "metrics") if results is not None else ():
        vars(results).pop(name, None)


def nothing(reduction: str) -> float:
    """The value that adds nothing to a mean, sum, maximum or minimum."""
    return {"max": float("-inf"), "min": float("inf")}.get(reduction, 0.0)


def _nothing_like(value: Tensor, reduce_fx: Any) -> Tensor:
    reduction = getattr(reduce_fx, "__name__", str(reduce_fx))
    return torch.full_like(
        value, nothing(reduction.lower()), dtype=value.dtype if value.is_floating_point() else torch.float32
    )


_SAMPLES = "samples_of_step"  # of a metric of Lightning's: how many its latest value stands for


def samples_of_step(metric: Any) -> float:
    """The samples for which the value of a logged metric, of the latest step or of a hook, stands; 1: not known."""
    return getattr(metric, _SAMPLES, 1.0)


def _prepare(results: Any, metric: Any, samples: float | None) -> None:
    """Note what a value of a step stands for, and let a mean of all ranks over an epoch be summed in float64."""
    if not metric.is_tensor:
        return
    if metric.meta.on_step and results.training:
        setattr(metric, _SAMPLES, 1.0 if samples is None else samples)
    if metric.meta.on_epoch and metric.meta.is_mean_reduction and metric.meta.sync.should:
        metric.value = metric.value.to(
            widest_float(metric.value.device)
        )  # as is the mean number of samples, its divisor


def _explain(results: Any, name: str, tell: Callable[[str], None]) -> None:
    """Call ``tell`` with the name if a mean over an epoch is not a number because none of its values counts."""
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


class MonitoredMetrics:
    """Makes what callbacks and schedulers go by the same on every rank: the mean over the samples of all ranks.

    That concerns values that were logged without ``sync_dist=True``. All of them together are one message, where all
    ranks come by: at the end of an evaluation or of a training epoch, and where a callback or a scheduler looks at the
    values of a training step. In training there is none once it is known that nothing of the kind is monitored there.

    Args:
        trainer: of the run, with its schedulers (collective).
        collectives: gathers.
        former: of the run before.
    """

    def __init__(
        self, trainer: "pl.Trainer", collectives: Collectives, former: "MonitoredMetrics | None" = None
    ) -> None:
        if former is not None:
            former.close()
        self._trainer, self._collectives = trainer, collectives
        everyone = collectives.gather(sorted(monitored_by(trainer)), "what is monitored")
        self._names = frozenset().union(*everyone)
        self._known: set[str] = set()  # names that some rank has logged somewhere
        self._found: dict[str, set[str]] = {}  # of each place where ranks have met, what was averaged there
        self._warned: set[str] = set() if former is None else former._warned
        self._hooks = AgreedMetrics(trainer, self._agree) if self._names and len(everyone) > 1 else None

    def close(self) -> None:
        """Leave the Trainer and its callbacks alone. Idempotent."""
        if self._hooks is not None:
            self._hooks.restore()

    def _agree(self, place: str) -> None:
        """Make what is monitored the same on all ranks at an evaluation, epoch or step (collective)."""
        nothing = self._found.get(place) == set() and self._names <= self._known
        if self._collectives.alone() or (nothing and place != "evaluation"):
            return
        here = dict(unsynced(self._trainer, self._names))
        own = {key: (one.names, one.reduction, *_numbers(one)) for key, one in here.items()}
        everyone = self._collectives.gather((own, logged_names(self._trainer)), "what is monitored")
        agreed, home = dict[str, Tensor](), self._trainer.strategy.root_device
        for key in dict.fromkeys(key for values, _ in everyone for key in values):
            of_ranks = {rank: values[key] for rank, (values, _) in enumerate(everyone) if key in values}
            names, reduction = next(iter(of_ranks.values()))[:2]
            value = _together(reduction, [numbers[2:] for numbers in of_ranks.values()])
            new = here[key].replace(value) if key in here else torch.tensor(value, device=home)
            agreed |= dict.fromkeys(names, new)
            self._tell(next(name for name in names if name in self._names), reduction, of_ranks, len(everyone))
        let_callbacks_find(self._trainer, agreed)
        self._known.update(*(names for _, names in everyone))
        self._found.setdefault(place, set()).update(agreed)

    def _tell(self, name: str, reduction: str, of_ranks: Mapping[int, Any], world: int) -> None:
        """Say once that ranks have had values of their own."""
        values = {_together(reduction, [numbers[2:]]) for numbers in of_ranks.values()}
        if name in self._warned or (len(of_ranks) == world and len(values) == 1):
            return
        self._warned.add(name)
        what = "the mean over the samples" if reduction == "mean" else f"the {reduction}"
        if len(of_ranks) < world:
            ranks = f"rank(s) {', '.join(map(str, of_ranks))}"
            rank_zero_info(f"{name!r} is monitored, and was logged on {ranks} only: all ranks go by {what} of these.")
            return
        rank_zero_info(
            f"{name!r} is monitored, and was logged without sync_dist=True, with different values: all ranks go by "
            f"{what} of all of them."
        )


def _numbers(one: Unsynced) -> tuple[float, float]:
    """The part of a rank in a value of all ranks: the value, and its weight; of a mean, their product comes first."""
    value, own = one.value.item(), one.of_step or not one.metric.meta.on_step
    if own and not samples_of_step(one.metric):
        return nothing(one.reduction), 0.0
    if one.reduction != "mean":
        return value, 1.0
    if one.weight is not None:
        return value, one.weight.item()
    samples = samples_of_step(one.metric)
    return value * samples, samples


def _together(reduction: str, numbers: Sequence[tuple[float, float]]) -> float:
    """The value that the :func:`_numbers` of ranks make."""
    values, weights = zip(*numbers, strict=True)
    if reduction != "mean":
        return float(getattr(np, reduction)(values))
    return sum(values) / sum(weights) if sum(weights) else math.nan


class LoggedMetrics:
    """The logged metrics of a fit, as means over all ranks.

    Args:
        trainer: of the fit.
    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        self._trainer = trainer
        self._seen: dict[str, Tensor | None] = {}  # the value at the last look
        self._restored: dict[str, Tensor] = {}  # values of the run that goes on
        self._epochs = 0  # that it had trained
        self.begin()

    def begin(self) -> None:
        """Training begins, at the epoch at which the Trainer stands."""
        self._first_epoch = self._trainer.current_epoch - self._epochs

    def state_dict(self) -> dict[str, Any]:
        """Builtins only: this rank's latest values, which of them were seen at the last look, and epochs trained."""
        values = {**self._restored, **self._trainer.callback_metrics}
        values = {name: value for name, value in values.items() if isinstance(value, Tensor) and value.numel() == 1}
        return {
            "values": {name: float(value) for name, value in values.items()},
            "seen": [name for name, value in values.items() if value is self._seen.get(name)],
            "epochs": self._trainer.current_epoch - self._first_epoch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._restored = {name: torch.tensor(value) for name, value in state["values"].items()}
        self._seen |= {name: self._restored[name] for name in state["seen"]}
        self._epochs = state["epochs"]

    def mean_over_ranks(self, name: str) -> float | None:
        """The mean over all ranks of a metric's latest value (collective).

        Args:
            name: under which it is logged.

        Returns:
            The mean; or ``None`` if it has not been logged since the last look, or there was no occasion yet.

        Raises:
            ConfigurationError: it is NaN, or has not been logged by all ranks.
        """
        value = self._trainer.callback_metrics.get(name, self._restored.get(name))
        epochs = self._trainer.current_epoch - self._first_epoch
        occasions = epochs // (self._trainer.check_val_every_n_epoch or 1)
        if value is self._seen.get(name) and (value is not None or occasions == 0):
            return None
        self._seen[name] = value

        def total() -> list[float]:
            row = torch.tensor([math.nan if value is None else float(value), 1.0], dtype=torch.float64)
            dist.all_reduce(row)
            return row.tolist()

        value_sum, ranks = collective(f"average the metric {name!r}", total)
        mean = value_sum / ranks
        if math.isnan(mean):
            raise ConfigurationError(
                f"monitor={name!r} is NaN, or has not been logged by all ranks; this one has logged "
                f"{sorted(self._trainer.callback_metrics)}. Log it with self.log, or watch the training loss with "
                "monitor=None."
            )
        return mean


def warn_of_losses_over_all(module: nn.Module) -> list[RemovableHandle]:
    """Warn, once, where a loss seems to be made of a metric that is synchronised over all ranks at each step.

    Such a loss is normalised over all samples already. Whether a value that has a gradient goes into the loss, or is
    only logged, cannot be seen here.

    Args:
        module: whose losses are weighted by each rank's samples.

    Returns:
        Handles of the hooks that look at the metrics' values.
    """
    handles: list[RemovableHandle] = []

    def look(name: str, metric: nn.Module, args: Any, output: Any) -> None:
        if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output)):
            return
        for handle in handles:
            handle.remove()
        rank_zero_warn(
            f"The value of the metric `{name}` has a gradient, and with dist_sync_on_step=True it is a value over all "
            f"ranks. If the loss is made of it, the loss is normalised over all ranks already. {WEIGHTED_TWICE}"
        )

    for name, metric in module.named_modules():
        if isinstance(metric, Metric) and metric.dist_sync_on_step:
            handles.append(metric.register_forward_hook(partial(look, name)))
    return handles


def sync_anywhere(model: nn.Module) -> None:
    """Let the metrics of a model be synchronised on any device, unless the user says how.

    torchmetrics gathers a metric's states where they are. All ranks of a job meet over gloo, which knows few devices.
    """
    for metric in model.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn is None:
            metric.dist_sync_fn = gather_anywhere


def gather_anywhere(state: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """A metric's state of each rank, on this rank's device; through the CPU where they meet over gloo (collective).

    Args:
        state: of the same number of dimensions on every rank.
        group: the ranks. Default: all.
    """
    if dist.get_backend(group) != "gloo":
        return gather_all_tensors(state, group)
    everyone = [other.to(state.device) for other in gather_all_tensors(state.cpu(), group)]
    everyone[dist.get_rank(group)] = state  # with its gradient
    return everyone


class RepeatedSync:
    """Takes the place of a metric's ``sync`` for as long as lost ranks are survived.

    All states of the metric are one collective: they come from the same ranks, also where one is lost between two.

    Args:
        metric: whose states are summed or gathered over all ranks.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def __call__(
        self,
        dist_sync_fn: Any = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Any = None,
    ) -> None:
        """See ``torchmetrics.Metric.sync``."""
        metric = self._metric

        def sync(function: Any) -> None:
            type(metric).sync(metric, function, process_group, should_sync, distributed_available)

        done = False

        def over_all() -> dict[str, Any]:
            nonlocal done
            sync(dist_sync_fn)
            done = True
            return {name: getattr(metric, name) for name in metric.metric_state}

        if not should_sync or process_group is not None or metric.process_group is not None:
            sync(dist_sync_fn)  # not over all ranks
            return
        states = collective("synchronise a metric", over_all)
        if not done:  # the others have completed it, and have sent the states
            sync(_own)
            for name, state in states.items():
                setattr(metric, name, on_device_of(state, getattr(metric, name)))


def _own(state: Tensor, group: Any = None) -> list[Tensor]:
    return [state]


def repeat_metrics(model: nn.Module | None) -> None:
    """Let the metrics of a model survive lost ranks."""
    for metric in model.modules() if model is not None else ():
        if isinstance(metric, Metric):
            vars(metric)["sync"] = RepeatedSync(metric)


def leave_metrics(model: nn.Module | None) -> None:
    """Make the metrics of a model as they were. Idempotent."""
    for metric in model.modules() if model is not None else ():
        if isinstance(metric, Metric):
            vars(metric).pop("sync", None)
