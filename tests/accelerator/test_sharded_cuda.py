"""On a CUDA device: models that shard themselves, where each replica is one rank, train as whole ones do."""

import os
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from ranks import run
from tasks import FAST, dataset
from test_sharded_models import STRATEGIES, SYNCHRONOUS, Saves, ShardedNet, distance, whole
from torch.utils.data import DataLoader

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA device")


class Places(pl.Callback):
    """The types of devices that hold parameters while they are trained."""

    seen: set[str]

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.seen = {p.device.type for p in module.parameters()}


def fit(
    name: str,
    shards: bool,
    path: str | None = None,
    resume: str | None = None,
    optimizer: str = "adamw",
    **options: Any,
) -> Any:
    """The weights at the end of a fit, and the types of the devices that held parameters."""
    warnings.filterwarnings("ignore", "Ranks .* share |The checkpoint|Replicas of the job|.*stream does not match")
    module = ShardedNet(optimizer)
    module.shards = shards
    places = Places()
    callbacks: list[Any] = [places, *([Saves(path, 7)] if path else [])]
    world = int(os.environ["WORLD_SIZE"])
    settings = {**FAST, "accelerator": "cuda", "devices": 1, "num_nodes": world, "max_epochs": 2}
    strategy = STRATEGIES[name](balance="off", **options)
    trainer = pl.Trainer(strategy=strategy, callbacks=callbacks, **settings)
    trainer.fit(module, DataLoader(dataset(101), batch_size=4), ckpt_path=resume)
    found = [value.cpu() for value in whole(module)], places.seen
    dist.barrier()
    return found


@pytest.mark.parametrize("name", ["hetero_ddp", "hetero_node", "hetero_daso", "hetero_diloco", "hetero_easgd_overlap"])
def test_sharded_models_train_as_whole_ones(name: str) -> None:
    ranks = 1 if name == "hetero_ddp" else 2
    options = {} if name == "hetero_ddp" else {**SYNCHRONOUS[name], "ranks_per_node": 1}
    ours, theirs = (run(fit, ranks, name, shards, nodes=[1] * ranks, **options) for shards in (True, False))
    for (one, place), (other, _) in zip(ours, theirs, strict=True):
        assert place == {"cuda"}
        assert distance(one, other) < 1e-9


@pytest.mark.parametrize("name", ["hetero_ddp", "hetero_diloco"])
def test_a_resumed_fit_ends_as_one_that_was_not_stopped(name: str, tmp_path: Any) -> None:
    path, ranks = str(tmp_path / "a.ckpt"), 1 if name == "hetero_ddp" else 2
    options = {} if name == "hetero_ddp" else {**SYNCHRONOUS[name], "ranks_per_node": 1}
    undisturbed = run(fit, ranks, name, True, path, nodes=[1] * ranks, **options)
    resumed = run(fit, ranks, name, True, None, path, nodes=[1] * ranks, **options)
    for (one, _), (other, _) in zip(undisturbed, resumed, strict=True):
        assert distance(one, other) == 0
