"""What lies on the disk after a save; read without the package."""

from pathlib import Path
from typing import Any

import torch


def shards_of(path: Path | str) -> list[Path]:
    """The shards that belong to a checkpoint, in the order of replicas."""
    replicas = torch.load(path, weights_only=True)["lightning_hetero"]["replicas"]
    return [Path(f"{path}.shards", f"replica-{i}-{replicas['save']}.pt") for i in replicas["ids"]]


def replicas_of(path: Path | str) -> list[dict[str, Any]]:
    """The replicas' own states."""
    return [torch.load(shard, weights_only=True)["state"] for shard in shards_of(path)]
