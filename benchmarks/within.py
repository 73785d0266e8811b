"""Averages in shared memory against sockets, on the ranks of one machine; ratios of alternating runs.

First gradients alone, as many bytes as a small CNN has. Then what replicas exchange: an average of parameters where
each rank is a replica, and what an exchange has brought told to the other ranks of a replica. Then whole fits:
Lightning's `ddp`, and `hetero_ddp` over sockets and in shared memory, with fixed even shares.

    python benchmarks/within.py [--repeats 7] [--ranks 2]
"""

import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import jobs
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BYTES, ROUNDS = 8_600_000, 20
WIDTH, STEPS, SKIP, BATCH = 832, 30, 6, 32


class Wide(pl.LightningModule):
    """2.1 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def seconds(action: Callable[[], Any]) -> float:
    """That something takes, median."""
    times = []
    for _ in range(ROUNDS):
        dist.barrier()
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def alone(repeats: int) -> dict[str, list[float]]:
    """Seconds that an average of gradients takes."""
    from lightning_hetero.comm.shared_memory import SharedMean, share_memory

    group: Any = dist.group.WORLD
    shared = SharedMean(*share_memory(group, BYTES, timedelta(seconds=120)))
    values = torch.randn(BYTES // 4)

    def sockets() -> None:
        dist.all_reduce(values.div_(dist.get_world_size()))

    results = jobs.alternate(
        repeats, {"gloo": lambda: seconds(sockets), "shm": lambda: seconds(lambda: shared.mean(values, True))}
    )
    shared.close()
    return results


def exchanges(repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of what replicas do: an average over them, and a message to the other ranks of a replica."""
    from lightning_hetero.comm.all_reduce import ReplicaLinks
    from lightning_hetero.comm.groups import Groups, SharedMemoryGroups, Within

    world, limit = dist.get_world_size(), timedelta(seconds=120)
    values, reference = torch.randn(BYTES // 4), torch.zeros(BYTES // 4)
    averages: dict[str, Callable[[], float]] = {}
    messages: dict[str, Callable[[], float]] = {}
    ways: tuple[Within, ...] = "gloo", "shm"
    for way in ways:
        groups = Groups.open(limit, SharedMemoryGroups(["here"] * world, limit, way))
        apart = ReplicaLinks(dist.get_rank(), [[rank] for rank in range(world)], groups)
        told = ReplicaLinks(dist.get_rank(), [list(range(world))], groups)
        averages[way] = lambda apart=apart: seconds(lambda: apart.average([values], [1.0] * world, [reference]))
        messages[way] = lambda told=told: seconds(lambda: told.broadcast(values))
    return {"average": jobs.alternate(repeats, averages), "message": jobs.alternate(repeats, messages)}


def fit(strategy: Any) -> float:
    """Median seconds per step."""
    torch.manual_seed(0)
    clock = jobs.Clock()
    trainer = jobs.quiet_trainer(strategy=strategy, max_steps=STEPS, callbacks=[clock])
    data = TensorDataset(torch.randn(BATCH * trainer.world_size * STEPS, WIDTH))
    trainer.fit(Wide(), DataLoader(data, batch_size=BATCH))
    return statistics.median(clock.steps(SKIP)[0])


def worker(repeats: int) -> dict[str, Any]:
    from lightning_hetero import HeteroDDPStrategy

    fit("ddp")  # makes the process group
    kinds = {
        "ddp": lambda: fit("ddp"),
        "gloo": lambda: fit(HeteroDDPStrategy(balance="off", within="gloo")),
        "shm": lambda: fit(HeteroDDPStrategy(balance="off", within="shm")),
    }
    return {"alone": alone(repeats), **exchanges(repeats), "fits": jobs.alternate(repeats, kinds)}


def main() -> None:
    """Print how many times as fast shared memory is."""
    options = jobs.options(__doc__, 7, ranks=2)
    results = jobs.launch(options.ranks, options.repeats)
    print(f"\n{options.ranks} ranks, {options.repeats} alternating runs; {jobs.machine()}")
    size = f"{BYTES / 1e6:.1f} MB"
    rows = [
        (f"gradients, {size}: gloo / shm", results["alone"], "gloo"),
        (f"average of replicas, {size}: gloo / shm", results["average"], "gloo"),
        (f"message to a replica, {size}: gloo / shm", results["message"], "gloo"),
    ]
    rows += [(f"step: {name} / hetero_ddp, shm", results["fits"], name) for name in ("ddp", "gloo")]
    for what, times, name in rows:
        ratios = sorted(a / b for a, b in zip(times[name], times["shm"], strict=True))
        print(f"{what}: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    jobs.start(main, worker)
