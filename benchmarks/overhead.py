"""Cost of `hetero_ddp` and `HeteroMonitor` where there is nothing to gain: ranks alike, against Lightning's `ddp`.

Wall seconds per step, and CPU seconds per step of all threads of all ranks, as ratios of alternating runs. For the
monitor also the time inside its own code as a part of a step, which is sharper; its report at the end belongs to none.
In the model with most parameters averaging counts: ranks of one machine do it in shared memory.

    python benchmarks/overhead.py [--repeats 7] [--ranks 2]
    python benchmarks/overhead.py --repeats 1                  # a minute
    python benchmarks/overhead.py --gpu 1 --ranks 1            # on GPUs, one for each rank
    python benchmarks/overhead.py --apart 1    # steps in which replicas of one rank do not exchange, against one device
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jobs
import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy, StrategyRegistry
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, SKIP = 80, 16
CONTENDERS = {"ddp": ("ddp", False), "hetero_ddp": ("hetero_ddp", False), "monitored": ("hetero_ddp", True)}
ALONE = "alone"  # Lightning's own strategy for one device, on each rank
#: Strings whose replicas do not exchange in these steps, with the options by which they do not.
APART: dict[str, dict[str, Any]] = {
    "hetero_node": {"every_n_steps": 10**6, "ranks_per_node": 1},
    "hetero_daso": {"global_every": 10**6, "patience": 10**6, "warmup": 0, "cooldown": 0, "ranks_per_node": 1},
    "hetero_easgd": {"tau": 10**6, "moving_rate": "auto"},
    "hetero_easgd_async": {"tau": 10**6, "moving_rate": "auto"},
    "hetero_diloco": {"tau": 10**6},
    "hetero_diloco_async": {"tau": 10**6},
    "hetero_noloco": {"tau": 10**6},
    "hetero_gossip_async": {"every_n_steps": 10**6},
}
#: Seconds inside the monitor's code: in the hooks of a step, and in those around the fit.
inside = {"steps": 0.0, "report": 0.0}


def linear() -> nn.Module:
    return nn.Linear(16, 1)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 64, 96),
        nn.ReLU(),
        nn.Linear(96, 1),
    )


def wide() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(832, 832), nn.ReLU())))


#: What makes each model, and the shape of its samples.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "a 16x1 linear layer": (linear, (16,)),
    "a CNN of 0.4 M parameters": (cnn, (1, 16, 16)),
    "linear layers of 2.1 M parameters": (wide, (832,)),
}


class Module(pl.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def without_exchanges(name: str) -> Strategy:
    """The strategy of a string whose replicas do not exchange, or that of one device."""
    if name == ALONE:
        return SingleDeviceStrategy(torch.device("cpu"))
    return StrategyRegistry[name]["strategy"](balance="off", **APART[name])


def timed(owner: type, name: str, part: str) -> None:
    """Let a method add the seconds that it takes to ``inside``."""
    method: Callable[..., Any] = getattr(owner, name)

    def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            inside[part] += time.perf_counter() - began

    setattr(owner, name, measured)


def fit(contender: str, model: str, folder: str, gpu: bool) -> dict[str, float]:
    """Train; wall and CPU seconds of a step, and the seconds inside the monitor in a step and at the end."""
    from lightning_hetero import HeteroMonitor

    torch.distributed.is_initialized() and torch.distributed.barrier()
    inside.update(steps=0.0, report=0.0)
    strategy, monitored = CONTENDERS.get(contender) or (without_exchanges(contender), False)
    net, shape = MODELS[model]
    clock, module = jobs.Clock(), Module(net())
    trainer = jobs.quiet_trainer(
        strategy=strategy,
        accelerator="gpu" if gpu else "cpu",
        **({"devices": 1} if contender == ALONE else {}),
        max_steps=STEPS,
        logger=CSVLogger(folder, flush_logs_every_n_steps=10**6) if monitored else False,
        callbacks=[clock, *([HeteroMonitor()] if monitored else [])],
    )
    samples = torch.randn(32 * trainer.world_size * STEPS, *shape)
    trainer.fit(module, DataLoader(TensorDataset(samples), batch_size=32))
    wall, cpu = clock.steps(SKIP)
    total = torch.tensor(cpu, device=trainer.strategy.root_device)
    torch.distributed.all_reduce(total)
    step = statistics.median(wall)
    return {"wall": step, "cpu": total.item(), "inside": inside["steps"] / STEPS, "report": inside["report"]}


def worker(repeats: int, gpu: int, apart: int) -> dict[str, Any]:
    from lightning_hetero import HeteroMonitor
    from lightning_hetero.callbacks.monitor_data import StepHistory

    if apart and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    timed(HeteroMonitor, "on_train_batch_end", "steps")
    timed(StepHistory, "add", "steps")
    timed(HeteroMonitor, "on_train_end", "report")
    names = [ALONE, *APART]
    with tempfile.TemporaryDirectory() as folder:
        return {
            model: jobs.alternate(
                repeats,
                {
                    name: lambda c=name, m=model: fit(c, m, folder, bool(gpu))
                    for name in (names if apart else CONTENDERS)
                },
            )
            for model in MODELS
        }


def main() -> None:
    options = jobs.options(__doc__, 7, ranks=2, gpu=0, apart=0)
    results = jobs.launch(options.ranks, options.repeats, options.gpu, options.apart)
    where = torch.cuda.get_device_name() if options.gpu else "CPU"
    print(f"\n{options.repeats} alternating runs on {options.ranks} ranks, {where}; {jobs.machine()}")
    print("median and range of the runs' ratios:")
    for model, runs in results.items():
        if options.apart:
            print(f"  {model}: {1e3 * statistics.median(run['wall'] for run in runs[ALONE]):.2f} ms per step {ALONE}")
            for name in APART:
                print(f"    {name:20} wall {ratio(runs, 'wall', name, ALONE)}, cpu {ratio(runs, 'cpu', name, ALONE)}")
            continue
        print(f"  {model}: {1e3 * statistics.median(run['wall'] for run in runs['ddp']):.2f} ms per step under ddp")
        for what in ("wall", "cpu"):
            print(f"    {what} time per step, hetero_ddp : ddp            {ratio(runs, what, 'hetero_ddp', 'ddp')}")
        print(f"    wall time per step, with : without the monitor  {ratio(runs, 'wall', 'monitored', 'hetero_ddp')}")
        parts, reports = zip(*((run["inside"] / run["wall"], run["report"]) for run in runs["monitored"]), strict=True)
        print(f"    inside the monitor, as a part of a step         {jobs.spread(parts)}")
        print(f"    its report at the end, s                        {jobs.spread(reports)}")
    print(f"load average at the end {os.getloadavg()[0]:.2f}")


def ratio(runs: dict[str, list[dict[str, float]]], what: str, own: str, base: str) -> str:
    """Ratio of the times of two contenders, run by run."""
    return jobs.spread([a[what] / b[what] for a, b in zip(runs[own], runs[base], strict=True)])


if __name__ == "__main__":
    jobs.start(main, worker)
