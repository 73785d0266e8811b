"""The loss of strategies at equal samples against the bytes that a replica sends, on four ranks of this machine.

    python benchmarks/loss_by_bytes.py --steps 100 --seeds 1 ddp hetero_diloco:tau=20,balance=off             # a minute
    python benchmarks/loss_by_bytes.py --save digits.jsonl                     # a table; runs are kept as they come
    python benchmarks/loss_by_bytes.py --task text --seeds 2 --save text.jsonl
    python benchmarks/loss_by_bytes.py --draw digits.jsonl text.jsonl --picture docs/images/loss_by_bytes.png
    python benchmarks/loss_by_bytes.py --ranks 8 --muon --steps 400 --seeds 1 hetero_diloco:tau=20,wire=2bit,balance=off

A network of 38 thousand parameters learns to read two overlaid digits, or a small GPT to continue Python's source code
(bits per character). All ranks together take the same samples, however many they are. What a file holds already is not
run again, so that a command can be stopped, and go on. Bytes are those that exchanges count, without the average that
ends a fit. Strategies that average gradients do not count them: for these they are by theory, those of each step's
messages. Pairs of ranks of one machine send nothing that is counted.

torchft's DiLoCo takes the same outer steps as `hetero_diloco` with `wire="fp32"`, and an all-reduce of as many values
in fp32; by theory it stands at the same place.
"""

import argparse
import json
import math
import os
import re
import statistics
import sys
import tempfile
from abc import abstractmethod
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import jobs
import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from lightning_hetero.comm.compression import bytes_sent
from lightning_hetero.comm.gradients import rank_of

sys.path[:0] = [str(Path(__file__).parent / "cluster"), str(Path(__file__).parents[1] / "examples")]

RANKS = 4  # by default
EVEN = "balance=off"
FEW = f"{EVEN},outer_lr=1.0,outer_momentum=0.5"  # for few outer steps
CONTENDERS = [
    "ddp",
    "hetero_ddp:wire=powersgd:2",
    "hetero_ddp:wire=int4",
    f"hetero_node:every_n_steps=10,replica=rank,{EVEN}",
    f"hetero_easgd:tau=10,moving_rate=auto,{EVEN}",
    f"hetero_diloco:tau=100,{EVEN}",
    f"hetero_diloco:tau=100,{FEW}",
    f"hetero_diloco:tau=100,fragments=2,wire=int4,{FEW}",
    f"hetero_diloco:tau=100,fragments=2,delay=5,blend=0.5,wire=int4,{FEW}",
    f"hetero_diloco:tau=100,wire=topk:0.1,{FEW}",
    f"hetero_diloco:tau=100,wire=topk:0.02,{FEW}",
]


class Task(pl.LightningModule):
    """Trains with a learning rate that rises and falls once, and notes what has been sent.

    Attributes:
        batch: samples per rank and step.
        rate: the highest learning rate.
        unit: of the loss.
        sent: bytes that this replica has sent, without the last average when the fit ends.
    """

    batch: int
    rate: float
    unit: str
    sent: int = 0
    ranks, muon = RANKS, False

    @abstractmethod
    def samples(self, training: bool) -> Dataset:
        """To train on, or to test on."""

    @abstractmethod
    def loss(self, batch: Any) -> torch.Tensor:
        """Of a batch."""

    def loader(self, steps: int) -> DataLoader:
        """An epoch of so many steps."""
        data: Any = self.samples(True)
        order = torch.arange(steps * self.batch * RANKS) % len(data)
        self.steps = steps
        return DataLoader(Subset(data, order.tolist()), batch_size=self.batch * RANKS // self.ranks, shuffle=True)

    @torch.no_grad()
    def tested(self) -> float:
        """The loss on test data."""
        [batch] = DataLoader(self.samples(False), batch_size=2048)
        return self.loss(batch).item()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        traffic = getattr(self.trainer.strategy, "traffic", None)
        self.sent = traffic.bytes if traffic else 0

    def configure_optimizers(self) -> Any:
        make = MuonBesideAdamW if self.muon else torch.optim.AdamW
        optimizer = make(self.parameters(), lr=self.rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.rate, total_steps=self.steps + 1, pct_start=0.1, cycle_momentum=not self.muon
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class MuonBesideAdamW(torch.optim.Optimizer):
    """Muon for matrices, AdamW for all else, as one optimizer.

    Args:
        parameters: of the model.
        lr: of AdamW; Muon's steps are as long as AdamW's would be.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        every = list(parameters)
        super().__init__(every, {"lr": lr})
        matrices, rest = ([p for p in every if (p.ndim == 2) == is_matrix] for is_matrix in (True, False))
        muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        self.parts = muon, torch.optim.AdamW(rest, lr=lr)
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure else None
        for part in self.parts:
            part.step()
        return loss


def overlaid(training: bool, samples: int) -> TensorDataset:
    """Two handwritten digits on top of each other, to be told both; those of the test are never trained on."""
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    chosen = (torch.arange(len(images)) % 5 != 0) == training
    images, labels = images[chosen], labels[chosen]
    first, second = torch.randint(len(images), (2, samples), generator=torch.Generator().manual_seed(int(training)))
    low, high = torch.minimum(labels[first], labels[second]), torch.maximum(labels[first], labels[second])
    return TensorDataset(torch.maximum(images[first], images[second]), 10 * low + high)


class Overlaid(Task):
    """Reads two digits on top of each other: 38 thousand parameters."""

    batch, rate, unit = 16, 2e-3, "test loss, nats"

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 100)
        self.net = nn.Sequential(nn.Flatten(), *layers)

    def samples(self, training: bool) -> Dataset:
        return overlaid(training, 8192 if training else 2048)

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


class Text(Task):
    """The small GPT of `examples/daso_char_gpt.py` on Python's source code: 130 thousand parameters."""

    batch, rate, unit = 4, 3e-3, "bits per character of test text"
    characters, context = 3_000_000, 64

    def __init__(self) -> None:
        super().__init__()
        from daso_char_gpt import CharGPT

        self.net = CharGPT(self.context, width=64, layers=2, lr=self.rate)

    def samples(self, training: bool) -> Dataset:
        windows = text(self.characters).unfold(0, self.context + 1, self.context)
        return TensorDataset(windows[:-1024] if training else windows[-1024:])

    def loss(self, batch: Any) -> torch.Tensor:
        return self.net.bits(batch)


@cache
def text(characters: int) -> torch.Tensor:
    """Codes of the first characters of Python's source code."""
    from daso_char_gpt import encode, source_code

    return encode(source_code(characters))


TASKS: dict[str, type[Task]] = {"digits": Overlaid, "text": Text}


def by_theory(name: str, wire: str, module: nn.Module, ranks: int) -> float:
    """Bytes that a rank sends in a step for the gradients of all ranks, which nobody counts; else 0.

    Args:
        name: of the strategy.
        wire: of its gradients.
        module: the model.
        ranks: how many.
    """
    if name not in ("ddp", "hetero_ddp"):
        return 0.0
    rank = rank_of(wire)
    shapes = [p.shape for p in module.parameters()]
    if rank is None:
        return float(bytes_sent(sum(map(math.prod, shapes)), 4, wire, ranks))
    values = 0
    for shape in shapes:
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        least = min(rank, rows, columns) * (rows + columns)
        values += min(least, rows * columns) if len(shape) > 1 else columns
    return float(bytes_sent(values, 4, "fp32", ranks))


def fit(contender: str, task: str, steps: int, seed: int, ranks: int, muon: bool, rate: float) -> dict[str, Any]:
    """Train for an epoch; the loss in the end, and the bytes that a rank has sent."""
    import contenders

    pl.seed_everything(seed, verbose=False)
    module = TASKS[task]()
    module.ranks, module.muon, module.rate = ranks, muon, rate or module.rate
    trainer = jobs.quiet_trainer(strategy=contenders.parse(contender), max_epochs=1)
    trainer.fit(module, module.loader(steps))
    wire = re.search(r"wire=([^,]+)", contender)
    theory = steps * by_theory(contender.partition(":")[0], wire[1] if wire else "fp32", module, ranks)
    sent = torch.tensor(theory or float(module.sent), dtype=torch.float64)
    torch.distributed.all_reduce(sent)
    about = {"task": task, "unit": module.unit, "contender": contender, "steps": steps, "seed": seed}
    about |= {"ranks": ranks, "muon": muon, "rate": rate}
    return {**about, "loss": module.tested(), "bytes": sent.item() / ranks, "load": os.getloadavg()[0]}


def worker(asked: str, kept: str) -> int:
    """Run what a file does not hold yet, and add it there."""
    torch.set_num_threads(1)
    options, file = json.loads(Path(asked).read_text()), Path(kept)
    known = {"contender": "", "task": "", "steps": 0, "seed": 0, "ranks": RANKS, "muon": False, "rate": 0.0}
    done = [{name: run.get(name, known[name]) for name in known} for run in read([file])]  # before any rank writes
    for seed in range(options["seeds"]):
        for contender in options["contenders"]:
            asks = {"contender": contender, "seed": seed, **{name: options[name] for name in known if name in options}}
            if asks in done:
                continue
            result = fit(**asks)
            if torch.distributed.get_rank() == 0:
                print(result, flush=True)
                with file.open("a") as lines:
                    lines.write(json.dumps(result) + "\n")
    return 0


def read(files: list[Path]) -> list[dict[str, Any]]:
    """The runs that files hold."""
    return [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]


def by_contender(runs: list[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """The runs of each contender by seed, in the order in which contenders first came."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        found.setdefault(run["contender"], {})[run["seed"]] = run
    return found


def table(runs: list[dict[str, Any]]) -> None:
    """Print a row per contender, those with the most bytes first."""
    found = by_contender(runs)
    base = next(iter(found.values()))
    most = statistics.mean(run["bytes"] for run in base.values())
    first = runs[0]
    inner = "Muon" if first.get("muon") else "AdamW"
    print(
        f"{first['task']}, {first.get('ranks', RANKS)} ranks, {inner}, {first['steps']} steps, {first['unit']}; ",
        end="",
    )
    print(f"load {min_max([run['load'] for run in runs])}")
    print("seeds; mean (sd); minus the first, paired by seed (standard error); times fewer bytes than the first")
    for name, own in found.items():
        losses, sent = [run["loss"] for run in own.values()], statistics.mean(run["bytes"] for run in own.values())
        apart = [run["loss"] - base[seed]["loss"] for seed, run in own.items() if seed in base]
        sd, error = (statistics.stdev(x) if len(x) > 1 else 0.0 for x in (losses, apart))
        paired = f"{statistics.mean(apart):+.3f} ({error / len(apart) ** 0.5:.3f})" if apart else ""
        fewer = f"{most / sent:.1f}" if sent else "sent none"
        print(f"| `{name}` | {len(own)} | {statistics.mean(losses):.3f} ({sd:.3f}) | {paired} | {fewer} |")


def min_max(values: list[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}"


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """A panel for each task: the loss over the bytes, mean and range of the seeds."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(run["task"] for run in runs))
    figure = Figure(figsize=(6 * len(tasks), 7), layout="constrained")
    looks: dict[str, tuple[str, str]] = {}  # a marker and a colour of each contender
    for axis, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        of_task = [run for run in runs if run["task"] == task]
        for name, own in by_contender(of_task).items():
            shown = name.replace(f",{EVEN}", "").replace("outer_", "").removeprefix("hetero_")
            losses = [run["loss"] for run in own.values()]
            mean, sent = statistics.mean(losses), statistics.mean(run["bytes"] for run in own.values())
            label = None if shown in looks else shown  # once, for all panels
            marker, colour = looks.setdefault(shown, ("osD^v"[len(looks) // 10 % 5], f"C{len(looks) % 10}"))
            error = [[mean - min(losses)], [max(losses) - mean]]
            axis.errorbar([sent / 1e6], [mean], error, fmt=marker, color=colour, capsize=3, label=label)
            if name == "ddp":
                axis.axhspan(min(losses), max(losses), color="#00000018", lw=0)
        axis.set(xscale="log", xlabel="MB that a replica has sent", ylabel=of_task[0]["unit"])
        axis.set_title(f"{task}, {of_task[0]['steps']} steps")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contenders", nargs="*", default=CONTENDERS, help="NAME or NAME:option=value,option=value")
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--muon", action="store_true", help="Muon for matrices, instead of AdamW for all")
    parser.add_argument("--rate", type=float, default=0.0, help="learning rate; default: the task's, for AdamW")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--save", type=Path, help="where to keep runs, and to look for those that are done")
    parser.add_argument("--draw", type=Path, nargs="+", help="files of earlier calls; nothing is run")
    parser.add_argument("--picture", type=Path, help="where to draw the loss over the bytes")
    asked = parser.parse_args()
    if not asked.draw:
        print(f"{asked.steps} steps, {asked.seeds} seeds; {jobs.machine()}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            asked.draw = [asked.save or Path(folder, "runs.jsonl")]
            numbers = {
                name: getattr(asked, name) for name in ("contenders", "task", "steps", "seeds", "ranks", "muon", "rate")
            }
            options = Path(folder, "asked")
            options.write_text(json.dumps(numbers))
            jobs.launch(
                asked.ranks, json.dumps(str(options)), json.dumps(str(asked.draw[0].resolve())), timeout=6 * 3600
            )
            runs = read(asked.draw)
    else:
        runs = read(asked.draw)
    settings = [(run["task"], *(run.get(name) for name in ("ranks", "muon", "rate"))) for run in runs]
    for setting in dict.fromkeys(settings):
        table([run for run, own in zip(runs, settings, strict=True) if own == setting])
    if asked.picture:
        draw(runs, asked.picture)


if __name__ == "__main__":
    jobs.start(main, worker)
