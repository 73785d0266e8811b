"""What cannot go on when a rank is lost, and is refused before the first step where that is asked for."""

import os
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import DistributedSampler

from lightning_hetero.engine.view import View
from lightning_hetero.errors import ConfigurationError, HeteroError, UnsupportedError
from lightning_hetero.strategies.weight_averaging import averages_weights
from lightning_hetero.workload.sampler import ShareSampler

if TYPE_CHECKING:
    from lightning_hetero.strategies.base import HeteroStrategy


def unsurvivable(strategy: "HeteroStrategy", view: View) -> HeteroError | None:
    """Why this fit could not go on without a rank; ``None`` if it can.

    Args:
        strategy: of a fit that is about to take its first step.
        view: who takes part.
    """
    least, found = strategy.options.min_replicas, len(view.units)
    if found < least:
        what = "ranks" if view.ranks_leave else "replicas"
        return ConfigurationError(
            f"min_replicas={least}, but this job has {found} {what}. Start more, or ask for fewer."
        )
    others = [source for source in strategy.share.loaders.sources() if not isinstance(source, ShareSampler)]
    if any(isinstance(getattr(source, "sampler", None), DistributedSampler) for source in others):
        return UnsupportedError(
            "on_peer_loss='continue' with a DistributedSampler that you have made: it gives each rank a fixed part of "
            "the samples, and those of a lost rank could not be given to others. Leave the DistributedSampler out, and "
            "keep use_distributed_sampler=True: this package then splits the samples, and splits them anew when a "
            "rank is lost."
        )
    if others:
        return UnsupportedError(
            "on_peer_loss='continue' needs a map-style training dataset, which the ranks that remain can split anew. "
            "What an iterable dataset has given to a lost rank cannot be given to others. Use a map-style dataset, or "
            "on_peer_loss='error' with checkpoints to start again from."
        )
    names = [type(callback).__name__ for callback in _callbacks(strategy) if averages_weights(callback)]
    if names and view.count > 1:
        return UnsupportedError(
            f"on_peer_loss='continue' together with {', '.join(names)} under {type(strategy).__name__}: updates "
            "of averaged weights in which a rank is lost cannot be repeated. Leave the callback out, or use hetero_ddp."
        )
    if getattr(getattr(strategy, "algorithm", None), "center", None) == "mpi":
        return UnsupportedError(
            "on_peer_loss='continue' with center='mpi': MPI ends all ranks when one dies. Use center='thread'."
        )
    if any(view.topology.islands(ranks) for ranks in view.ranks):
        return UnsupportedError(
            "on_peer_loss='continue' with GPUs that average gradients within a replica: NCCL's groups cannot be left "
            "yet while an operation with a dead rank is pending. Make each rank a replica of its own (replica='rank'), "
            "or use on_peer_loss='error' with checkpoints to start again from."
        )
    return None


def say_what_launchers_do(strategy: "HeteroStrategy") -> None:
    """Say which launchers end all ranks when one of them dies, whatever the strategy does."""
    agents = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1 and "TORCHELASTIC_RUN_ID" in os.environ
    if agents:
        rank_zero_info(
            f"{type(strategy).__name__}: torchrun ends all ranks of its machine when one of them dies. To go on "
            "without it, start one torchrun for each replica, or let the Trainer start the ranks."
        )


def _callbacks(strategy: "HeteroStrategy") -> list[Any]:
    return strategy.trainer.callbacks  # type: ignore[attr-defined]
