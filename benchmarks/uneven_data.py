"""Samples per second where samples differ in length: shares by number and by cost, and the bound.

Samples are the docstrings of Python's standard library, up to 1,024 characters each; 64 in a global batch. A delay,
which uses no core, emulates devices: a rank of speed 1 takes 10 ms for a batch and 60 microseconds for each character;
where parts are padded 15, padding included, with which a step takes about as long. The delays alone take about five
minutes per repeat.

    python benchmarks/uneven_data.py [--repeats 3] [--steps 64]
    python benchmarks/uneven_data.py --real 1      # a small transformer, which pads, on two ranks, with no delay
"""

import ast
import statistics
import sysconfig
import time
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import jobs
import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.batching.deal import Machines, deal_padded

FIXED, LONGEST, BATCH, SKIP = 0.010, 1024, 64, 34
PER_CHARACTER = {"additive": 60e-6, "padded": 15e-6}
SPEEDS = {"alike": (1.0,) * 4, "unlike": (1.0, 1.0, 0.5, 0.25)}
CONTENDERS: dict[str, dict[str, Any]] = {
    "even shares": {"balance": "off", "cost": "samples"},
    "by number": {"cost": "samples"},
    "by cost": {},
}


@cache
def docstrings() -> list[bytes]:
    """Docstrings of functions, classes and modules, in an order of no meaning, the same on every rank."""
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                texts.append(text.encode()[:LONGEST])
    order = np.random.default_rng(0).permutation(len(texts))
    return [texts[index] for index in order]


class Docstrings(Dataset):
    """Characters of each docstring."""

    def __init__(self, samples: int) -> None:
        texts = docstrings()
        self.texts = [texts[index % len(texts)] for index in range(samples)]
        self.lengths = [len(text) for text in self.texts]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.texts[index]), dtype=torch.uint8).long()


def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A padded batch, and its lengths."""
    return {"ids": pad_sequence(samples, batch_first=True), "length": torch.tensor([len(one) for one in samples])}


class Emulated(pl.LightningModule):
    """A device of some speed."""

    def __init__(self, rule: str, speeds: tuple[float, ...], delay: bool = True) -> None:
        super().__init__()
        self.net, self.rule, self.speeds, self.delay = torch.nn.Linear(1, 1), rule, speeds, delay
        self.parts: list[list[int]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        lengths = batch["length"]
        self.parts.append(lengths.tolist())
        cost = lengths.sum() if self.rule == "additive" else batch["ids"].numel()
        time.sleep(seconds(float(cost), self.rule, self.speeds[self.global_rank]) if self.delay else 0.0)
        return self.net(lengths.float()[:, None] / LONGEST).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Transformer(pl.LightningModule):
    """Predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        self.embed, self.head = torch.nn.Embedding(256, 64), torch.nn.Linear(64, 256)
        self.body = torch.nn.TransformerEncoder(layer, 2)
        self.parts: list[list[int]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        ids = batch["ids"]
        self.parts.append(batch["length"].tolist())
        mask = torch.nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        found = self.head(self.body(self.embed(ids), mask=mask, is_causal=True))
        return torch.nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)

    def batch_weight(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Characters that are predicted."""
        return (batch["length"] - 1).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def seconds(cost: float, rule: str, speed: float) -> float:
    """Seconds of a rank for a part of some cost."""
    return (FIXED + PER_CHARACTER[rule] * cost) / speed


def fit(module: Any, options: dict[str, Any], batch: int, steps: int, skip: int) -> dict[str, float]:
    """Mean seconds of a step after the first ``skip``, the least by the bound, and how much is padding."""
    clock, data = jobs.Clock(), Docstrings(batch * (steps + 1))
    trainer = jobs.quiet_trainer(strategy=HeteroDDPStrategy(**options), max_steps=steps + 1, callbacks=[clock])
    trainer.fit(module, DataLoader(data, batch_size=batch // trainer.world_size, collate_fn=collate))
    everyone: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(everyone, module.parts[skip:steps])
    padded = sum(len(part) * max(part, default=0) for part in chain(*everyone))
    found = {
        "step": (clock.wall[steps] - clock.wall[skip]) / (steps - skip),
        "padding": 1 - sum(map(sum, chain(*everyone))) / padded,
    }
    if isinstance(module, Emulated):
        batches = [np.array(list(chain(*parts))) for parts in zip(*everyone, strict=True)]
        least = sum(bound(lengths, module.rule, module.speeds) for lengths in batches)
        found["least"] = least / (steps - skip)
    return found


def bound(lengths: np.ndarray, rule: str, speeds: tuple[float, ...]) -> float:
    """Seconds of a batch: additive, if samples could be divided; padded, of the optimal deal."""
    if rule == "additive":
        return (len(speeds) * FIXED + PER_CHARACTER[rule] * float(lengths.sum())) / sum(speeds)
    fixed, per_unit = [FIXED / speed for speed in speeds], [PER_CHARACTER[rule] / speed for speed in speeds]
    owner = deal_padded(lengths, Machines.of(fixed, per_unit, [1] * len(speeds)))
    parts = [lengths[owner == rank] for rank in range(len(speeds))]
    return max(seconds(float(len(part) * part.max()), rule, speed) for part, speed in zip(parts, speeds, strict=True))


def worker(real: int, repeats: int, steps: int, rule: str = "padded", ranks: str = "alike") -> dict[str, Any]:
    """The figures of each contender."""

    def run(options: dict[str, Any], delay: bool = True) -> dict[str, float]:
        if real:
            return fit(Transformer(), options, 32, 24, 8)
        return fit(Emulated(rule, SPEEDS[ranks], delay), options, BATCH, steps, min(SKIP, steps // 2))

    options = {name: {**chosen, **({} if chosen else {"cost": rule})} for name, chosen in CONTENDERS.items()}
    fits = {name: partial(run, chosen) for name, chosen in options.items()}
    if not real:
        fits["no delay"] = partial(run, options["even shares"], delay=False)
    return jobs.alternate(repeats, fits)


def show(title: str, results: dict[str, Any]) -> None:
    """Print the rows of one setting; what a step takes without the delay counts for the bound as well."""
    real = [run["step"] for run in results.pop("no delay", [])]
    for name, runs in results.items():
        ratios = [base["step"] / run["step"] for run, base in zip(runs, results["by number"], strict=True)]
        bounds = [(run["least"] + more) / run["step"] for run, more in zip(runs, real, strict=False)]
        padding = f"{statistics.median(run['padding'] for run in runs):.0%}" if "padded" in title else ""
        row = title, name, jobs.spread(ratios), jobs.spread(bounds) if bounds else "", padding
        print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    """Print a table."""
    options = jobs.options(__doc__, 3, real=0, steps=64)
    lengths = list(map(len, docstrings()))
    print(f"{len(lengths)} docstrings, mean {statistics.mean(lengths):.0f} characters, median ", end="")
    print(f"{statistics.median(lengths):.0f}; {options.repeats} alternating runs; {jobs.machine()}\n")
    print("| ranks, rule | batches are split | samples/s, against by number | against the bound | padding |")
    print("|---|---|---:|---:|---:|")
    if options.real:
        show("2 alike, padded, a transformer", jobs.launch(2, 1, options.repeats, options.steps))
        return
    for ranks in SPEEDS:
        for rule in ("additive", "padded"):
            found = jobs.launch(4, 0, options.repeats, options.steps, f'"{rule}"', f'"{ranks}"')
            show(f"4 {ranks}, {rule}", found)


if __name__ == "__main__":
    jobs.start(main, worker)
