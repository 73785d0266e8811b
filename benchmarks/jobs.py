"""Runs a benchmark on several ranks of this machine, and takes its figures from alternating fits in the same processes.

Ratios of alternating runs hold where absolute times do not: on shared machines, where speed changes by the minute.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch


def start(main: Callable[[], None], worker: Callable[..., Any]) -> None:
    """Script of a benchmark: ``main`` launches ranks, on each of which ``worker`` finds figures."""
    if sys.argv[1:2] != ["worker"]:
        main()
        return
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    output, *numbers = sys.argv[2:]
    figures = worker(*map(json.loads, numbers))
    if os.environ["RANK"] == "0":
        Path(output).write_text(json.dumps(figures))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def options(doc: str, repeats: int, **others: int | str) -> argparse.Namespace:
    """Options from the command line: the number of repeats, and others, by their defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"repeats": repeats, **others}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def launch(ranks: int, *numbers: float | str, timeout: float = 1800) -> Any:
    """Run the calling script's worker with some numbers on every rank; returns what that of rank 0 has found."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [str(Path(sys.argv[0]).resolve()), "worker", str(output), *map(str, numbers)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=timeout)
        return json.loads(output.read_text())


def wait(holds: Callable[[], Any], limit: float = 600.0) -> None:
    """Wait until something holds, or end the benchmark after ``limit`` seconds."""
    until = time.monotonic() + limit
    while not holds():
        if time.monotonic() > until:
            raise SystemExit(f"nothing has happened for {limit:.0f} s")
        time.sleep(0.05)


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


def spread(values: Sequence[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def quiet_trainer(**options: Any) -> pl.Trainer:
    """A Trainer that only trains."""
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    return pl.Trainer(**{"accelerator": "cpu", "devices": ranks, **off, **options})


def machine() -> str:
    """Machine that the figures were measured on."""
    import lightning

    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} cores, load average {load:.2f}, torch {torch.__version__}, lightning {lightning.__version__}"
    )
