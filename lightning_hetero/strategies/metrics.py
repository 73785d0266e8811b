"""What the LightningModule logs, for algorithms that go by it; and metrics of torchmetrics on a device."""

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_hetero.comm.collective import collective
from lightning_hetero.errors import ConfigurationError

if TYPE_CHECKING:
    import lightning.pytorch as pl


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

    Such a loss is normalised over all samples already. A value that is only logged carries no gradient.

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
            "ranks. If the loss is made of it, the loss is normalised over all ranks already, and is then weighted by "
            "each rank's samples once more, which is wrong where ranks have different numbers of samples. Let "
            "`batch_weight(self, batch)` of the LightningModule return 1: the ranks' losses then count alike."
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
