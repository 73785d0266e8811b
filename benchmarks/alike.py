"""Whether shares of alike ranks stay even, and what moving them would cost: `balance="auto"` against `balance="off"`.

Two ranks train a small CNN, by themselves and beside other programs that keep cores busy. Both kinds of runs alternate
in the same processes. A step counts as even if every rank's share is within 10% of an even one.

    python benchmarks/alike.py [--repeats 5] [--busy 2] [--steps 400]
"""

import json
import statistics
import subprocess
import sys
import time
from typing import Any

import jobs
import lightning.pytorch as pl
import torch
from overhead import MODELS
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroDDPStrategy

SKIP, BATCH, LIMIT = 16, 32, 1500
MODEL = next(name for name in MODELS if name.startswith("small"))
BUSY = f"import time\nend = time.time() + {LIMIT}\nwhile time.time() < end:\n    pass"


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.shape = MODELS[MODEL]()
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.sizes.append(len(batch[0]))
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(balance: str, steps: int) -> dict[str, Any]:
    torch.distributed.is_initialized() and torch.distributed.barrier()
    clock, module = jobs.Clock(), Module()
    trainer = jobs.quiet_trainer(strategy=HeteroDDPStrategy(balance=balance), max_steps=steps, callbacks=[clock])
    data = TensorDataset(torch.randn(2048, *module.shape).repeat(-(-2 * BATCH * steps // 2048), 1, 1, 1))
    trainer.fit(module, DataLoader(data, batch_size=BATCH))
    wall, _ = clock.steps(SKIP)
    even = sum(abs(n - BATCH) <= 0.1 * BATCH for n in module.sizes) / len(module.sizes)
    return {"step": statistics.mean(wall), "even": even, "first": module.sizes[0], "last": module.sizes[-1]}


def worker(repeats: int, steps: int) -> dict[str, Any]:
    return jobs.alternate(
        repeats, {balance: lambda balance=balance: fit(balance, steps) for balance in ("auto", "off")}
    )


def main() -> None:
    options = jobs.options(__doc__, 5, busy=2, steps=400)
    for busy in sorted({0, options.busy}):
        others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(busy)]
        try:
            time.sleep(1 if busy else 0)
            runs = jobs.launch(2, options.repeats, options.steps)
        finally:
            for other in others:
                other.kill()
                other.wait()
        ratios = [a["step"] / b["step"] for a, b in zip(runs["auto"], runs["off"], strict=True)]
        print(f"\n{options.repeats} alternating runs of {options.steps} steps, {busy} busy loops; {jobs.machine()}")
        print(f"  ms per step, off       {jobs.spread([1e3 * run['step'] for run in runs['off']])}")
        print(f"  auto : off             {jobs.spread(ratios)}")
        print(f"  steps with even shares {jobs.spread([run['even'] for run in runs['auto']])}")
        print(f"  samples at the end     {json.dumps([run['last'] for run in runs['auto']])}", flush=True)


if __name__ == "__main__":
    jobs.start(main, worker)
