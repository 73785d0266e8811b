"""Cost of a join for those that train: one of three ranks is killed, started again, and comes back.

Prints how long the others stand still, next to the time in which one copy of the model goes from rank 0 to the others,
and how much memory a join takes at its peak beyond what training takes, in copies of the model.

    python benchmarks/join.py [--repeats 1] [--megabytes 100]
    python benchmarks/join.py --megabytes 20      # some minutes
"""

import json
import os
import signal
import socket
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
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import DiLoCoStrategy, HeteroDDPStrategy

RANKS, WIDTH, BATCH = 3, 1024, 12
STRATEGIES: dict[str, Any] = {
    "hetero_ddp": HeteroDDPStrategy,
    "hetero_diloco": lambda **options: DiLoCoStrategy(replica="rank", tau=4, **options),
}
OPTIMIZERS = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}


class Large(pl.LightningModule):
    """A model of many layers, and few samples to train it on."""

    def __init__(self, megabytes: int, optimizer: str) -> None:
        super().__init__()
        layers = max(round(megabytes * 1e6 / 4 / WIDTH**2), 2)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0]
        for layer in self.layers:
            x = x + 0.1 * layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters(), lr=1e-4)


def memory(name: str) -> float:
    """Bytes of this process: ``VmRSS``, now, or ``VmHWM``, at the peak."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return float(line.split()[1]) * 1024


class Watch(pl.Callback):
    """Records when batches end, and the peak memory of the process: in training, and while it or another joins."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.late = folder, (folder / "dead").exists()
        self.ends = list[tuple[float, int]]()
        self.training = self.peak = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        joins = self.ends[-1][1] < trainer.world_size if self.ends else self.late
        self.ends.append((time.perf_counter(), trainer.world_size))
        if len(self.ends) == 8 and not self.late:
            self.folder.joinpath(f"warm {trainer.global_rank}").touch()
        if joins:
            self.peak = memory("VmHWM")
        self.training = max(self.training, memory("VmRSS"))
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
        trainer.should_stop = (len(self.ends) if self.late else self._since_join()) >= 8

    def _since_join(self) -> int:
        fewer = [i for i, (_, world) in enumerate(self.ends) if world < RANKS]
        return len(self.ends) - 1 - fewer[-1] if fewer else 0

    def pause(self) -> float:
        """The time from the last batch before the join to the first one after it, less that of a batch."""
        gaps = [(b[0] - a[0], a[1] < b[1]) for a, b in zip(self.ends, self.ends[1:], strict=False)]
        joins = [gap for gap, grows in gaps if grows]
        return joins[0] - sorted(gap for gap, _ in gaps)[len(gaps) // 2] if joins else 0.0


def rank(strategy: str, optimizer: str, megabytes: int, folder: Path) -> None:
    """One process of the job."""
    chosen = STRATEGIES[strategy](on_peer_loss="continue", join_file=str(folder / "job"), timeout=120, balance="off")
    module = Large(megabytes, optimizer)
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    watch = Watch(folder)
    trainer = jobs.quiet_trainer(strategy=chosen, max_epochs=-1, callbacks=[watch], devices=1, num_nodes=RANKS)
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(1 << 14, WIDTH)), batch_size=BATCH // RANKS))
    if not dist.is_initialized():
        return
    copies = []
    for _ in range(3):
        dist.barrier()
        began, flat = time.perf_counter(), torch.zeros(int(size), dtype=torch.uint8)
        dist.broadcast(flat, 0)
        dist.barrier()
        copies.append(time.perf_counter() - began)
    found = {"peak": (watch.peak - watch.training) / size, "pause": watch.pause(), "copy": min(copies)}
    (folder / f"result {trainer.global_rank}").write_text(json.dumps(found))


def join(strategy: str, optimizer: str, megabytes: int) -> list[dict[str, float]]:
    """Start a job, kill its last rank and start it again; returns the figures of each rank, the joined one last."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as started:
        folder, processes = Path(name), list[subprocess.Popen]()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])

        def start(number: int) -> None:
            place: dict[str, Any] = {
                "RANK": number,
                "NODE_RANK": number,
                "WORLD_SIZE": RANKS,
                "LOCAL_RANK": 0,
                "LOCAL_WORLD_SIZE": 1,
            }
            place |= {"GROUP_RANK": number, "TORCHELASTIC_RUN_ID": "join", "MASTER_ADDR": "127.0.0.1"}
            place |= {"MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            env = {**os.environ, **{name: str(value) for name, value in place.items()}}
            command = [sys.executable, __file__, "rank", strategy, optimizer, str(megabytes), name]
            processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL))
            started.callback(processes[-1].kill)

        for number in range(RANKS):
            start(number)
        jobs.wait(lambda: all((folder / f"warm {number}").exists() for number in range(RANKS)))
        processes[-1].send_signal(signal.SIGKILL)
        processes[-1].wait()
        (folder / "dead").touch()
        start(RANKS - 1)
        living = [process for number, process in enumerate(processes) if number != RANKS - 1]
        jobs.wait(lambda: all(process.poll() is not None for process in living))
        if failed := [process.returncode for process in living if process.returncode]:
            raise SystemExit(f"{strategy}: ranks have failed with {failed}; their errors are above")
        return [json.loads((folder / f"result {number}").read_text()) for number in range(RANKS)]


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
        return
    asked = jobs.options(__doc__ or "", repeats=1, megabytes=100)
    print(f"{jobs.machine()}\nA model of {asked.megabytes} MB; memory in copies of it, beyond that of training.")
    print(f"{'':22}{'stand still, s':>16}{'one copy, s':>14}{'peak, survivors':>18}{'peak, newcomer':>18}")
    for strategy in STRATEGIES:
        for optimizer in OPTIMIZERS:
            found = [join(strategy, optimizer, asked.megabytes) for _ in range(asked.repeats)]
            pauses = [max(one["pause"] for one in ranks[:-1]) for ranks in found]
            copies = [max(one["copy"] for one in ranks) for ranks in found]
            old = [max(one["peak"] for one in ranks[:-1]) for ranks in found]
            new = [ranks[-1]["peak"] for ranks in found]
            figures = zip((pauses, copies, old, new), (16, 14, 18, 18), strict=True)
            line = "".join(f"{statistics.median(values):>{width}.2f}" for values, width in figures)
            print(f"{strategy + ', ' + optimizer:22}{line}", flush=True)


if __name__ == "__main__":
    main()
