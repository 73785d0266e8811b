"""Cost of each strategy on a GPU: step time, waits of the host, memory on the device.

A transformer of 100 M parameters, AdamW, 8192 tokens per rank and step. Ranks share the GPU, each as a node of its own,
so that one GPU is enough: what is compared are runs of as many ranks on the same GPU. Strategies exchange every 4
steps.

* *step*: seconds per step as a ratio to runs in which nothing is exchanged, before and after all others.
* *waits*: synchronising CUDA operations of the training thread, per step without an exchange and per exchange, as
  ``torch.cuda.set_sync_debug_mode`` sees them; the places in this package that make most of them are listed below.
* *memory*: bytes per parameter on the device, beyond parameters, gradients and optimizer state (16): what stays after
  a step, and at the peak beyond the peak of ``hetero_ddp``'s run.

    python benchmarks/gpu.py [--repeats 3] [--ranks 2]
    python benchmarks/gpu.py --ranks 1 --repeats 3     # also Lightning's own strategies
    python benchmarks/gpu.py --only hetero_ddp,hetero_daso     # some of them
"""

import json
import os
import statistics
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import jobs
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_hetero
from lightning_hetero.strategies.table import ENTRIES

GPU = torch.cuda.is_available()
WIDTH, LAYERS, TOKENS, BATCH = (1024, 8, 512, 16) if GPU else (32, 2, 16, 2)
WARMUP, STEPS, EVERY, NEVER = 4, 20, 4, 10**6
PULL = {"moving_rate": "auto", "tau": EVERY}
OPTIONS: dict[str, dict[str, Any]] = {
    "hetero_ddp": {},
    "hetero_node": {"every_n_steps": EVERY},
    "hetero_daso": {"warmup": 0, "cooldown": 0, "global_every": EVERY},
    "hetero_gossip": {"every_n_steps": EVERY},
    "hetero_gossip_push_sum": {"every_n_steps": EVERY},
    "hetero_gossip_async": {"every_n_steps": EVERY},
    "hetero_diloco": {"tau": EVERY},
    "hetero_diloco_async": {"tau": EVERY},
    "hetero_noloco": {"tau": EVERY},
    "hetero_auto": {},
}
PACKAGE = str(Path(lightning_hetero.__file__).parent)


class Transformer(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, WIDTH // 32, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.net = nn.Sequential(nn.Embedding(256, WIDTH), blocks)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


class Momentum(Transformer):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-5, momentum=0.9, nesterov=self.nesterov)

    nesterov = False


class Nesterov(Momentum):
    nesterov = True


class Observer(pl.Callback):
    """Wall seconds of steps, waits by step and by place, and memory."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.waits: list[int] = []
        self.places: Counter[str] = Counter()
        self.kept = self.peak = 0

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if step == WARMUP:
            if GPU:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            self.times.append(time.perf_counter())
        if step == WARMUP + STEPS:
            if GPU:
                torch.cuda.synchronize()
                parameters = sum(p.numel() for p in module.parameters())
                states = [v for o in trainer.optimizers for s in o.state.values() for v in s.values()]
                own = list(module.parameters()) + [p.grad for p in module.parameters() if p.grad is not None]
                used = sum(t.numel() * t.element_size() for t in own + states if torch.is_tensor(t) and t.is_cuda)
                self.kept = (torch.cuda.memory_allocated() - used) / parameters
                self.peak = torch.cuda.max_memory_allocated() / parameters
            self.times.append(time.perf_counter())
            warnings.simplefilter("always")
            warnings.showwarning = self._waited
            if GPU:
                torch.cuda.set_sync_debug_mode("warn")
        if step >= WARMUP + STEPS:
            self.waits.append(0)

    def _waited(self, message: Any, *_: Any) -> None:
        if "synchronizing CUDA" not in str(message) or threading.current_thread() is not threading.main_thread():
            return
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(PACKAGE)]
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name}" if frames else "elsewhere"
        self.waits[-1] += 1
        self.places[place] += 1

    def on_train_end(self, *_: Any) -> None:
        if GPU:
            torch.cuda.set_sync_debug_mode("default")
        warnings.simplefilter("ignore")


def fit(strategy: Any, module: pl.LightningModule) -> dict[str, Any]:
    """Train: time and memory first, then waits of 2 * EVERY + 1 steps."""
    observer, ranks = Observer(), int(os.environ["WORLD_SIZE"])
    if GPU:
        torch.cuda.empty_cache()
    trainer = jobs.quiet_trainer(
        strategy=strategy,
        accelerator="gpu" if GPU else "cpu",
        num_nodes=ranks,
        max_steps=WARMUP + STEPS + 2 * EVERY,
        log_every_n_steps=NEVER,
        callbacks=[observer],
    )
    torch.manual_seed(1)
    data = TensorDataset(torch.randint(0, 256, (BATCH * ranks * (WARMUP + STEPS + 2 * EVERY), TOKENS)))
    trainer.fit(module, DataLoader(data, batch_size=BATCH, pin_memory=GPU))
    begun, ended = observer.times
    return {
        "step": (ended - begun) / STEPS,
        "waits": [min(observer.waits), max(observer.waits)],
        "places": observer.places.most_common(4),
        "kept": observer.kept,
        "peak": observer.peak,
    }


def contenders(ranks: int, only: str) -> dict[str, Any]:
    """Functions that make strategies, by name; on one rank the guard and Lightning's strategies, too."""
    fixed = {"balance": [1.0] * ranks}
    if ranks == 1:
        kinds: dict[str, Any] = {"auto": lambda: "auto", "ddp": lambda: "ddp"}
        for what in ("error", "skip", "ignore"):
            kinds[f"on_nan={what}"] = lambda what=what: lightning_hetero.HeteroDDPStrategy(on_nan=what, **fixed)
        return kinds
    return {
        entry.name: lambda entry=entry: entry.strategy(**OPTIONS.get(entry.name, PULL), **fixed)
        for entry in ENTRIES
        if not only or entry.name in only.split(",")
    }


def worker(repeats: int, only: str) -> dict[str, Any]:
    ranks = int(os.environ["WORLD_SIZE"])
    os.environ.update(GROUP_RANK=os.environ["RANK"], LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    torch.set_float32_matmul_precision("high")
    base = (
        (lambda: "auto")
        if ranks == 1
        else lambda: lightning_hetero.NodeAverageStrategy(every_n_steps=NEVER, balance=[1.0] * ranks)
    )
    results: dict[str, list[Any]] = {}
    for _ in range(repeats):
        runs = {}
        for name, make in {"before": base, **contenders(ranks, only), "after": base}.items():
            module = {"hetero_eamsgd": Nesterov, "hetero_measgd_async": Momentum}.get(name, Transformer)
            runs[name] = fit(make(), module())
            if os.environ["RANK"] == "0":
                print(name, runs[name], file=sys.stderr, flush=True)
        idle = (runs.pop("before")["step"] + runs.pop("after")["step"]) / 2
        for name, run in runs.items():
            results.setdefault(name, []).append({**run, "ratio": run["step"] / idle})
    return results


def main() -> None:
    options = jobs.options(__doc__, 3, ranks=2, only="")
    results = jobs.launch(options.ranks, options.repeats, json.dumps(options.only))
    where = torch.cuda.get_device_name() if GPU else "CPU"
    print(f"\n{options.repeats} runs of {STEPS} steps on {options.ranks} ranks of one {where}; {jobs.machine()}")
    print(f"{'':24} ms    step: ratio                waits   at exchanges  memory kept   peak (bytes/parameter)")
    for name, runs in results.items():
        kept, peak = (max(run[what] for run in runs) for what in ("kept", "peak"))
        few, most = (max(run["waits"][i] for run in runs) for i in (0, 1))
        milliseconds = 1e3 * statistics.median(run["step"] for run in runs)
        ratio = jobs.spread([run["ratio"] for run in runs])
        print(f"{name:24} {milliseconds:5.1f} {ratio:25} {few:6} {most:12} {kept:12.2f} {peak:8.2f}")
    for name, runs in results.items():
        if places := runs[0]["places"]:
            print(f"  {name}: " + "; ".join(f"{place} ({count})" for place, count in places))


if __name__ == "__main__":
    jobs.start(main, worker)
