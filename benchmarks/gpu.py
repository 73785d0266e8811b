"""Every strategy on this machine's GPUs, alone and together with CPU ranks of the same host, in one table.

Each row is a job of its own: samples per second over all ranks, that speed over the sum of what its ranks reach alone,
and its time per step over that of Lightning's `ddp` on the same GPUs. A strategy that fails shows its error.

    python benchmarks/gpu.py [--gpus 2] [--cpus 1] [--steps 120] [--strategies hetero_ddp hetero_daso ...]
    python benchmarks/gpu.py --device cpu --gpus 1 --cpus 1 --steps 40 --width 256   # tries the script without a GPU
"""

import argparse
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.strategies.table import ENTRIES

LIMIT = 300  # seconds for a job


class Net(pl.LightningModule):
    """A perceptron, which keeps a GPU busy if it is wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Speed(pl.Callback):
    """Samples per second, and seconds per step, of this rank in the second half of a fit."""

    def __init__(self, steps: int) -> None:
        self.half, self.samples, self.ends = steps // 2, 0, list[float]()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 >= self.half:
            if batch_idx + 1 in (self.half, trainer.num_training_batches) and module.device.type == "cuda":
                torch.cuda.synchronize()
            self.ends.append(time.perf_counter())
            self.samples += len(batch[0]) if batch_idx + 1 > self.half else 0

    def figures(self) -> dict[str, float]:
        seconds = self.ends[-1] - self.ends[0]
        return {"samples": self.samples / seconds, "step": seconds / (len(self.ends) - 1)}


def worker(name: str, device: str, steps: int, batch: int, width: int, output: str) -> None:
    """One rank of one job."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(batch * world * 8, 784), torch.randint(10, (batch * world * 8,)))
    repeated = torch.utils.data.ConcatDataset([data] * -(-steps // 8))
    speed, off = Speed(steps), ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=name,
        max_epochs=1,
        limit_train_batches=steps,
        callbacks=[speed],
        **dict.fromkeys(off, False),
    )
    trainer.fit(Net(width), DataLoader(repeated, batch_size=batch))
    Path(output, f"{rank}.json").write_text(
        json.dumps({**speed.figures(), "device": str(trainer.strategy.root_device)})
    )


def job(name: str, gpus: int, cpus: int, options: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """Run a strategy on some ranks: their figures, or an error.

    CPU ranks form a node of their own, as if a second launcher had started them with no GPU to be seen.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        held.close()
        processes = []
        for rank in range(gpus + cpus):
            on_gpu = rank < gpus
            variables = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(gpus + cpus),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank if on_gpu else rank - gpus),
                "LOCAL_WORLD_SIZE": str(gpus if on_gpu else cpus),
                "GROUP_RANK": str(0 if on_gpu or not gpus else 1),
                "TORCHELASTIC_RUN_ID": "gpu",
                "OMP_NUM_THREADS": str(options.threads),
                **({} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""}),
            }
            device = options.device if on_gpu else "cpu"
            numbers = map(str, (options.steps, options.batch, options.width))
            command = [sys.executable, __file__, "worker", name, device, *numbers, folder]
            environment = {**os.environ, **variables}
            pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
            processes.append(subprocess.Popen(command, env=environment, **pipes))
        errors, until = [], time.monotonic() + LIMIT
        for process in processes:
            try:
                errors.append(process.communicate(timeout=max(until - time.monotonic(), 1))[1])
            except subprocess.TimeoutExpired:
                errors.append("did not end")
                process.kill()
                process.wait()
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
        if len(found) == len(processes):
            return found, ""
        return [], next((error.strip().split("\n")[-1] for error in errors if error.strip()), "no figures")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="default: all of this machine")
    parser.add_argument("--cpus", type=int, default=1, help="CPU ranks beside them")
    parser.add_argument("--threads", type=int, default=max((os.cpu_count() or 2) // 4, 1), help="of each rank")
    parser.add_argument("--steps", type=int, default=120, help="of each fit; the second half counts")
    parser.add_argument("--batch", type=int, default=256, help="samples per rank and step, on average")
    parser.add_argument("--width", type=int, default=2048, help="of the model")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--strategies", nargs="+", default=[entry.name for entry in ENTRIES])
    options = parser.parse_args()
    gpus = torch.cuda.device_count() if options.gpus is None else options.gpus
    if options.device == "cuda" and not (torch.cuda.is_available() and gpus):
        parser.error("there is no GPU here. `--device cpu` tries the script on CPUs.")
    console = Console(highlight=False, width=150)
    card = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    console.print(f"{gpus} x {card}, {options.cpus} CPU ranks of {options.threads} threads; torch {torch.__version__}")
    console.print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f}; model of width {options.width}")
    solo_gpu, solo_cpu = alone(1, 0, options), alone(0, 1, options)
    console.print(f"alone: a GPU {solo_gpu:.0f} samples/s, a CPU rank {solo_cpu:.0f}")
    table = Table("strategy", "ranks", "samples/s", "over the sum of solo speeds", "time per step over ddp's")
    plain = None
    for name in ("ddp", *options.strategies):
        for cpus in dict.fromkeys((0, options.cpus)):
            if name == "ddp" and cpus:
                continue
            found, error = job(name, gpus, cpus, options)
            ranks = f"{gpus} GPU" + (f" + {cpus} CPU" if cpus else "")
            if error:
                table.add_row(name, ranks, "", "", error[:60])
                continue
            speed, step = sum(rank["samples"] for rank in found), statistics.median(rank["step"] for rank in found)
            plain = step if name == "ddp" else plain
            over = "" if plain is None or cpus else f"{step / plain:.2f}"
            table.add_row(name, ranks, f"{speed:.0f}", f"{speed / (gpus * solo_gpu + cpus * solo_cpu):.0%}", over)
    console.print(table)
    console.print(f"load average at the end {os.getloadavg()[0]:.2f}")


def alone(gpus: int, cpus: int, options: argparse.Namespace) -> float:
    """Samples per second of a rank by itself."""
    found, error = job("ddp", gpus, cpus, options)
    if error:
        raise SystemExit(f"ddp on one rank: {error}")
    return found[0]["samples"]


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], sys.argv[3], *map(int, sys.argv[4:7]), sys.argv[7])
    else:
        main()
