"""What `HeteroMonitor` costs a step: at most 1% of it is the goal.

Two measures: the time spent inside the monitor's own code over the time of the steps, which is sharp; and the ratio of
the time per step with the monitor to that without, of alternating runs, which also sees what comes of it indirectly.
The report at the end of a fit belongs to no step; how long it takes is said apart.

    python benchmarks/monitor.py [--repeats 7] [--ranks 2]
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
from overhead import MODELS, Module
from torch.utils.data import DataLoader, TensorDataset

STEPS, SKIP = 160, 16
#: Seconds inside the monitor's code: in the hooks of a step, and in those around the fit.
inside = {"steps": 0.0, "report": 0.0}


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


def fit(model: str, monitored: bool, folder: str) -> tuple[float, float, float]:
    """Seconds per step (median), seconds of a step inside the monitor (mean), and seconds of the report."""
    from lightning_hetero import HeteroMonitor

    torch.distributed.is_initialized() and torch.distributed.barrier()
    inside.update(steps=0.0, report=0.0)
    clock, module = jobs.Clock(), Module(model)
    data = TensorDataset(torch.randn(32 * 2 * STEPS, *module.shape))
    off = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(
        strategy="hetero_ddp",
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_steps=STEPS,
        logger=CSVLogger(folder, flush_logs_every_n_steps=10**6),
        callbacks=[clock, *([HeteroMonitor()] if monitored else [])],
        **off,
    )
    trainer.fit(module, DataLoader(data, batch_size=32))
    wall, _ = clock.steps(SKIP)
    return statistics.median(wall), inside["steps"] / STEPS, inside["report"]


def worker(repeats: int) -> dict[str, Any]:
    from lightning_hetero import HeteroMonitor
    from lightning_hetero.callbacks.monitor_data import StepHistory

    for owner, name, part in (
        (HeteroMonitor, "on_train_batch_end", "steps"),
        (StepHistory, "add", "steps"),
        (HeteroMonitor, "on_train_end", "report"),
    ):
        timed(owner, name, part)
    with tempfile.TemporaryDirectory() as folder:
        return {
            model: jobs.alternate(
                repeats,
                {name: lambda on=name == "on", m=model: fit(m, on, folder) for name in ("off", "on")},
            )
            for model in MODELS
        }


def main() -> None:
    options = jobs.options(__doc__, 7, ranks=2)
    results = jobs.launch(options.ranks, options.repeats)
    print(f"\n{options.repeats} alternating runs on {options.ranks} ranks; {jobs.machine()}")
    print("hetero_ddp with HeteroMonitor and a CSVLogger, on rank 0; median and range of the runs:")
    for model, runs in results.items():
        step = statistics.median(step for step, *_ in runs["on"])
        print(f"  {model}: {1e3 * step:.2f} ms per step")
        print(f"    inside the monitor, us per step    {jobs.spread([1e6 * own for _, own, _ in runs['on']])}")
        print(f"    as a part of a step's time         {jobs.spread([own / step for step, own, _ in runs['on']])}")
        ratios = [on[0] / off[0] for on, off in zip(runs["on"], runs["off"], strict=True)]
        print(f"    with : without, time per step      {jobs.spread(ratios)}")
        print(f"    the report at the end, s           {jobs.spread([report for *_, report in runs['on']])}")


if __name__ == "__main__":
    jobs.start(main, worker)
