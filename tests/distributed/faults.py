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
FAILED = "failed with ValueError: struck"

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


class Strike(NamedTuple):
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


class Seen(NamedTuple):
    """Record of a fit that has ended well, on one rank.

    Attributes:
        weights: at the end.
        steps: optimizer steps at the end.
        losses: of ranks.
        told: its messages about them, with their times.
        number: its rank and the world at the end.
    """

    weights: torch.Tensor
    steps: int
    losses: list[Any]
    told: list[tuple[float, str]]
    number: tuple[int, int]


class Struck(EvaluatedNet):
    """A model with faults."""

    def __init__(self, folder: str, strikes: list[Strike]) -> None:
        super().__init__()
        self.folder, self.strikes, self.mine = folder, strikes, -1
        self.thaws: int | None = None

    def on_fit_start(self) -> None:
        self.mine = self.global_rank  # it may get another number later
        note(self.folder, f"rank-{self.mine}")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for strike in self.strikes:
            if strike[:2] == (self.mine, self.trainer.global_step) and not noted(self.folder, f"struck-{self.mine}"):
                note(self.folder, f"struck-{self.mine}")
                if strike.how == "nan":
                    return super().training_step(batch, batch_idx) * float("nan")
                self.strike(strike.how)
            if strike.how == "thawed" and strike.rank != self.mine and self.trainer.strategy.recovery.losses:
                wake(self.folder, strike.rank, signal.SIGCONT)
        return super().training_step(batch, batch_idx)

    def strike(self, how: str) -> None:
        if how == "raises":
            raise ValueError("struck")
        if how == "paused":
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
        signals = {"killed": signal.SIGKILL, "terminated": signal.SIGTERM}
        os.kill(os.getpid(), signals.get(how, signal.SIGSTOP))


def note(folder: str, name: str) -> None:
    """Write down the number of this process and the time, under a name."""
    Path(folder, f".{name}").write_text(json.dumps([os.getpid(), time.monotonic()]))
    Path(folder, f".{name}").rename(Path(folder, name))


def noted(folder: str, name: str) -> Any:
    """The number and the time that a process has written down under a name; ``None`` if there are none."""
    path = Path(folder, name)
    return json.loads(path.read_text()) if path.exists() else None


def wake(folder: str, rank: int, signum: int) -> None:
    """Send a signal to a rank that has frozen, unless it has ended."""
    with suppress(ProcessLookupError):
        os.kill(noted(folder, f"rank-{rank}")[0], signum)


def fit(
    folder: str,
    name: str,
    strikes: list[Strike],
    options: dict[str, Any],
    samples: int = 96,
    kind: type[Struck] = Struck,
    **settings: Any,
) -> Seen:
    """Train on one rank of a job, with the faults that strike it."""
    torch.manual_seed(0)
    strategy_class, own = STRATEGIES[name]
    strategy = strategy_class(**{"on_peer_loss": "continue", "timeout": 60, "grace": GRACE, **own, **options})
    model = kind(folder, strikes)
    told: list[tuple[float, str]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda text, *_, **__: told.append((time.monotonic(), str(text)))  # type: ignore[assignment]
        try:
            trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 2, "limit_val_batches": 0, **settings})
            trainer.fit(model, DataLoader(dataset(samples), batch_size=4), DataLoader(dataset(24), batch_size=4))
        finally:
            note(folder, f"ended-{model.mine}")
            _release(folder, strikes, model.mine)
    told = [(when, text) for when, text in told if "Training goes on" in text]
    number = trainer.global_rank, trainer.world_size
    return Seen(parameters(model), trainer.global_step, strategy.recovery.losses, told, number)


def _release(folder: str, strikes: list[Strike], me: int) -> None:
    """Once all others have ended, kill those that are frozen for ever."""
    struck = [strike.rank for strike in strikes]
    others = [rank for rank in range(len(list(Path(folder).glob("rank-*")))) if rank not in struck]
    frozen = [strike.rank for strike in strikes if strike.how == "frozen"]
    until = time.monotonic() + 20
    while frozen and not all(noted(folder, f"ended-{rank}") for rank in others) and time.monotonic() < until:
        time.sleep(0.02)
    for rank in frozen if me not in frozen else ():
        wake(folder, rank, signal.SIGKILL)


def strike(
    folder: Path, name: str, strikes: list[Strike], world: int = 3, run: Callable[..., Any] = fit, **options: Any
) -> list[Outcome]:
    """Outcome of a fit on all ranks, some with faults. Fails if a rank hangs or a process is left.

    Args:
        folder: to write to.
        name: of the strategy.
        strikes: the faults.
        world: ranks; each is a node.
        run: what ranks do.
        options: of the strategy; ``settings``, of the Trainer; ``nodes``, ranks of each node.
    """
    nodes, settings = options.pop("nodes", [1] * world), options.pop("settings", {})
    outcomes = attempt(run, world, str(folder), name, strikes, options, nodes=nodes, timeout=40, **settings)
    assert not any(outcome.late for outcome in outcomes), _traces(outcomes)
    for path in folder.glob("rank-*"):
        until = time.monotonic() + 10
        while (left := _group_lives(noted(str(folder), path.name)[0])) and time.monotonic() < until:
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


def went_on(outcomes: list[Outcome], lost: dict[int, str], steps: int = STEPS) -> list[Seen]:
    """Records of the survivors. Fails if they did not go on to the end, with equal weights, and name who was lost."""
    rest = [outcome.value for rank, outcome in enumerate(outcomes) if rank not in lost]
    assert all(rest), _traces(outcomes)
    for number, seen in enumerate(rest):
        assert seen.number == (number, len(rest))
        assert seen.steps == steps
        assert torch.equal(seen.weights, rest[0].weights)
        assert seen.weights.isfinite().all()
        named = {rank: how for loss in seen.losses for rank, how in loss.lost.items()}
        assert named.keys() == lost.keys()
        said = " ".join(text for _, text in seen.told)
        for rank, why in lost.items():
            assert named[rank].startswith(why), named[rank]
            assert f"rank {rank} {why}" in said
    return rest
