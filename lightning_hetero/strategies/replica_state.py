"""Every replica's own state in a checkpoint, so that a resumed run goes on as if it had never stopped."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_hetero.averaging.averager import Averager
from lightning_hetero.strategies.checkpoint import REPLICAS
from lightning_hetero.strategies.losses import Losses


def of_replica(
    values: Sequence[Tensor],
    kept: Mapping[str, Tensor],
    optimizers: Sequence[Optimizer],
    precision: dict[str, Any],
    windows: int,
    algorithm: dict[str, Any],
) -> dict[str, Any]:
    """What all ranks of a replica have in common; tensors and builtins only."""
    return {
        "values": [value.cpu() for value in values],
        "kept": dict(kept),
        "precision": precision,
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "windows": windows,
        "algorithm": algorithm,
    }


def gather_into(checkpoint: dict[str, Any], strategy: str, replica: dict[str, Any] | None, losses: Losses) -> None:
    """Add the states of all replicas and ranks to rank 0's checkpoint (collective).

    Args:
        checkpoint: to add to.
        strategy: name of the strategy's class.
        replica: the replica's state, on its leader; else ``None``.
        losses: of this rank.
    """
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((replica, {"losses": losses.state_dict()}), everyone)
    if everyone is not None:
        checkpoint[REPLICAS] = {
            "strategy": strategy,
            "replicas": [state for state, _ in everyone if state is not None],
            "ranks": [state for _, state in everyone],
        }


def find(checkpoint: Mapping[str, Any], strategy: str, index: int, count: int) -> dict[str, Any] | str:
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


def restore(state: Mapping[str, Any], averager: Averager, optimizers: Sequence[Optimizer], losses: Losses) -> int:
    """Continue from a rank's state; returns the optimizer steps done."""
    averager.replica.unpack(state["values"])
    averager.replica.keep(state["kept"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    averager.load_state_dict(state["algorithm"])
    losses.load_state_dict(state["losses"])
    return int(state["windows"])
