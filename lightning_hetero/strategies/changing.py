"""Other replicas of the same ranks, in the midst of a fit."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lightning_hetero import _lightning
from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.replica import share_values
from lightning_hetero.engine.job import Job
from lightning_hetero.engine.view import Member, View
from lightning_hetero.strategies import plans, regrouping
from lightning_hetero.strategies.default_groups import beyond
from lightning_hetero.strategies.replica_guards import two_points
from lightning_hetero.strategies.weight_averaging import averages_weights
from lightning_hetero.workload.regrouping import Regrouping
from lightning_hetero.workload.sampler import ShareSampler

if TYPE_CHECKING:
    from lightning_hetero.strategies.replica import ReplicaStrategy


def divided(strategy: "ReplicaStrategy") -> View:
    """The view of the same ranks, with the replicas that the strategy asks for now."""
    assert strategy.job is not None
    view = strategy.job.view
    members = tuple(Member(id, ranks) for id, ranks in enumerate(strategy.replicas(view.topology)))
    return replace(view, number=view.number + 1, replicas=members, ranks_leave=len(members) == 1)


def unchangeable(strategy: "ReplicaStrategy") -> str | None:
    """Why the replicas of this fit cannot be divided, in words; ``None`` if they can."""
    module, callbacks = strategy.trainer.lightning_module, strategy.trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in module.modules()):
        return "SyncBatchNorm takes its statistics over all ranks"
    if (hook := _lightning.comm_hook(strategy)) is not None and not getattr(hook[1], "__module__", "").startswith(
        "torch."
    ):
        return "ddp_comm_hook may average over all ranks"
    if (problem := beyond(module, strategy.optimizers, divided(strategy).replica.ranks)) is not None:
        return str(problem).partition(",")[0]
    if names := [type(callback).__name__ for callback in callbacks if averages_weights(callback)]:
        return f"{names[0]} has begun to average the weights of one replica"
    if two_points(strategy.optimizers) is not None:
        return "the optimizer keeps an average of the weights of one replica (it has `train()` and `eval()`)"
    if any(not isinstance(source, ShareSampler) for source in strategy.share.loaders.sources()):
        return "the training data is no map-style dataset that this package splits"
    return None


def divide(strategy: "ReplicaStrategy") -> None:
    """Let the replicas that the strategy asks for now go on from the weights that all hold (collective).

    Args:
        strategy: between two windows, with equal weights on all ranks, and its new averager to be made.
    """
    assert strategy.job is not None
    share, former = strategy.share, strategy.job
    share.listen()  # leave nothing in flight
    start = max(gather(share.loaders.next_step(), "the next batch to draw"))
    job = Job(divided(strategy), former.timeout, former.within)
    kept = tuple(range(former.view.world))
    regrouping.rebuild(strategy, job, Regrouping(kept, start, share.heard))
    share_values(strategy.trainer.lightning_module)  # unlike devices round differently, and buffers are each rank's own
    strategy.begin_apart()
    regrouping.renew_model(strategy)
    if strategy.stop_request is not None:
        strategy.stop_request.move(job.store("stop"))
    plans.begin(strategy)
    strategy.timer.restart()
