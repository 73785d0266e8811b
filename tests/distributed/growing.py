"""Fits that other processes join while they run."""

import os
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from ranks import Outcome, attempt, free_port
from tasks import FAST
from test_survival import BATCH, Module, Numbered
from torch.utils.data import DataLoader

import lightning_hetero

LATE = "TESTS_LATE"  # set on processes that are started later, to their number, from 1
JOINS_AT = 5  # steps after which those that run wait for them


class WaitsForOthers(pl.Callback):
    """Slows ranks down until others have joined; rank 0 waits for these at a step. Before that nobody may join."""

    def __init__(self, how_many: int, timeout: float = 120.0) -> None:
        self.how_many, self.timeout, self.world = how_many, timeout, 0

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.world = min(self.world or trainer.world_size, trainer.world_size)
        newcomers: Any = trainer.strategy.recovery.newcomers  # type: ignore[attr-defined]
        if trainer.global_step < JOINS_AT:
            newcomers._most = lambda waiting: 0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        newcomers: Any = trainer.strategy.recovery.newcomers  # type: ignore[attr-defined]
        if trainer.global_step >= JOINS_AT:
            vars(newcomers).pop("_most", None)
        if trainer.world_size > self.world:
            return
        time.sleep(0.1)  # half a second is then a few steps
        if trainer.global_step != JOINS_AT or not trainer.is_global_zero:
            return
        until = time.monotonic() + self.timeout
        while newcomers._requests.waiting < self.how_many and time.monotonic() < until:
            time.sleep(0.02)
        request: Any = trainer.strategy.stop_request  # type: ignore[attr-defined]
        while self.how_many and not request.agreed.asked and time.monotonic() < until:
            time.sleep(0.02)  # until all have been asked to agree on a batch


class Record(NamedTuple):
    """Record of a fit, on one rank."""

    weights: torch.Tensor
    taken: dict[int, list[int]]  # samples, by step
    starts: list[tuple[int, int, int]]  # step, rank and world where training began, or began again
    begun: list[torch.Tensor]  # the weights there
    before: torch.Tensor | None  # this replica's own weights after the last step before that
    momenta: list[torch.Tensor | None]  # of its optimizer, there and before
    messages: list[str]


class Watches(pl.Callback):
    """Keeps the steps at which training begins, and begins again, with the weights there."""

    def __init__(self) -> None:
        self.starts: list[tuple[int, int, int]] = []
        self.begun: list[torch.Tensor] = []
        self.latest: torch.Tensor | None = None
        self.before: torch.Tensor | None = None
        self.momenta: list[torch.Tensor | None] = [None, None]
        self.now: torch.Tensor | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.starts.append((trainer.global_step, trainer.global_rank, trainer.world_size))
        self.begun.append(flat(pl_module))
        self.before = self.latest
        self.momenta = [momentum(trainer), self.now]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.latest = flat(pl_module)
        self.now = momentum(trainer)


def momentum(trainer: pl.Trainer) -> torch.Tensor | None:
    states = [state["momentum_buffer"].flatten().clone() for state in trainer.optimizers[0].state.values()]
    return torch.cat(states) if states else None


def flat(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in module.parameters()])


def fit(
    strategy: str,
    options: dict[str, Any],
    file: str | None,
    late: int,
    callbacks: Sequence[Callable[[], pl.Callback]] = (),
    module: Callable[[], pl.LightningModule] = Module,
    late_options: dict[str, Any] | None = None,
    epochs: int = 3,
    steps: int = -1,
) -> Record:
    """Train on this rank; a process that is started late waits until the job is there, and then begins as any other."""
    if os.environ.get(LATE):
        options = {**options, **(late_options or {})}
        until = time.monotonic() + 120
        while file is not None and not Path(file).exists() and time.monotonic() < until:
            time.sleep(0.02)
    made, watches = module(), Watches()
    chosen = getattr(lightning_hetero, strategy)(on_peer_loss="continue", timeout=60, join_file=file, **options)
    waits = [] if os.environ.get(LATE) else [WaitsForOthers(late)]
    trainer = pl.Trainer(
        strategy=chosen,
        callbacks=[watches, *waits, *(make() for make in callbacks)],
        **{**FAST, "max_epochs": epochs, "max_steps": steps, "enable_checkpointing": bool(callbacks)},
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(made, DataLoader(Numbered(), batch_size=BATCH, shuffle=True))
    messages = [str(one.message) for one in caught]
    return Record(
        flat(made), getattr(made, "taken", {}), watches.starts, watches.begun, watches.before, watches.momenta, messages
    )


def grow(first: int, late: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Outcome]:
    """Outcome of a function on ranks that start together, and on processes that start later, one by one."""
    ports = [str(free_port()) for _ in range(late)]

    def env_of(rank: int) -> dict[str, str]:
        if rank < first:
            return {"WORLD_SIZE": str(first), "LOCAL_WORLD_SIZE": str(first)}
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        return {**alone, "MASTER_PORT": ports[rank - first], LATE: str(1 + rank - first)}

    return attempt(function, first + late, *args, env_of=env_of, **kwargs)


def values(outcomes: Sequence[Outcome]) -> list[Record]:
    """Records of all ranks; fails if one has failed."""
    bad = [f"rank {rank} ({one.exitcode}):\n{one.trace[-3000:]}" for rank, one in enumerate(outcomes) if not one.value]
    assert not bad, "\n".join(bad)
    return [outcome.value for outcome in outcomes]
