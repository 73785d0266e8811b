"""Every replica's own state in a checkpoint, so that a resumed run goes on as if it had never stopped."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_hetero.averaging.averager import Averager
from lightning_hetero.comm.agreement import gather

KEY = "lightning_hetero_replicas"


def collect(values: Sequence[Tensor], optimizers: Sequence[Optimizer], windows: int) -> dict[str, Any]:
    """This replica's state; tensors and builtins only."""
    return {
        "values": [value.cpu() for value in values],
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "windows": windows,
    }


def gather_into(checkpoint: dict[str, Any], own: dict[str, Any] | None, averager: Averager) -> None:
    """Add the states of all replicas and ranks to rank 0's checkpoint (collective).

    Args:
        checkpoint: to add to.
        own: the replica's state, on its leader; else ``None``.
        averager: the algorithm; what is under way may be known to one rank of a replica only.
    """
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((own, averager.state_dict(), _random_states()), everyone)
    if everyone is not None:
        checkpoint[KEY] = {
            "replicas": [state for state, _, _ in everyone if state is not None],
            "averagers": [state for _, state, _ in everyone],
            "random": [states for _, _, states in everyone],
        }


def find(checkpoint: Mapping[str, Any], index: int, count: int, rank: int) -> dict[str, Any] | None:
    """This rank's state in a checkpoint of as many replicas and ranks; ``None`` if there is none (collective)."""
    saved = checkpoint.get(KEY, {"replicas": [], "averagers": []})
    fits = len(saved["replicas"]) == count and len(saved["averagers"]) == dist.get_world_size()
    if not all(gather(fits, "the checkpoint's state")):
        return None
    return {**saved["replicas"][index], "averager": saved["averagers"][rank], "random": saved["random"][rank]}


def restore(state: Mapping[str, Any], averager: Averager, optimizers: Sequence[Optimizer]) -> int:
    """Continue from a replica's state; returns the optimizer steps done."""
    averager.replica.unpack(state["values"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    averager.load_state_dict(state["averager"])
    return int(state["windows"])


def _random_states() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": [name, torch.tensor(np.asarray(keys), dtype=torch.int64), *rest],
        "python": [version, list(numbers), gauss],
    }


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Set the global random states of this rank."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
