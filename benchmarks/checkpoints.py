"""Cost of checkpoints for a step: `ResumableCheckpoint` in the background, and not; at most 10% is the goal.

Three kinds of fits in turn: without checkpoints, with checkpoints in the background, and with checkpoints that training
waits for. Taken on rank 0: the time in which the callback saves at the end of a batch, which holds the training up, and
the mean time of all steps, which also sees what the writing takes from the training.

    python benchmarks/checkpoints.py [--repeats 5] [--ranks 2] [--every 20] [--megabytes 50]
    python benchmarks/checkpoints.py --repeats 1 --megabytes 10      # a minute or two
"""

import os
import statistics
import tempfile
import time
from functools import partial
from typing import Any

import jobs
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAVES, SKIP, WIDTH, BATCH = 3, 4, 1024, 192
KINDS = ("without", "background", "waiting")


class Wide(pl.LightningModule):
    """Parameters, and as much momentum."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        count = max(round(megabytes * 1e6 / 8 / WIDTH**2), 1)
        layers = [layer for _ in range(count) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def fit(strategy: str, kind: str, every: int, megabytes: int) -> tuple[float, list[float]]:
    """Mean seconds per step, and the seconds for which each step that saves is held up; on rank 0."""
    from lightning_hetero.callbacks.resumable import ResumableCheckpoint

    held: list[float] = []

    class Timed(ResumableCheckpoint):
        def _save_due(self, trainer: pl.Trainer, timed: bool) -> None:
            began = time.perf_counter()
            super()._save_due(trainer, timed)
            held.append(time.perf_counter() - began)

    steps = SKIP + SAVES * every + every // 2
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        torch.distributed.is_initialized() and torch.distributed.broadcast_object_list(folder, 0)
        clock = jobs.Clock()
        keeps = [] if kind == "without" else [Timed(folder[0], every_n_steps=every, background=kind == "background")]
        off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=int(os.environ["LOCAL_WORLD_SIZE"]),
            strategy=strategy,
            max_steps=steps,
            callbacks=[clock, *keeps],
            enable_checkpointing=bool(keeps),
            **off,
        )
        data = TensorDataset(torch.randn(2 * BATCH * 9, WIDTH))  # at an epoch's end a save waits for the next batch
        trainer.fit(Wide(megabytes), DataLoader(data, batch_size=BATCH))
        wall, _ = clock.steps(SKIP)
        torch.distributed.barrier()  # nobody needs the folder any more
    return statistics.mean(wall), held


def worker(repeats: int, every: int, megabytes: int) -> dict[str, Any]:
    import lightning_hetero  # noqa: F401  registers the strategies' names

    return {
        strategy: jobs.alternate(repeats, {kind: partial(fit, strategy, kind, every, megabytes) for kind in KINDS})
        for strategy in ("hetero_ddp", "hetero_diloco")
    }


def main() -> None:
    options = jobs.options(__doc__, 5, ranks=2, every=20, megabytes=50)
    results = jobs.launch(options.ranks, options.repeats, options.every, options.megabytes)
    print(f"\n{options.repeats} alternating runs on {options.ranks} ranks, {options.megabytes} MB to save on each")
    print(f"A checkpoint every {options.every} steps.")
    print(f"{jobs.machine()}; median and range:")
    for strategy, runs in results.items():
        step = statistics.median(mean for mean, _ in runs["without"])
        print(f"  {strategy}: {1e3 * step:.1f} ms per step without checkpoints")
        for kind in KINDS[1:]:
            held = [seconds / step for _, saves in runs[kind] for seconds in saves]
            ratios = [one[0] / other[0] for one, other in zip(runs[kind], runs["without"], strict=True)]
            print(f"    {kind}")
            print(f"      a step that saves is held up by, parts of a step  {jobs.spread(held)}")
            print(f"      time per step, with : without checkpoints         {jobs.spread(ratios)}")


if __name__ == "__main__":
    jobs.start(main, worker)
