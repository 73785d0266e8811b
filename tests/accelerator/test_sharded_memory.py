"""Memory of a sharded model on a rank's device: its shards, and few whole layers for a moment."""

import os
import warnings
from typing import Any

import fake_device
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from ranks import run
from tasks import FAST
from test_device_memory import Memory, OnHost
from test_sharded_models import STRATEGIES
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.comm.topology import Topology
from lightning_hetero.replicas import vectors

STEPS, WIDTH, LAYERS = 10, 256, 16
OPTIONS: dict[str, dict[str, Any]] = {
    "hetero_node": {"every_n_steps": 2},
    "hetero_diloco": {"replica": "node", "tau": 2},
}


class Layer(nn.Linear):
    """Begins with values that need no random numbers: the device has no generator for shards."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1 / WIDTH)


class Deep(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.net = nn.Sequential(*(Layer(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        for layer in self.net:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, foreach=False)


def by_way_of_the_host(collective: Any) -> Any:
    """Version of a collective of two tensors that goes over the host: gloo does not know tensors of the fake device."""

    def staged(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> None:
        there = output.cpu()
        collective(there, input.cpu(), *args, **{**kwargs, "async_op": False})
        output.copy_(there)

    return staged


def connect(patch: pytest.MonkeyPatch) -> None:
    """Let the fake devices of a replica exchange shards, as GPUs do over NCCL."""
    backend = Topology.backend
    patch.setattr(Topology, "backend", lambda self, ranks: backend(self, ranks) or "gloo")
    patch.setattr(torch.fake, "Stream", lambda device="fake", priority=0: torch.Stream(device))  # type: ignore[attr-defined]
    for new, old in (
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    ):
        name = new if hasattr(dist, new) else old
        patch.setattr(dist, name, by_way_of_the_host(getattr(dist, name)))


def measured(name: str, options: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes on the device between steps, further bytes at the peak, and bytes of tensors on the host."""
    warnings.filterwarnings("ignore", "Ranks .* share |Replicas of the job")
    kind, patch = fake_device.load_if_given(), pytest.MonkeyPatch()
    connect(patch)
    patch.setattr(vectors, "SMALLEST", 1 << 10)
    memory, host, world = Memory(getattr(torch, kind)), OnHost(), int(os.environ["WORLD_SIZE"])
    settings = {**FAST, "accelerator": kind, "devices": 1, "num_nodes": world, "max_steps": STEPS}
    strategy = STRATEGIES[name](balance="off", **options)
    trainer = pl.Trainer(strategy=strategy, callbacks=[memory, host], limit_val_batches=0, **settings)
    trainer.fit(Deep(), DataLoader(TensorDataset(torch.randn(6 * world * STEPS, WIDTH)), batch_size=6))
    patch.undo()
    return memory.held[-1], max(memory.most[2:]) - memory.held[-1], host.bytes


def of_plain_pytorch() -> int:
    """Peak of bytes on the device, less those between steps, of ``fully_shard`` in a loop of plain PyTorch."""
    kind, patch = fake_device.load_if_given(), pytest.MonkeyPatch()
    connect(patch)
    dist.init_process_group("gloo")
    memory, model = getattr(torch, kind), Deep()
    model._device_mesh = {"data_parallel": DeviceMesh.from_group(dist.group.WORLD, kind)}  # type: ignore[assignment]
    model.configure_model()
    model.to_empty(device=kind)
    for layer in model.net:
        layer.reset_parameters()
    optimizer, beyond = model.configure_optimizers(), 0
    for step in range(STEPS):
        held = memory.memory_allocated()
        memory.reset_peak_memory_stats()
        loss = model.training_step([torch.randn(6, WIDTH).to(kind)], step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        beyond = memory.max_memory_allocated() - held
    patch.undo()
    return beyond


@pytest.fixture(scope="module")
def plain(fake: str) -> int:
    """The peak of ``fully_shard`` alone, over two ranks."""
    return max(run(of_plain_pytorch, 2, env={"FAKE_LIBRARY": fake, "FAKE_GLOO": "stage"}))


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("name", "sizes", "on_host"),
    [
        ("hetero_node", [2, 1], 12),  # the reference, this replica's values, the mean
        ("hetero_ddp", [2], 0),
        ("hetero_diloco", [2, 2], 16),
    ],
)
def test_a_rank_holds_no_more_than_fully_shard_alone(
    fake: str, plain: int, name: str, sizes: list[int], on_host: int
) -> None:
    options = {} if name == "hetero_ddp" else {**OPTIONS[name], "ranks_per_node": sizes}
    env = {"FAKE_LIBRARY": fake, "FAKE_GLOO": "stage"}
    found = run(measured, sum(sizes), name, options, nodes=[1] * sum(sizes), env=env)
    layer, data = 4 * WIDTH**2, 4 * WIDTH * 6 * sum(sizes) * STEPS
    shards = [LAYERS * layer // size for size in sizes for _ in range(size)]
    for shard, (held, beyond, host) in zip(shards, found, strict=True):
        assert held <= 4 * shard + layer / 8  # the parameters, their gradients, two moments; a batch
        assert beyond <= plain + layer / 8  # of layers that are gathered, and gradients that are not averaged yet
        assert host <= on_host / 4 * shard + data + 1.5 * layer
