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


def collect(averager: Averager, values: Sequence[Tensor], optimizers: Sequence[Optimizer], windows: int) -> dict:
    """This replica's state; tensors and builtins only."""
    return {
        "values": [value.cpu() for value in values],
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "averager": averager.state_dict(),
        "windows": windows,
    }


def gather_into(checkpoint: dict[str, Any], own: dict[str, Any], leads: bool) -> None:
    """Add the states of all replicas, and the random states of all ranks, to rank 0's checkpoint (collective)."""
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((own if leads else None, _random_states()), everyone)
    if everyone is not None:
        replicas = [state for state, _ in everyone if state is not None]
        checkpoint[KEY] = {"replicas": replicas, "random": [states for _, states in everyone]}


def find(checkpoint: Mapping[str, Any], index: int, count: int) -> dict[str, Any] | None:
    """This replica's state in a checkpoint of as many replicas; ``None`` if there is none (collective)."""
    replicas = checkpoint.get(KEY, {}).get("replicas", [])
    found = replicas[index] if len(replicas) == count else None
    return found if all(gather(found is not None, "the checkpoint's state")) else None


def restore(state: Mapping[str, Any], averager: Averager, optimizers: Sequence[Optimizer]) -> int:
    """Continue from a replica's state; returns the optimizer steps done."""
    averager.replica.unpack(state["values"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    averager.load_state_dict(state["averager"])
    return int(state["windows"])


def random_states_of(checkpoint: Mapping[str, Any], rank: int) -> dict[str, Any] | None:
    """The random states of a rank, if the checkpoint is of as many ranks."""
    states = checkpoint.get(KEY, {}).get("random", [])
    return states[rank] if len(states) == dist.get_world_size() else None


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
