"""Rank of a fit on text that takes a given time per sample, and writes down its progress."""

import ctypes
import logging
import os
import resource
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from place import (
    BATCH,
    FIRST,
    LATEST,
    PAUSE,
    RANK,
    RATE,
    SAMPLES,
    STEPS,
    TIMEOUT,
    Place,
    progress,
    write_ending,
)
from text import Text, gpt, inner_optimizer, loss_of, windows
from torch.utils.data import DataLoader

from lightning_hetero.callbacks.resumable import ResumableCheckpoint
from lightning_hetero.errors import HeteroError
from lightning_hetero.strategies.table import ENTRIES

_NEW_NET, _DIE_WITH_PARENT = 0x40000000, 1
windows()  # once for all processes, which are forked from one that has imported this file


class Task(pl.LightningModule):
    """Continues text; each window takes a given time. Faults that a process does to itself come by signals."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        torch.manual_seed(place.seed)
        self.net = gpt()
        self.cost = place.step / BATCH
        self.fault = ""
        self.period, self.local = next(iter(place.options.values()), 1), 0
        self.progress = progress(place.folder, place.number)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        fault, self.fault = self.fault, ""
        if fault == "error":
            raise ValueError("a fault of the schedule")
        until = time.monotonic() + self.cost * len(batch)
        loss = loss_of(self.net, batch) * (float("nan") if fault == "nan" else 1.0)
        time.sleep(max(0.0, until - time.monotonic()))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        now, seen = time.monotonic(), self.progress
        if seen[LATEST]:
            seen[PAUSE] = max(seen[PAUSE], now - seen[LATEST] - self.cost * len(batch))
        seen[FIRST] = seen[FIRST] or now
        self.local += len(batch)
        if self.trainer.global_step % self.period == 0:
            seen[SAMPLES] += self.local
            self.local = 0
        seen[STEPS], seen[LATEST], seen[RANK] = self.trainer.global_step, now, self.trainer.global_rank

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return inner_optimizer(self.parameters(), RATE)


def worker(place: Place) -> None:
    """One process: trains, and writes down how it has ended."""
    ctypes.CDLL("libc.so.6").prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    _enter(place.space)
    os.environ |= place.variables
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    log = os.open(Path(place.folder, f"log{place.number}"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    result: dict[str, Any] = {"error": "", "ours": True, "text": ""}
    try:
        result |= _fit(place)
    except SystemExit as stop:
        result |= {"error": f"exit {stop.code}", "ours": stop.code == 128 + signal.SIGTERM}
        raise
    except BaseException as error:
        ours = isinstance(error, HeteroError) or "a fault of the schedule" in str(error)
        result |= {"error": type(error).__name__, "ours": ours, "text": str(error)[:300]}
        raise
    finally:
        if not result["error"] and "loss" not in result:
            result["ours"] = False
        write_ending(place, result)


def _fit(place: Place) -> dict[str, Any]:
    task = Task(place)
    signal.signal(signal.SIGUSR1, lambda *_: setattr(task, "fault", "error"))
    signal.signal(signal.SIGUSR2, lambda *_: setattr(task, "fault", "nan"))
    signal.signal(signal.SIGURG, lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)))
    [entry] = [entry for entry in ENTRIES if entry.name == place.strategy]
    options: dict[str, Any] = {
        "on_peer_loss": "continue",
        "grace": place.grace,
        "timeout": TIMEOUT,
    } | place.options
    if place.joins:
        options["join_file"] = str(Path(place.folder, "job"))
    saves = ResumableCheckpoint(Path(place.folder, "checkpoints"), every_n_seconds=place.save)
    off: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=entry.strategy(**options),
        max_steps=place.steps,
        max_epochs=-1,
        callbacks=[saves],
        **off,
    )
    trainer.fit(task, DataLoader(Text(20_000, place.seed), batch_size=BATCH, shuffle=True))
    with torch.no_grad():
        return {"loss": loss_of(task.net, windows()[1]).item()}


def _enter(space: str | None) -> None:
    """Enter a network namespace."""
    if space is not None:
        libc = ctypes.CDLL("libc.so.6", use_errno=True)
        with open(f"/var/run/netns/{space}") as file:
            if libc.setns(file.fileno(), _NEW_NET):
                raise OSError(ctypes.get_errno(), f"cannot enter {space}")
