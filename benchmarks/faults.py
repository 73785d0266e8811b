"""What faults cost a fit that goes on without lost ranks: they are killed, frozen, or fail, at random moments.

Ranks are processes on this machine, each a replica where the strategy has any. Rank 0 is the first that is struck.

    python benchmarks/faults.py --seconds 30 --mean 8 --seeds 2 --strategies hetero_ddp hetero_node
"""

import argparse
import json
import os
import random
import signal
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
from jobs import machine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.strategies.registry import ENTRIES

GRACE, STEP, BATCH, PAUSE = 5.0, 0.05, 8, 15.0
#: A fault, and the signal by which a rank gets it.
FAULTS = {
    "killed": signal.SIGKILL,
    "frozen": signal.SIGSTOP,
    "paused": signal.SIGSTOP,
    "error": signal.SIGUSR1,
}


class Task(pl.LightningModule):
    """A regression; each step takes a given time."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.fails, self.samples, self.ends = False, 0, list[float]()

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.fails:
            raise ValueError("a fault of the schedule")
        time.sleep(STEP)
        self.samples += len(batch[0])
        self.ends.append(time.monotonic())
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def data(samples: int, seed: int) -> TensorDataset:
    """Samples of the task."""
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))


def worker(folder: str, name: str, seed: int, steps: int) -> None:
    """One rank: trains, and writes down what became of it."""
    warnings.simplefilter("ignore")
    rank, task = os.environ["RANK"], Task(seed)
    signal.signal(signal.SIGUSR1, lambda *_: setattr(task, "fails", True))
    [entry] = [entry for entry in ENTRIES if entry.name == name]
    strategy = entry.strategy(on_peer_loss="continue", grace=GRACE, timeout=120, **entry.options)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(accelerator="cpu", strategy=strategy, max_steps=steps, max_epochs=-1, **off)
    Path(folder, f"pid{rank}").touch()
    trainer.fit(task, DataLoader(data(20_000, seed), batch_size=BATCH, shuffle=True))
    pauses = [b - a for a, b in zip(task.ends, task.ends[1:], strict=False)]
    with torch.no_grad():
        loss = task.loss(data(2000, -1).tensors).item()
    lost = sorted({one for loss in strategy.survival.losses for one in loss.lost})
    result = {"loss": loss, "samples": task.samples, "stall": max(pauses), "lost": lost}
    Path(folder, f"result{rank}").write_text(json.dumps(result))


def job(name: str, seed: int, options: argparse.Namespace, faults: bool) -> dict[str, Any]:
    """One fit on all ranks, with faults or without."""
    dice, world = random.Random(seed), options.ranks
    steps = int(options.seconds / STEP)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        shared |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_WORLD_SIZE": str(world)}
        shared |= {"TORCHELASTIC_RUN_ID": "faults", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, __file__, "worker", folder, name, str(seed), str(steps)]
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        places = [{**shared, "RANK": str(rank), "GROUP_RANK": str(rank)} for rank in range(world)]
        ranks = [subprocess.Popen(command, env=place, **quiet) for place in places]
        try:
            return _watch(ranks, Path(folder), dice, options, faults)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def _watch(
    ranks: list[subprocess.Popen], folder: Path, dice: random.Random, options: argparse.Namespace, faults: bool
) -> dict[str, Any]:
    living, tried, thaws = set(range(len(ranks))), list[str](), list[tuple[float, int]]()
    until = time.monotonic() + 240
    while len(list(folder.glob("pid*"))) < len(ranks) and time.monotonic() < until:
        time.sleep(0.1)
    began = time.monotonic()
    until, due = began + 6 * options.seconds + 60, began + 3 + dice.expovariate(1 / options.mean)
    while any(ranks[rank].poll() is None for rank in living) and time.monotonic() < until:
        time.sleep(0.05)
        now = time.monotonic()
        for when, rank in thaws:
            if now > when:
                ranks[rank].send_signal(signal.SIGCONT)
        thaws = [thaw for thaw in thaws if thaw[0] >= now]
        if faults and now > due and len(living) > 2 and all(ranks[rank].poll() is None for rank in living):
            rank, fault = (0, "killed") if not tried else (dice.choice(sorted(living)), dice.choice(list(FAULTS)))
            ranks[rank].send_signal(FAULTS[fault])
            living.remove(rank)
            tried.append(fault)
            thaws += [(now + PAUSE, rank)] if fault == "paused" else []
            due = now + dice.expovariate(1 / options.mean) + 2 * GRACE
    hung = sum(ranks[rank].poll() is None for rank in living)
    files = [file for rank in sorted(living) if (file := folder / f"result{rank}").exists()]
    results = [json.loads(file.read_text()) for file in files]
    return {
        "tried": tried,
        "living": len(living),
        "hung": hung,
        "results": results,
        "seconds": time.monotonic() - began,
    }


def main() -> None:
    """Run each strategy without faults and with them, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--strategies", nargs="+", default=["hetero_ddp", "hetero_node", "hetero_gossip_async"])
    parser.add_argument("--seconds", type=float, default=60.0, help="that the fit takes without faults")
    parser.add_argument("--mean", type=float, default=20.0, help="seconds between two faults, beyond twice the grace")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    print(machine())
    for name in options.strategies:
        plain = [job(name, seed, options, False) for seed in range(options.seeds)]
        struck = [job(name, seed, options, True) for seed in range(options.seeds)]
        print(name)
        print(f"    without: {_line(plain)}; loss {_losses(plain)}")
        print(f"    with:    {_line(struck)}; loss {_losses(struck)}", flush=True)


def _line(jobs: list[dict[str, Any]]) -> str:
    tried, living = sum(len(one["tried"]) for one in jobs), sum(one["living"] for one in jobs)
    ended, hung = sum(len(one["results"]) for one in jobs), sum(one["hung"] for one in jobs)
    stall = max((result["stall"] for one in jobs for result in one["results"]), default=float("nan"))
    seconds = statistics.mean(one["seconds"] for one in jobs)
    return (
        f"faults {tried}; ranks not struck {living}: went on to the end {ended}, hung {hung}, "
        f"ended with an error {living - ended - hung}; longest stall {stall:.1f} s; {seconds:.0f} s"
    )


def _losses(jobs: list[dict[str, Any]]) -> str:
    losses = [one["results"][0]["loss"] for one in jobs if one["results"]]
    return " ".join(f"{loss:.4f}" for loss in losses)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
