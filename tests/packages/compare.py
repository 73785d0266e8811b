"""Trains a model of another package on two ranks, under Lightning's ``ddp`` and under ours, and compares.

A script of this folder gives :func:`main` a function that fits the package's model with a Trainer of given arguments.
"""

import hashlib
import math
import multiprocessing
import os
import random
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor

from lightning_hetero import HeteroDDPStrategy

OURS = ("hetero_ddp", "hetero_daso", "hetero_easgd", "hetero_gossip", "hetero_diloco")
EVEN = "hetero_ddp, balance='off'"
WORLD, SECONDS = 2, 300.0
EPOCHS = 6  # of ten steps or more: replicas that exchange every 50 steps do so, too
#: Weights and metrics are equal to those of ``ddp`` if they differ by no more than this fraction.
ROUNDING = 1e-3

Train = Callable[[dict[str, Any]], None]
Rows = Callable[[Any], Iterable[Tensor]]
Found = dict[str, Any]  # results of a fit on one rank


class Watch(Callback):
    """Keeps each sample, loss and metric, and the model.

    Args:
        rows: the tensors of a batch that tell its samples apart, a row each.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.seen: list[Counter[str]] = []  # of each epoch
        self.losses: list[list[tuple[float, int]]] = []  # of each epoch: loss and samples of each batch
        self.steps = 0
        self.metrics: dict[str, float] = {}
        self.module: LightningModule | None = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen.append(Counter())
        self.losses.append([])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        columns = [tensor.detach().double().reshape(len(tensor), -1) for tensor in self._rows(batch)]
        samples = [hashlib.sha1(row.numpy().tobytes()).hexdigest() for row in torch.cat(columns, dim=1)]
        self.seen[-1].update(samples)
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.losses[-1].append((float(loss.detach()), len(samples)))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.steps, self.module = trainer.global_step, pl_module
        self.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}

    def save(self, path: Path) -> None:
        """Write the record and the weights."""
        assert self.module is not None
        weights = torch.cat([p.detach().double().reshape(-1) for p in self.module.parameters() if p.numel()])
        found = {"seen": self.seen, "losses": self.losses, "steps": self.steps, "metrics": self.metrics}
        torch.save({**found, "weights": weights}, path)


def _strategy(name: str, unused: bool) -> Any:
    """The ``strategy`` argument of the Trainer."""
    if name == EVEN:
        return HeteroDDPStrategy(balance="off", find_unused_parameters=unused)
    return f"{name}_find_unused_parameters_true" if unused else name


def _rank(rank: int, port: int, train: Train, rows: Rows, strategy: Any, results: Path) -> None:
    """Fit as one of two ranks, on two nodes of one rank each, and write the results."""
    with open(results / f"{rank}.txt", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "packages"}
    place = {"RANK": rank, "GROUP_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update(address | {name: str(number) for name, number in place.items()})
    os.chdir(results)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    seed_everything(1, verbose=False)
    watch = Watch(rows)
    trainer = {
        "strategy": strategy,
        "accelerator": "cpu",
        "devices": 1,
        "num_nodes": WORLD,
        "max_epochs": EPOCHS,
        "callbacks": [watch],
        "logger": False,
        "default_root_dir": results,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    try:
        train(trainer)
        watch.save(results / f"{rank}.pt")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # nothing of the fit is left to wait for


def _fit(train: Train, rows: Rows, strategy: Any) -> list[Found]:
    """Results of a fit on each rank."""
    with tempfile.TemporaryDirectory(prefix="packages-") as folder:
        results = Path(folder)
        port = random.SystemRandom().randrange(20000, 32000)  # below the ports that the kernel gives to connections
        context = multiprocessing.get_context("fork")  # after the imports, which take longer than the fit
        arguments = port, train, rows, strategy, results
        processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(WORLD)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(SECONDS)
            if process.exitcode is None:
                process.kill()
        if any(process.exitcode for process in processes):
            for rank in range(WORLD):
                print(f"--- {strategy}, rank {rank}\n{(results / f'{rank}.txt').read_text()[-4000:]}")
            raise RuntimeError(f"{strategy}: exit codes {[process.exitcode for process in processes]}")
        return load(results)


def load(results: Path) -> list[Found]:
    """Results that the ranks have written to a folder."""
    return [torch.load(results / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


def _mean_losses(ranks: list[Found]) -> list[float]:
    """Mean loss of each epoch, over all samples."""
    epochs = zip(*(one["losses"] for one in ranks), strict=True)
    means = []
    for parts in epochs:
        both = [pair for part in parts for pair in part]
        means.append(sum(loss * n for loss, n in both) / sum(n for _, n in both))
    return means


def _seen(ranks: list[Found]) -> list[Counter[str]]:
    """Number of times that each sample was seen in each epoch, by all ranks."""
    return [sum(parts, Counter()) for parts in zip(*(one["seen"] for one in ranks), strict=True)]


def _differences(name: str, ranks: list[Found], plain: list[Found]) -> list[str]:
    """Differences of a fit from that of ``ddp`` that should not be there."""
    wrong = []
    if (steps := [one["steps"] for one in ranks]) != (usual := [one["steps"] for one in plain]):
        wrong.append(f"{steps} steps, with ddp {usual}")
    if _seen(ranks) != _seen(plain):
        wrong.append("other samples than with ddp")
    losses = _mean_losses(ranks)
    if not losses[-1] < losses[0]:
        wrong.append(f"the loss does not fall: {losses}")
    if not torch.equal(ranks[0]["weights"], ranks[1]["weights"]):
        wrong.append(f"weights differ between ranks by up to {(ranks[0]['weights'] - ranks[1]['weights']).abs().max()}")
    for one, other in zip(ranks, plain, strict=True):
        if one["metrics"].keys() != other["metrics"].keys():
            wrong.append(f"metrics {sorted(one['metrics'])}, with ddp {sorted(other['metrics'])}")
        if bad := {key: value for key, value in one["metrics"].items() if not math.isfinite(value)}:
            wrong.append(f"metrics that are not finite: {bad}")
    for key in ranks[0]["metrics"] if name == EVEN else ():
        value, usual = (sum(one["metrics"][key] for one in of) / WORLD for of in (ranks, plain))  # if not synced
        if not math.isclose(value, usual, rel_tol=ROUNDING, abs_tol=1e-6):
            wrong.append(f"{key} is {value} in the mean over ranks, with ddp {usual}")
    if name.startswith("hetero_ddp") and (off := _distance(ranks, plain)) > ROUNDING:
        wrong.append(f"weights are {off:.1e} from those of ddp")
    return wrong


def _distance(ranks: list[Found], plain: list[Found]) -> float:
    own, usual = ranks[0]["weights"], plain[0]["weights"]
    return float((own - usual).norm() / usual.norm())


def main(package: str, train: Train, rows: Rows, unused: bool = False) -> None:
    """Train with each strategy, and print a row for each; the exit status is 1 if one differs as it should not.

    Args:
        package: its name on PyPI.
        train: fits the package's model, with these arguments for its Trainer.
        rows: the tensors of a batch that tell its samples apart, a row each.
        unused: whether some of the model's parameters have no part in its loss.
    """
    names = ("ddp", EVEN, *OURS)
    compare(package, {name: partial(_fit, train, rows, _strategy(name, unused)) for name in names})


def compare(package: str, fits: dict[str, Callable[[], list[Found]]]) -> None:
    """Compare fits given by name, as :func:`main` does; the first one is that of ``ddp``."""
    plain: list[Found] = []
    failed = False
    title = f"{package} {version(package)}"
    for name, fit in fits.items():
        try:
            ranks = fit()
        except RuntimeError as error:
            failed = True
            print(f"| {title} | `{name}` | {error} | | | | |", flush=True)
            if not plain:
                break
            continue
        plain = plain or ranks
        wrong = _differences(name, ranks, plain)
        failed |= bool(wrong)
        seen, losses = _seen(ranks), _mean_losses(ranks)
        times = {n for epoch in seen for n in epoch.values()}
        samples = "+".join(str(sum(map(sum, (epoch.values() for epoch in one["seen"])))) for one in ranks)
        each = f"{min(times)} to {max(times)}" if len(times) > 1 else f"{times.pop()}"
        cells = (
            title,
            f"`{name}`",
            ranks[0]["steps"],
            f"{samples}, each {each} per epoch",
            f"{losses[0]:.4g} to {losses[-1]:.4g}",
            f"{_distance(ranks, plain):.1e}",
            "; ".join(wrong) or "as it should be",
        )
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    sys.exit(failed)
