"""Runs a benchmark on several ranks of this machine, and takes its figures from alternating fits in the same processes.

Ratios of alternating runs hold where absolute times do not: on shared machines, whose speed changes by the minute.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl


def launch(ranks: int, *args: str) -> dict[str, Any]:
    """Run the calling script on every rank, as ``script worker OUTPUT args``; returns what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [str(Path(sys.argv[0]).resolve()), "worker", str(output), *args]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=1800)
        return json.loads(output.read_text())


class Clock(pl.Callback):
    """Wall and CPU seconds of each training batch of this rank, from one batch's start to the next's."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def steps(self, skip: int) -> tuple[list[float], float]:
        """Wall seconds of each batch after the first ``skip``, and the mean CPU seconds of them."""
        wall = [b - a for a, b in zip(self.wall[skip:], self.wall[skip + 1 :], strict=False)]
        return wall, (self.cpu[-1] - self.cpu[skip]) / max(len(wall), 1)


def alternate(repeats: int, fits: dict[str, Callable[[], Any]]) -> dict[str, list[Any]]:
    """Run the fits in turn, ``repeats`` times."""
    results: dict[str, list[Any]] = {name: [] for name in fits}
    for _ in range(repeats):
        for name, fit in fits.items():
            results[name].append(fit())
    return results


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def quiet_trainer(**options: Any) -> pl.Trainer:
    """A Trainer that only trains."""
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), **off, **options)


def machine() -> str:
    """What the figures were measured on."""
    import lightning
    import torch

    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} cores, load average {load:.2f}, torch {torch.__version__}, lightning {lightning.__version__}"
    )
