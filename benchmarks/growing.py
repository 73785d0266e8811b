"""A job that grows from 2 to 4 ranks while it trains: samples per second before and after.

Every rank is the same command, started by itself; those that come later join through a file. Devices are emulated by
a delay that uses no core.

    python benchmarks/growing.py [--repeats 3] [--seconds 6]
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jobs
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import GossipAsyncStrategy, HeteroDDPStrategy, NodeAverageStrategy

FIXED, SPEED, GLOBAL_BATCH = 0.005, 400.0, 64  # seconds; samples per second of a device; samples
STRATEGIES: dict[str, Any] = {
    "hetero_ddp": HeteroDDPStrategy,
    "hetero_node": lambda **options: NodeAverageStrategy(replica="rank", every_n_steps=4, **options),
    "hetero_gossip_async": lambda **options: GossipAsyncStrategy(replica="rank", **options),
}


class Emulated(pl.LightningModule):
    """A step takes as long as its samples need on the emulated device."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(16, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(FIXED + len(batch[0]) / SPEED)
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Rate(pl.Callback):
    """Notes when this rank has trained on how many samples, and in how large a world."""

    def __init__(self, seconds: float, folder: Path) -> None:
        self.seconds, self.folder, self.seen = seconds, folder, list[tuple[float, int, int]]()
        self.since: tuple[int, float] = 0, 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now, world = time.time(), trainer.world_size
        self.seen.append((now, len(batch[0]), world))
        if self.since[0] != world:
            self.since = world, now
        told = self.folder / f"{world} have trained"
        if trainer.is_global_zero and now > self.since[1] + self.seconds and not told.exists():
            told.write_text(str(trainer.global_step + 50))  # all stop at the same step
        trainer.should_stop = world == 4 and told.exists() and trainer.global_step >= int(told.read_text() or 1 << 30)


def rank(strategy: str, seconds: float, folder: Path, number: int) -> None:
    """One process of the job."""
    chosen = STRATEGIES[strategy](
        on_peer_loss="continue", join_file=str(folder / "job"), timeout=60, global_batch_size=GLOBAL_BATCH
    )
    rate = Rate(seconds, folder)
    trainer = jobs.quiet_trainer(strategy=chosen, max_epochs=-1, callbacks=[rate])
    trainer.fit(Emulated(), DataLoader(TensorDataset(torch.randn(1 << 14, 16)), batch_size=GLOBAL_BATCH, shuffle=True))
    (folder / f"rank {number}.json").write_text(json.dumps(rate.seen))


def gain(strategy: str, seconds: float) -> tuple[float, float]:
    """How many times as fast four ranks are as two, and the longest time without a batch where they joined, seconds."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as started:
        folder, processes = Path(name), list[subprocess.Popen]()

        def start(number: int, after: str | None) -> None:
            jobs.wait(lambda: after is None or (folder / after).exists())
            command = [sys.executable, __file__, "rank", strategy, str(seconds), name, str(number)]
            process = subprocess.Popen(
                command, env={**os.environ, "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "1"}, stdout=subprocess.DEVNULL
            )
            processes.append(process)
            started.callback(process.kill)

        for number, after in enumerate((None, "job", "2 have trained", None)):
            start(number, after)
        jobs.wait(lambda: all(process.poll() is not None for process in processes))
        if failed := [number for number, process in enumerate(processes) if process.returncode]:
            raise SystemExit(f"rank(s) {failed} have failed; their errors are above")
        seen = [json.loads((folder / f"rank {number}.json").read_text()) for number in range(4)]
    rates = {world: sum(_rate([(at, n) for at, n, size in one if size == world]) for one in seen) for world in (2, 4)}
    pauses = [b[0] - a[0] for a, b in zip(seen[0], seen[0][1:], strict=False) if a[2] != b[2]]
    return rates[4] / rates[2], max(pauses)


def _rate(seen: list[tuple[float, int]]) -> float:
    """Samples per second, without the first second."""
    counted = [(at, n) for at, n in seen if at > seen[0][0] + 1]
    return sum(n for _, n in counted[1:]) / (counted[-1][0] - counted[0][0]) if len(counted) > 2 else 0.0


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2], float(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
        return
    asked = jobs.options(__doc__ or "", repeats=3, seconds=6)
    print(
        f"{jobs.machine()}\nFour emulated devices are twice as fast as two, at best (fixed cost: {FIXED * 1e3:.0f} ms)."
    )
    print(f"{'strategy':22}{'4 ranks / 2 ranks':>20}{'pause to join, s':>20}")
    for strategy in STRATEGIES:
        found = [gain(strategy, asked.seconds) for _ in range(asked.repeats)]
        ratios, pauses = zip(*found, strict=True)
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{strategy:22}{ratio:>20}{f'{statistics.median(pauses):.2f} (to {max(pauses):.2f})':>20}", flush=True)


if __name__ == "__main__":
    main()
