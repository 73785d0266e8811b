"""The loss of strategies at equal samples against the bytes that a replica sends, on four ranks of this machine.

    python benchmarks/loss_by_bytes.py                            # a table
    python benchmarks/loss_by_bytes.py --picture bytes.png ddp hetero_node:every_n_steps=10,replica=rank

A network of 38 thousand parameters learns to read two overlaid digits; the loss is that on test digits. Bytes are those
that exchanges count, without the average that ends a fit. Strategies that average gradients do not count them: for
these they are by theory, 2 (N - 1) / N times what a rank's gradients take on the wire of `ddp` (four bytes a value), in
each step. Strategies in pairs are left out: between ranks of one machine they send nothing that is counted.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import jobs
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

sys.path.insert(0, str(Path(__file__).parent / "cluster"))
RANKS, BATCH, RATE = 4, 16, 2e-3
EVEN = "balance=off"
CONTENDERS = [
    "ddp",
    f"hetero_diloco:tau=100,{EVEN}",
    f"hetero_diloco:tau=100,fragments=3,wire=int4,{EVEN}",
    f"hetero_diloco:tau=100,fragments=3,delay=5,wire=int4,{EVEN}",
    f"hetero_diloco:tau=100,wire=topk:0.02,{EVEN}",
    f"hetero_node:every_n_steps=10,ranks_per_node=1,{EVEN}",
    f"hetero_daso:ranks_per_node=1,{EVEN}",
    f"hetero_easgd:tau=10,moving_rate=auto,{EVEN}",
]
BY_THEORY = {"ddp": 4.0, "hetero_ddp": 4.0}  # bytes of a value on the wire


class Reader(pl.LightningModule):
    """Reads two digits on top of each other, with a learning rate that rises and falls once."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 100)
        self.net, self.steps = nn.Sequential(nn.Flatten(), *layers), steps
        self.sent = 0  # bytes, without the last average when the fit ends

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        traffic = getattr(self.trainer.strategy, "traffic", None)
        self.sent = traffic.bytes if traffic else 0

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=RATE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=self.steps + 1, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(contender: str, steps: int, seed: int) -> dict[str, Any]:
    """Train for an epoch; the loss in the end, and the bytes that a rank has sent."""
    import contenders
    from learn import overlaid

    pl.seed_everything(seed, verbose=False)
    module, data = Reader(steps), overlaid(True, 8192)
    order = torch.arange(steps * BATCH * RANKS) % len(data)
    trainer = jobs.quiet_trainer(strategy=contenders.parse(contender), max_epochs=1)
    trainer.fit(module, DataLoader(Subset(data, order.tolist()), batch_size=BATCH, shuffle=True))
    images, labels = overlaid(False, 2048).tensors
    with torch.no_grad():
        loss = nn.functional.cross_entropy(module.net(images), labels).item()
    name = contender.partition(":")[0]
    values = sum(parameter.numel() for parameter in module.parameters())
    by_theory = 2 * (RANKS - 1) / RANKS * BY_THEORY.get(name, 0.0) * values * steps
    sent = torch.tensor(by_theory or float(module.sent), dtype=torch.float64)
    torch.distributed.all_reduce(sent)
    result = {"contender": contender, "seed": seed, "loss": loss, "bytes": sent.item() / RANKS}
    if torch.distributed.get_rank() == 0:
        print(result, flush=True)
    return result


def worker(list_of: str, steps: int, seeds: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    names = Path(list_of).read_text().splitlines()
    return [fit(name, steps, seed) for seed in range(seeds) for name in names]


def table(found: list[dict[str, Any]], names: list[str]) -> list[tuple[str, float, float]]:
    """Print a row per contender; returns their bytes and losses."""
    of = {name: [run for run in found if run["contender"] == name] for name in names}
    base, rows = statistics.mean(run["bytes"] for run in of[names[0]]), []
    print("loss: mean (sd); minus the first, paired by seed (standard error); times fewer bytes than the first")
    for name, runs in of.items():
        losses, sent = [run["loss"] for run in runs], statistics.mean(run["bytes"] for run in runs)
        apart = [run["loss"] - first["loss"] for run, first in zip(runs, of[names[0]], strict=True)]
        sd, error = (statistics.stdev(x) if len(x) > 1 else 0.0 for x in (losses, apart))
        paired = f"{statistics.mean(apart):+.3f} ({error / len(apart) ** 0.5:.3f})"
        fewer = f"{base / sent:.1f}" if sent else "sent none"
        print(f"| `{name}` | {statistics.mean(losses):.3f} ({sd:.3f}) | {paired} | {fewer} |")
        rows.append((name, sent, statistics.mean(losses)))
    return rows


def draw(rows: list[tuple[str, float, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axis = figure.subplots()
    for name, sent, loss in rows:
        axis.scatter([sent], [loss], label=name.replace(f",{EVEN}", ""))
    axis.set(xscale="log", xlabel="bytes that a replica has sent", ylabel="test loss at equal samples")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contenders", nargs="*", default=CONTENDERS, help="NAME or NAME:option=value,option=value")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--picture", type=Path, help="where to draw the loss over the bytes")
    asked = parser.parse_args()
    print(f"{asked.steps} steps, {asked.seeds} seeds; {jobs.machine()}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder, "names")
        names.write_text("\n".join(asked.contenders))
        found = jobs.launch(RANKS, f'"{names}"', asked.steps, asked.seeds)
    rows = table(found, asked.contenders)
    if asked.picture:
        draw(rows, asked.picture)


if __name__ == "__main__":
    jobs.start(main, worker)
