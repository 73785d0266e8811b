"""A model that shards itself over the ranks of its replica trains as a whole one does: to rounding, with every string."""

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from oracles import oracle
from ranks import attempt, run
from tasks import FAST, Net, TokenNet, dataset
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_hetero.strategies.table import ENTRIES

STRATEGIES = {entry.name: entry.strategy for entry in ENTRIES}


class Sharded:
    """Shards the layers of a module over its replica, if it is given a mesh."""

    shards = True

    def configure_model(self) -> None:
        mesh = self.device_mesh  # type: ignore[attr-defined]
        if not self.shards or mesh is None or hasattr(self, "sharded"):
            return
        self.sharded = True
        for layer in self.net:  # type: ignore[attr-defined]
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh["data_parallel"])
        fully_shard(self, mesh=mesh["data_parallel"])  # type: ignore[call-overload]


class ShardedNet(Sharded, Net):
    pass


class ShardedTokens(Sharded, TokenNet):
    pass


def whole(module: pl.LightningModule) -> list[torch.Tensor]:
    """The parameters, each gathered from its shards (collective over the replica)."""
    values = [p.detach() for p in module.parameters()]
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for p in values]


def fit(
    name: str, shards: bool = True, kind: type[Any] = ShardedNet, samples: int = 101, epochs: int = 2, **given: Any
) -> list[torch.Tensor]:
    options = {key: value for key, value in given.items() if key in ("gradient_clip_val", "accumulate_grad_batches")}
    strategy = STRATEGIES[name](**{key: value for key, value in given.items() if key not in (*options, "optimizer")})
    module = kind(optimizer=given.get("optimizer", "sgd"))
    module.shards = shards
    warnings.filterwarnings("ignore", "Replicas of the job")
    trainer = pl.Trainer(strategy=strategy, max_epochs=epochs, **options, **FAST)
    trainer.fit(module, DataLoader(dataset(samples), batch_size=4))
    found = whole(module)
    dist.barrier()
    return found


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_sharded_gradients_are_exact(optimizer: str) -> None:
    options = {"balance": [3.0, 1.0, 2.0], "optimizer": optimizer}
    ours = run(fit, 3, "hetero_ddp", **options)
    theirs = run(fit, 3, "hetero_ddp", shards=False, **options)
    assert distance(ours[0], theirs[0]) < 1e-10
    assert all(distance(ours[0], each) == 0 for each in ours)
