"""Memory of each rank for a model in two replicas of two ranks, in bytes per parameter: in shards, and whole.

Tensors are counted in training, on the CPU: parameters, gradients, the optimizer's moments, and all others that are
alive and of more than a few bytes, which are the algorithm's. Gradients count as many bytes as parameters, although
they are free between steps. Layers gathered for a moment, activations and temporary messages come on top.

    python benchmarks/sharded_memory.py [--width 512]
    python benchmarks/sharded_memory.py --strategies hetero_ddp,hetero_diloco
"""

import argparse
import gc
import json
from collections.abc import Iterable
from typing import Any

import jobs
import lightning.pytorch as pl
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.strategies.table import ENTRIES

STRATEGIES = {entry.name: entry.strategy for entry in ENTRIES}
PERIODS = {"hetero_node": "every_n_steps", "hetero_gossip": "every_n_steps", "hetero_gossip_push_sum": "every_n_steps"}
PERIODS |= {"hetero_gossip_async": "every_n_steps", "hetero_daso": "global_every"}
EXTRA: dict[str, dict[str, Any]] = {"hetero_daso": {"warmup": 0, "cooldown": 0}}
LAYERS, SMALL = 8, 4096  # bytes


class Wide(pl.LightningModule):
    """Layers that are sharded one by one."""

    def __init__(self, width: int, shards: bool, momentum: bool, nesterov: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
        self.shards, self.momentum, self.nesterov = shards, momentum, nesterov

    def configure_model(self) -> None:
        if self.shards:
            for layer in self.net:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.momentum:
            return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9, nesterov=self.nesterov)
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def memory(tensors: Iterable[Any]) -> list[tuple[int, int]]:
    """The intervals of memory that tensors lie in."""
    storages = [one.untyped_storage() for one in map(local, tensors)]
    return [(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages if one.nbytes() > SMALL]


def size(intervals: Iterable[tuple[int, int]]) -> int:
    """Bytes of the union of intervals."""
    total = end = 0
    for start, stop in sorted(intervals):
        total += max(stop - max(start, end), 0)
        end = max(end, stop)
    return total


class Count(pl.Callback):
    """Bytes of this rank at the end of training."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step < trainer.max_steps - 2:
            return
        own = memory(p.data for p in module.parameters())
        states = [state.values() for state in trainer.optimizers[0].state.values()]
        moments = memory(value for state in states for value in state if isinstance(value, torch.Tensor))
        gradients = memory(p.grad for p in module.parameters() if p.grad is not None)
        gc.collect()
        alive = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]
        every = memory(one for one in alive if one.device.type == "cpu" and one.layout == torch.strided)
        known = [*own, *moments, *gradients]
        parts = {"parameters": size(own), "gradients": size(own), "moments": size(moments)}
        parts["others"] = size([*known, *every]) - size(known)
        self.found = {name: max(count, self.found.get(name, 0)) for name, count in parts.items()}


def fit(name: str, shards: bool, width: int) -> list[dict[str, int]]:
    """Memory of each rank."""
    options: dict[str, Any] = {"ranks_per_node": 2, "within": "gloo", **EXTRA.get(name, {})}
    if name != "hetero_ddp":
        options[PERIODS.get(name, "tau")] = 2
    if name not in ("hetero_ddp", "hetero_node", "hetero_daso"):
        options["replica"] = "node"
    count = Count()
    trainer = jobs.quiet_trainer(strategy=STRATEGIES[name](**options), max_steps=12, callbacks=[count])
    module = Wide(width, shards, name in ("hetero_eamsgd", "hetero_measgd_async"), name == "hetero_eamsgd")
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(48, width)), batch_size=1))
    everyone: list[Any] = [None] * 4
    torch.distributed.all_gather_object(everyone, count.found)
    return everyone


def worker(names: str, width: int) -> None:
    count = LAYERS * width**2
    for name in names.split(","):
        both = [fit(name, shards, width) for shards in (True, False)]
        ranks = [max(kind, key=lambda rank: sum(rank.values())) for kind in both]
        own, whole = ([part / count for part in (*rank.values(), sum(rank.values()))] for rank in ranks)
        if torch.distributed.get_rank() == 0:
            print(f"{name:26}" + "".join(f"{part:8.1f}" for part in (*own, *whole[3:])), flush=True)
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--strategies", default=",".join(name for name in STRATEGIES if name != "hetero_auto"))
    options = parser.parse_args()
    print(f"{LAYERS * options.width**2:,} parameters, 2 replicas of 2 ranks; bytes per parameter of the fullest rank")
    print("                          in shards: parameters, gradients, optimizer, others, all;   whole: others, all")
    jobs.launch(4, json.dumps(options.strategies), options.width)
    print(jobs.machine())


if __name__ == "__main__":
    jobs.start(main, worker)
