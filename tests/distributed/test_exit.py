"""A process that ends while an exchange is under way ends with its own exit status, not in an abort."""

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from ranks import attempt
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader

from lightning_hetero import DASOStrategy, EASGDAsyncStrategy, GossipStrategy

STATUS = 7
#: Strategy, options, and the steps (from 0) at which a rank freezes the other, if it does, and fails in an exchange.
DASO: dict[str, Any] = {"warmup": 0, "cooldown": 0, "global_every": 4, "wait": 4}
KINDS: dict[str, tuple[Any, dict[str, Any], int | None, int]] = {
    "daso, which waits": (DASOStrategy, DASO, 3, 4),
    "daso, which computes": (DASOStrategy, DASO, None, 4),
    "center": (EASGDAsyncStrategy, {"moving_rate": "auto", "tau": 2, "center": "thread"}, 4, 5),
    "gossip": (GossipStrategy, {}, 4, 5),
}


class Freezes(Net):
    """Freezes rank 0 at a step, if given, and fails at another; both on rank 1."""

    def __init__(self, freezes: int | None, fails: int) -> None:
        super().__init__()
        if freezes is None:
            self.large = torch.nn.Parameter(torch.zeros(8_000_000))  # an exchange takes a while
        self.freezes, self.fails = freezes, fails

    def on_train_start(self) -> None:
        self.processes: list[Any] = [None, None]
        dist.all_gather_object(self.processes, os.getpid())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == self.freezes:
            os.kill(self.processes[0], signal.SIGSTOP)
            _kill_after(self.processes[0], os.getpid())
        elif self.global_rank == 1 and batch_idx == self.fails:
            raise ValueError("a fault")
        return self.loss(batch)


def _kill_after(process: int, first: int) -> None:
    """Kill a process once another has ended."""
    if os.fork():
        return
    end, path = time.monotonic() + 60, Path(f"/proc/{first}/stat")
    with contextlib.suppress(OSError):
        while path.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < end:
            time.sleep(0.05)
    os.kill(process, signal.SIGKILL)
    os._exit(0)


def _ends(kind: str) -> None:
    chosen, options, freezes, fails = KINDS[kind]
    strategy = chosen(balance="off", timeout=60, **options)
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 1})
    try:
        trainer.fit(Freezes(freezes, fails), DataLoader(dataset(96), batch_size=4))
    except ValueError:
        ctypes.PyDLL(None).Py_Exit(STATUS)  # as at the end of a script; forked processes leave it out otherwise


@pytest.mark.long(after=1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_process_ends_with_its_own_status_whatever_is_under_way(kind: str) -> None:
    outcomes = attempt(_ends, 2, kind, nodes=[1, 1], timeout=80)
    assert outcomes[1].exitcode == STATUS, outcomes[1].trace
