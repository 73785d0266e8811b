"""What the LightningModule logs, for algorithms and callbacks that go by it; and torchmetrics on a device."""

import math
from collections.abc import Mapping, Sequence
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

from lightning_hetero._lightning import (
    AgreedMetrics,
    Unsynced,
    let_callbacks_find,
    logged_names,
    monitored_by,
    unsynced,
)
from lightning_hetero.comm.collective import collective
from lightning_hetero.engine.collectives import Collectives
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.strategies.default_groups import WEIGHTED_TWICE
from lightning_hetero.strategies.logged import nothing, samples_of_step

if TYPE_CHECKING:
    import lightning.pytorch as pl


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
        self._told: set[str] = set() if former is None else former._told
        self._hooks = AgreedMetrics(trainer, self._agree) if self._names and len(everyone) > 1 else None

    def close(self) -> None:
        """Leave the Trainer and its callbacks alone. Idempotent."""
        if self._hooks is not None:
            self._hooks.restore()

    def _agree(self, place: str) -> None:
        """Make what is monitored the same on all ranks (collective).

        Args:
            place: ``"evaluation"``, ``"epoch"`` or ``"step"``.
        """
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
        if name in self._told or (len(of_ranks) == world and len(values) == 1):
            return
        self._told.add(name)
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
    """What a rank adds to a value of all ranks: the value, and its weight; of a mean, their product comes first."""
    value, none = one.value.item(), one.of_step and not samples_of_step(one.metric)
    if none:
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
        self.begin()

    def begin(self) -> None:
        """Training begins, at the epoch at which the Trainer stands."""
        self._first_epoch = self._trainer.current_epoch

    def mean_over_ranks(self, name: str) -> float | None:
        """The mean over all ranks of a metric's latest value (collective).

        Args:
            name: under which it is logged.

        Returns:
            The mean; or ``None`` if it has not been logged since the last look, or there was no occasion yet.

        Raises:
            ConfigurationError: it is NaN, or has not been logged by all ranks.
        """
        value = self._trainer.callback_metrics.get(name)
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
