"""Faults of ranks during a fit, and the records of the other ranks."""

import json
import os
import signal
import subprocess
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from ranks import Outcome, attempt
from tasks import FAST, EvaluatedNet, dataset, parameters
from torch.utils.data import DataLoader

import lightning_hetero as lh

GRACE = 2.0
#: Steps of all fits here: 8 in each of two epochs.
STEPS = 16
DIED = (
    "has ended without an error message: killed, out of memory, its program is over, or gloo has aborted it at a "
    "collective of your own with unequal sizes or types on the ranks"
)
SILENT = "has not been heard of for"
FAILED = "failed with ValueError: a fault"

_center = {"tau": 2, "moving_rate": "auto"}
STRATEGIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ddp": (lh.HeteroDDPStrategy, {}),
    "node": (lh.NodeAverageStrategy, {"every_n_steps": 3}),
    "daso": (lh.DASOStrategy, {"warmup": 2, "cooldown": 2}),
    "diloco": (lh.DiLoCoStrategy, {"tau": 3}),
    "diloco_async": (lh.DiLoCoAsyncStrategy, {"tau": 2}),
    "easgd": (lh.EASGDStrategy, _center),
    "easgd_overlap": (lh.EASGDOverlapStrategy, _center),
    "easgd_round_robin": (lh.EASGDRoundRobinStrategy, _center),
    "easgd_async": (lh.EASGDAsyncStrategy, _center),
    "easgd_hogwild": (lh.EASGDHogwildStrategy, _center),
    "noloco": (lh.NoLoCoStrategy, {"tau": 3}),
    "gossip": (lh.GossipStrategy, {}),
    "gossip_async": (lh.GossipAsyncStrategy, {}),
    "gossip_push_sum": (lh.GossipPushSumStrategy, {}),
}


class Fault(NamedTuple):
    """A fault.

    Attributes:
        rank: the one with the fault.
        step: when, in its optimizer steps.
        how: ``killed``, ``frozen`` (``thawed`` once the others have noticed; ``paused`` for a second),
            ``raises``, ``nan``, ``terminated``.
    """

    rank: int
    step: int
    how: str


class Record(NamedTuple):
    """Record of a fit that has ended well, on one rank.

    Attributes:
        weights: at the end.
        steps: optimizer steps at the end.
        losses: of ranks.
        messages: about lost ranks, with their times.
        number: its rank and the world at the end.
    """

    weights: torch.Tensor
    steps: int
    losses: list[Any]
    messages: list[tuple[float, str]]
    number: tuple[int, int]


class FaultyNet(EvaluatedNet):
    """A model with faults."""

    def __init__(self, folder: str, faults: list[Fault]) -> None:
        super().__init__()
        self.folder, self.faults, self.mine = folder, faults, -1
        self.thaws: int | None = None

    def on_fit_start(self) -> None:
        self.mine = self.global_rank  # it may get another number later
        write_mark(self.folder, f"rank-{self.mine}")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for fault in self.faults:
            if fault[:2] == (self.mine, self.trainer.global_step) and not read_mark(self.folder, f"fault-{self.mine}"):
                write_mark(self.folder, f"fault-{self.mine}")
                if fault.how == "nan":
                    return super().training_step(batch, batch_idx) * float("nan")
                self.fail(fault.how)
            if fault.how == "thawed" and fault.rank != self.mine and self.trainer.strategy.recovery.losses:
                wake(self.folder, fault.rank, signal.SIGCONT)
        return super().training_step(batch, batch_idx)

    def fail(self, how: str) -> None:
        if how == "raises":
            raise ValueError("a fault")
        if how == "paused":
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
        signals = {"killed": signal.SIGKILL, "terminated": signal.SIGTERM}
        os.kill(os.getpid(), signals.get(how, signal.SIGSTOP))


def write_mark(folder: str, name: str) -> None:
    """Write down the number of this process and the time, under a name."""
    Path(folder, f".{name}").write_text(json.dumps([os.getpid(), time.monotonic()]))
    Path(folder, f".{name}").rename(Path(folder, name))


def read_mark(folder: str, name: str) -> Any:
    """The number and the time that a process has written down under a name; ``None`` if there are none."""
    path = Path(folder, name)
    return json.loads(path.read_text()) if path.exists() else None


def wake(folder: str, rank: int, signum: int) -> None:
    """Send a signal to a rank that has frozen, unless it has ended."""
    with suppress(ProcessLookupError):
        os.kill(read_mark(folder, f"rank-{rank}")[0], signum)


def fit(
    folder: str,
    name: str,
    faults: list[Fault],
    options: dict[str, Any],
    samples: int = 96,
    kind: type[FaultyNet] = FaultyNet,
    **settings: Any,
) -> Record:
    """Train on one rank of a job, with the faults of that rank."""
    torch.manual_seed(0)
    strategy_class, own = STRATEGIES[name]
    strategy = strategy_class(**{"on_peer_loss": "continue", "timeout": 60, "grace": GRACE, **own, **options})
    model = kind(folder, faults)
    messages: list[tuple[float, str]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda text, *_, **__: messages.append((time.monotonic(), str(text)))  # type: ignore[assignment]
        try:
            trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 2, "limit_val_batches": 0, **settings})
            trainer.fit(model, DataLoader(dataset(samples), batch_size=4), DataLoader(dataset(24), batch_size=4))
        finally:
            write_mark(folder, f"ended-{model.mine}")
            _release(folder, faults, model.mine)
    messages = [(when, text) for when, text in messages if "Training goes on" in text]
    number = trainer.global_rank, trainer.world_size
    return Record(parameters(model), trainer.global_step, strategy.recovery.losses, messages, number)


def _release(folder: str, faults: list[Fault], me: int) -> None:
    """Once all others have ended, kill those that are frozen for ever."""
    faulty = [fault.rank for fault in faults]
    others = [rank for rank in range(len(list(Path(folder).glob("rank-*")))) if rank not in faulty]
    frozen = [fault.rank for fault in faults if fault.how == "frozen"]
    until = time.monotonic() + 20
    while frozen and not all(read_mark(folder, f"ended-{rank}") for rank in others) and time.monotonic() < until:
        time.sleep(0.02)
    for rank in frozen if me not in frozen else ():
        wake(folder, rank, signal.SIGKILL)


def fit_with_faults(
    folder: Path, name: str, faults: list[Fault], world: int = 3, run: Callable[..., Any] = fit, **options: Any
) -> list[Outcome]:
    """Outcome of a fit on all ranks, some with faults. Fails if a rank hangs or a process is left.

    Args:
        folder: to write to.
        name: of the strategy.
        faults: of the ranks.
        world: ranks; each is a node.
        run: what ranks do.
        options: of the strategy; ``settings``, of the Trainer; ``nodes``, ranks of each node.
    """
    nodes, settings = options.pop("nodes", [1] * world), options.pop("settings", {})
    outcomes = attempt(run, world, str(folder), name, faults, options, nodes=nodes, timeout=40, **settings)
    assert not any(outcome.late for outcome in outcomes), _traces(outcomes)
    for path in folder.glob("rank-*"):
        until = time.monotonic() + 10
        while (left := _group_lives(read_mark(str(folder), path.name)[0])) and time.monotonic() < until:
            time.sleep(0.05)
        assert not left, f"{path.name} has left processes"
    return outcomes


def _group_lives(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _traces(outcomes: list[Outcome]) -> str:
    return "\n".join(f"--- rank {i} (exit {o.exitcode})\n{o.trace[-6000:]}" for i, o in enumerate(outcomes))


def went_on(outcomes: list[Outcome], lost: dict[int, str], steps: int = STEPS) -> list[Record]:
    """Records of the survivors. Fails if they did not go on to the end, with equal weights, and name who was lost."""
    rest = [outcome.value for rank, outcome in enumerate(outcomes) if rank not in lost]
    assert all(rest), _traces(outcomes)
    for number, record in enumerate(rest):
        assert record.number == (number, len(rest))
        assert record.steps == steps
        assert torch.equal(record.weights, rest[0].weights)
        assert record.weights.isfinite().all()
        named = {rank: how for loss in record.losses for rank, how in loss.lost.items()}
        assert named.keys() == lost.keys()
        texts = " ".join(text for _, text in record.messages)
        for rank, why in lost.items():
            assert named[rank].startswith(why), named[rank]
            assert f"rank {rank} {why}" in texts
    return rest
