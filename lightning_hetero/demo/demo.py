"""Demo: the trainings, one after the other, then a table and a picture."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from lightning.pytorch import LightningModule
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_hetero.batching.shares import Cost, bound, split
from lightning_hetero.callbacks.plots import WAITING, colours, lane, lanes
from lightning_hetero.errors import ConfigurationError

#: The emulated devices, one per rank: two alike, one half as fast, one a quarter as fast.
DEVICES = [Cost(0.010, 0.002), Cost(0.010, 0.002), Cost(0.010, 0.004), Cost(0.010, 0.008)]
GLOBAL_BATCH = 64
#: First steps of a training that its time per epoch leaves out: memory is allocated, connections are opened.
WARM_UP = 3


class Step(NamedTuple):
    """One step of one rank.

    Attributes:
        epoch: counted from 0.
        start: seconds on a clock that all ranks share.
        samples: samples that the rank processed.
        work: seconds of its own work.
        wait: seconds that it waited for others.
    """

    epoch: int
    start: float
    samples: int
    work: float
    wait: float


@dataclass(frozen=True)
class Result:
    """One training.

    Attributes:
        strategy: as given to the Trainer.
        accuracy: fraction of the test digits read right.
        ranks: for each rank its steps, in order.
    """

    strategy: str
    accuracy: float
    ranks: list[list[Step]]

    @classmethod
    def load(cls, path: Path) -> "Result":
        """Read what :meth:`save` wrote."""
        content = json.loads(path.read_text())
        return cls(**{**content, "ranks": [[Step(*step) for step in steps] for steps in content["ranks"]]})

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @property
    def epoch_seconds(self) -> float:
        """Seconds per epoch, as the mean time from one step's start to the next one's, times the steps of an epoch."""
        steps = self.ranks[0]
        pairs = zip(steps[WARM_UP:], steps[WARM_UP + 1 :], strict=False)
        return mean(b.start - a.start for a, b in pairs if a.epoch == b.epoch) * self.steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        return sum(step.epoch == 0 for step in self.ranks[0])

    @property
    def shares(self) -> list[int]:
        """Samples per rank in the last step."""
        return [steps[-1].samples for steps in self.ranks]

    def waiting(self, rank: int | None = None) -> float:
        """Fraction of the steps' time that a rank (default: all of them) spent waiting for others."""
        steps = [step for steps in (self.ranks if rank is None else [self.ranks[rank]]) for step in steps[WARM_UP:]]
        return sum(step.wait for step in steps) / sum(step.work + step.wait for step in steps)


STRATEGIES = ("ddp", "hetero_ddp", "hetero_daso")


def demo(out: Path, epochs: int) -> None:
    """Train with each strategy, print what came of it, and save a picture.

    Args:
        out: folder for the picture and the measurements; made if missing.
        epochs: passes over the data, for each strategy.

    Raises:
        ConfigurationError: a package that only the demo needs is not installed.
        SystemExit: a training failed; it has said why.
    """
    if missing := [name for name in ("matplotlib", "sklearn") if find_spec(name) is None]:
        raise ConfigurationError(
            f"the demo also needs {' and '.join(missing)}: python -m pip install 'lightning-hetero[examples]'"
        )

    console = Console(highlight=False)
    console.print(introduction(epochs))
    out.mkdir(parents=True, exist_ok=True)
    results = []
    for strategy in STRATEGIES:
        path = out.resolve() / f"{strategy}.json"
        run_alone([sys.executable, "-m", "lightning_hetero.demo.run", strategy, str(epochs), str(path)])
        results.append(Result.load(path))
    console.print(table(results))
    console.print(notes(results))
    for name in STRATEGIES[1:]:
        console.print(f"HeteroMonitor's report on {name}: {out / name / 'report.html'}", soft_wrap=True)
    console.print(f"A picture of who worked and who waited: {draw(results, out / 'demo.png')}", soft_wrap=True)


def introduction(epochs: int) -> str:
    """The introduction: what is about to happen, what of it is emulated, and what is real."""
    devices = "\n".join(
        f"    rank {rank}   {1e3 * cost.fixed:.0f} ms per step + {1e3 * cost.per_sample:.0f} ms per image"
        for rank, cost in enumerate(DEVICES)
    )
    return f"""
[bold]{" against ".join(STRATEGIES)}, on devices of unequal speed[/bold]

{len(DEVICES)} processes on this machine train a small network to read handwritten digits, {GLOBAL_BATCH} images per \
step, {epochs} epochs: with Lightning's own ddp, then with hetero_ddp, then with hetero_daso, which takes ranks 0 and \
1 for one node and ranks 2 and 3 for another.

[bold]Emulated[/bold] is the speed of the devices: each rank sleeps for as long as its device would still compute.
{devices}

[bold]Real[/bold] is all else: the processes, the training, and the exchanges between them. The strategies are told \
nothing of these speeds: they measure them.

Starting the processes takes some seconds, each time.
"""


def run_alone(command: Sequence[str]) -> None:
    """Run a command that starts processes, and leave none of them behind, whatever happens.

    Raises:
        SystemExit: the command failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # ranks share this machine's cores
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        status = process.wait()
    finally:  # also on Ctrl-C, which reaches this process only: the ranks have a session of their own
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if status:
        raise SystemExit(f"The training failed (exit status {status}): {' '.join(command)}")


def table(results: Sequence[Result]) -> Table:
    """One row per training, and one for what no split can beat."""
    steps, base = results[0].steps_per_epoch, results[0].epoch_seconds
    best = steps * bound(GLOBAL_BATCH, DEVICES)
    rows = [(r.strategy, r.epoch_seconds, r.shares, f"{r.waiting():.0%}", f"{r.accuracy:.1%}") for r in results]
    rows.append(("the bound", best, split(GLOBAL_BATCH, DEVICES), "", ""))
    result = Table()
    result.add_column("strategy", style="bold")
    for name in ("time per\nepoch", "speed-up\nover ddp", "images of\nranks 0 1 2 3", "waiting", "test\naccuracy"):
        result.add_column(name, justify="right")
    for name, seconds, shares, waiting, accuracy in rows:
        images = " ".join(map(str, shares))
        result.add_row(name, f"{seconds:.2f} s", f"{base / seconds:.2f}x", images, waiting, accuracy)
    return result


def notes(results: Sequence[Result]) -> str:
    """Notes on how the numbers in the table were measured."""
    return f"""
[bold]time per epoch[/bold]: {results[0].steps_per_epoch} times the mean time from the start of a step to the start \
of the next one. The first {WARM_UP} steps of the training and the test are left out; the steps that are still split \
evenly, because speeds have yet to be measured, are not.
[bold]hetero_daso[/bold] averages gradients within a node only, and exchanges parameters between nodes in the \
background. Here all processes share one machine, so that it saves little; what it does on slow links between machines \
is in docs/benchmarks.md.
[bold]images[/bold]: how the last batch of {GLOBAL_BATCH} was split.
[bold]waiting[/bold]: the part of all ranks' time spent waiting for other ranks and for the exchange of gradients.
[bold]the bound[/bold]: no split is faster on such devices, even if the exchange of gradients, the optimizer and \
Python itself took no time.
"""


COLOURS = colours(len(DEVICES))
#: The part of the trainings that the time lines show, in seconds: long enough to see the split change.
SHOWN = 4.0


def draw(results: Sequence[Result], path: Path) -> Path:
    """Draw a row per training: a time line of every rank, and the split of every batch.

    Args:
        results: one per strategy.
        path: where to save the picture, as PNG.

    Returns:
        ``path``.
    """
    figure = Figure(figsize=(12, 3.4 * len(results) + 1.2), layout="constrained")
    names = ", ".join(result.strategy for result in results)
    figure.suptitle(f"The same training under {names}, on emulated devices of unequal speed", size=15)
    axes = figure.subplots(len(results), 2, squeeze=False, width_ratios=(5, 2))
    for (left, right), result in zip(axes, results, strict=True):
        _draw_time_line(left, result)
        _draw_split(right, result)
    figure.legend(
        handles=[
            *(Patch(color=colour, label=f"rank {rank} computes") for rank, colour in enumerate(COLOURS)),
            Patch(color=WAITING, label="waits for other ranks"),
        ],
        loc="outside lower center",
        ncols=len(COLOURS) + 1,
        frameon=False,
    )
    figure.savefig(path, dpi=150)
    return path


def _draw_time_line(axis: Axes, result: Result) -> None:
    began = min(steps[0].start for steps in result.ranks)
    for rank, (steps, colour) in enumerate(zip(result.ranks, COLOURS, strict=True)):
        lane(axis, rank, [(s.start - began, s.work + s.wait) for s in steps], WAITING)
        lane(axis, rank, [(s.start - began, s.work) for s in steps], colour)
    done = sum(step.start + step.work + step.wait <= began + SHOWN for step in result.ranks[0])
    axis.set_title(f"{result.strategy}: {done} steps in the first {SHOWN:.0f} seconds", loc="left", weight="bold")
    axis.set_xlabel("seconds since training began")
    axis.set_xlim(0, SHOWN)
    speeds = [f"rank {rank}\n{1e3 * cost.per_sample:.0f} ms per image" for rank, cost in enumerate(DEVICES)]
    lanes(axis, speeds)


def _draw_split(axis: Axes, result: Result) -> None:
    shares = [[step.samples for step in steps] for steps in result.ranks]
    axis.stackplot(range(1, len(shares[0]) + 1), shares[::-1], colors=COLOURS[::-1], step="mid")
    top = GLOBAL_BATCH
    for rank, row in enumerate(shares):
        axis.text(len(row), top - row[-1] / 2, f"  {row[-1]} on rank {rank}", va="center")
        top -= row[-1]
    axis.set_title(f"the split of {GLOBAL_BATCH} images", loc="left", weight="bold")
    axis.set_xlabel("step")
    axis.set_ylabel("images per step")
    axis.set_xlim(1, len(shares[0]))
    axis.set_ylim(0, GLOBAL_BATCH)
    axis.spines[["top", "right"]].set_visible(False)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """The 1797 digits of scikit-learn, always split alike.

    Returns:
        1437 samples to train on and 360 to test on: images of shape ``(1, 8, 8)`` in [0, 1], and labels 0 to 9.
    """
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(data.target))
    train, test = random_split(dataset, [1437, 360], torch.Generator().manual_seed(0))
    return TensorDataset(*dataset[train.indices]), TensorDataset(*dataset[test.indices])


class DigitReader(LightningModule):
    """Two convolutions and a linear layer; no layer that couples samples, so any split gives the same mathematics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
        )  # fmt: skip
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy of a batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Count what was read right."""
        images, labels = batch
        self.accuracy(self.layers(images), labels)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, at a learning rate of 2e-3."""
        return torch.optim.Adam(self.parameters(), lr=2e-3)
