"""Lets torchmetrics objects be synchronised again among the ranks that remain, where a rank is lost meanwhile."""

from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hetero.comm.collective import collective
from lightning_hetero.comm.objects import beside


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
                setattr(metric, name, beside(state, getattr(metric, name)))


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
