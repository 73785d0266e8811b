"""Files on the disk after a save; read without the package."""

from pathlib import Path
from typing import Any

import torch


def shards_of(path: Path | str) -> list[Path]:
    """The shards that belong to a checkpoint, in the order of replicas."""
    replicas = torch.load(path, weights_only=True)["lightning_hetero"]["replicas"]
    return [Path(f"{path}.shards", f"replica-{i}-{replicas['save']}.pt") for i in replicas["ids"]]


def replicas_of(path: Path | str) -> list[dict[str, Any]]:
    """The own state of each replica."""
    return [torch.load(shard, weights_only=True)["state"] for shard in shards_of(path)]


def consensus(path: Path | str) -> torch.Tensor:
    """The weights that all strategies read."""
    return torch.cat([value.reshape(-1) for value in torch.load(path, weights_only=True)["state_dict"].values()])


def states_of(path: Path | str) -> Any:
    """All states but random numbers: weights, optimizers, schedulers, and those of replicas."""
    checkpoint = torch.load(path, weights_only=True)
    shared = [checkpoint[name] for name in ("global_step", "state_dict", "optimizer_states", "lr_schedulers")]
    return shared, replicas_of(path) if "replicas" in checkpoint["lightning_hetero"] else []


def same_state(one: Any, two: Any) -> bool:
    """Whether states are equal bit for bit, but for times that were measured."""
    if isinstance(one, dict):
        names = [name for name in one if name not in ("rhythm", "lasted", "_rates")]
        return one.keys() == two.keys() and all(same_state(one[name], two[name]) for name in names)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same_state, one, two))
    return torch.equal(one, two) if isinstance(one, torch.Tensor) else repr(one) == repr(two)  # NaN is NaN
