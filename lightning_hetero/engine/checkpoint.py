"""What this package adds to a checkpoint. Any strategy can load the checkpoint without it."""

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pickle import UnpicklingError
from typing import Any

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hetero.comm.deadline import deadline
from lightning_hetero.engine.losses import Losses
from lightning_hetero.engine.step import Workshare
from lightning_hetero.errors import CheckpointError
from lightning_hetero.workload.shares import Cost

KEY = "lightning_hetero"
REPLICAS = "lightning_hetero_replicas"  # where replicas differ


@contextmanager
def readable(path: Any) -> Iterator[None]:
    """Say in plain words that a file is no whole checkpoint.

    Raises:
        CheckpointError: names the file.
    """
    try:
        yield
    except (EOFError, UnpicklingError, OSError, RuntimeError) as error:
        cut_off = isinstance(error, EOFError | UnpicklingError) or "PytorchStreamReader" in str(error)
        if not cut_off and getattr(error, "errno", None) != errno.EINVAL:  # of a seek to before the beginning
            raise
        raise CheckpointError(
            f"{path} is not a whole checkpoint: it was cut off while it was written or copied, or is something else. "
            f"Nothing has been changed; resume from an earlier one. Cause: {error}"
        ) from error


def add_plan(checkpoint: dict[str, Any], share: Workshare) -> None:
    """Add the plan, and what it rests on, to a checkpoint; builtins only, for weights-only loading."""
    loops = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    if not any(loops.get("combined_loader", [True])):
        del loops["combined_loader"]  # placeholders of the samplers, which other strategies would not expect
    fits = [[report.fixed, report.per_sample, max(report.samples, 1.0)] for report in share.reports]
    checkpoint[KEY] = {"planner": share.planner.state_dict(), "fits": fits}


def restore_plan(checkpoint: Mapping[str, Any], share: Workshare, rank: int) -> None:
    """Continue with the plan of a checkpoint, if it has one for as many ranks."""
    state = checkpoint.get(KEY)
    if state is None or not share.planner.auto:
        return
    saved = len(state["planner"]["costs"])
    if saved != share.planner.world:
        rank_zero_warn(
            f"The checkpoint's shares are for {saved} ranks; this job has {share.planner.world} and measures anew."
        )
        return
    share.planner.load_state_dict(state["planner"])
    if state["fits"]:
        fixed, per_sample, samples = state["fits"][rank]
        share.cost.assume(Cost(fixed, per_sample), int(samples))


def add_replicas(checkpoint: dict[str, Any], strategy: str, replica: dict[str, Any] | None, losses: Losses) -> None:
    """Add the states of all replicas and ranks to rank 0's checkpoint (collective).

    Args:
        checkpoint: to add to.
        strategy: name of the strategy's class.
        replica: the replica's state, on its leader; else ``None``.
        losses: of this rank.
    """
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    with deadline("gather the replicas' states to save"):
        dist.gather_object((replica, {"losses": losses.state_dict()}), everyone)
    if everyone is not None:
        checkpoint[REPLICAS] = {
            "strategy": strategy,
            "replicas": [state for state, _ in everyone if state is not None],
            "ranks": [state for _, state in everyone],
        }


def find_replica(checkpoint: Mapping[str, Any], strategy: str, index: int, count: int) -> dict[str, Any] | str:
    """This rank's state in a checkpoint; else, in words, why there is none. The same on every rank."""
    saved = checkpoint.get(REPLICAS)
    if saved is None:
        return (
            "The checkpoint holds no state of replicas: it was saved by a strategy without them, after the end of a "
            "fit, or while a rank had failed."
        )
    if saved["strategy"] != strategy:
        return f"The checkpoint was saved by {saved['strategy']}, this is {strategy}."
    here = dist.get_world_size()
    if len(saved["replicas"]) != count or len(saved["ranks"]) != here:
        then = f"{len(saved['replicas'])} replicas with {len(saved['ranks'])} ranks"
        return f"The checkpoint was saved by {then}; this job has {count} with {here}."
    return {**saved["replicas"][index], **saved["ranks"][dist.get_rank()]}


def warn_of_replicas(checkpoint: Mapping[str, Any], strategy: str) -> None:
    """Say that a strategy with one replica leaves out what a checkpoint holds of several."""
    if (saved := checkpoint.get(REPLICAS)) is not None:
        rank_zero_warn(
            f"The checkpoint was saved by {saved['strategy']}, this is {strategy}. Training starts from the "
            "checkpoint's weights, the consensus of its replicas, with the optimizer state of the first one."
        )
