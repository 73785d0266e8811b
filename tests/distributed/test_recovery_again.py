"""Recovery with replicas of several ranks and buffers, and recovery that fails or is requested again."""

import math
import os
import signal
import time
from contextlib import nullcontext
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from events import ROWS, kind
from lightning.pytorch.utilities.exceptions import SIGTERMException
from ranks import attempt
from tasks import FAST, Net, dataset
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import DASOStrategy, HeteroDDPStrategy, NodeAverageStrategy, StepContext, Traits
from lightning_hetero.algorithms.engine import Engine
from lightning_hetero.batching.loss import LossTracker
from lightning_hetero.callbacks.resumable import ResumableCheckpoint
from lightning_hetero.comm.all_reduce import ReplicaLinks
from lightning_hetero.errors import NotFiniteError
from lightning_hetero.strategies.job import JobStrategy
from lightning_hetero.strategies.signals import TERMINATED, StopRequest


class Killed(pl.Callback):
    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if (
            trainer.global_step == self.step
            and trainer.strategy.job.view.number == 0
            and trainer.global_rank == self.rank
        ):
            os.kill(os.getpid(), signal.SIGKILL)


class KilledByNumber(pl.Callback):
    """A rank is killed before a step, by the number that it had at first."""

    def __init__(self, number: int, step: int) -> None:
        self.number, self.step = number, step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        view = trainer.strategy.job.view
        if trainer.global_step == self.step and self.number == view.ids[view.rank]:
            os.kill(os.getpid(), signal.SIGKILL)


class Validated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)


def _one_fit_after_another() -> list[Any]:
    strategy = HeteroDDPStrategy(on_peer_loss="continue", timeout=60, balance="off")
    trainer, seen = pl.Trainer(strategy=strategy, max_steps=0, **{**FAST, "max_epochs": 99}), []
    data, held_out = DataLoader(dataset(400), batch_size=4), DataLoader(dataset(24), batch_size=4)
    for killed in (KilledByNumber(1, 3), KilledByNumber(2, 9)):
        trainer.callbacks[:] = [killed]
        trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + 6
        trainer.fit(Validated(), data, held_out)
        seen.append(([(list(loss.lost), loss.ranks) for loss in strategy.recovery.losses], trainer.global_step))
        trainer.validate(Validated(), held_out, verbose=False)
    return seen


def test_a_process_that_fits_again_survives_again() -> None:
    outcomes = attempt(_one_fit_after_another, 4)
    for outcome in (outcomes[0], outcomes[3]):
        assert outcome.error is None, outcome.trace
        assert outcome.value == [([([1], 3)], 6), ([([2], 2)], 12)]


class Buffered(Net):
    """Has buffers, which replicas exchange, too."""

    def __init__(self, nesterov: bool) -> None:
        super().__init__(lr=0.02)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()
        self.nesterov = nesterov

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, nesterov=self.nesterov)


def _buffered(name: str) -> list[torch.Tensor]:
    row = ROWS[name]
    options = {**row.options, **({"replica": "node"} if "replica" in signature(kind(name)).parameters else {})}
    options |= {"on_peer_loss": "continue", "timeout": 60}
    model, steps = Buffered(row.nesterov), 2 * row.period  # before the loss
    strategy = kind(name)(**options)
    trainer = pl.Trainer(strategy=strategy, callbacks=[Killed(3, steps)], max_steps=2 * steps + 2, **FAST)
    trainer.fit(model, DataLoader(dataset(400), batch_size=4))
    return [*model.parameters()]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if "gossip" in name else pytest.mark.long)
        for name in ROWS
        if name not in ("hetero_ddp", "hetero_auto")  # their replicas are not exchanged
    ],
)
def test_replicas_of_several_ranks_with_buffers_go_on(name: str) -> None:
    """All recover, and end with the same parameters."""
    outcomes = attempt(_buffered, 4, name, nodes=[2, 1, 1])
    assert outcomes[3].exitcode == -signal.SIGKILL
    first, *others = [outcome.value for outcome in outcomes[:3]]
    assert first is not None, outcomes[0].trace
    for other in others:
        assert other is not None, outcomes[1].trace + outcomes[2].trace
        assert all(torch.equal(own, its) for own, its in zip(first, other, strict=True))


class Broken(Net):
    """Its loss is NaN from a step on."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * (float("nan") if self.trainer.global_step >= 6 else 1.0)


def _broken() -> None:
    strategy = DASOStrategy(on_peer_loss="continue", warmup=0, cooldown=0, timeout=60)
    trainer = pl.Trainer(strategy=strategy, callbacks=[Killed(1, 3)], max_steps=10, **FAST)
    trainer.fit(Broken(), DataLoader(dataset(200), batch_size=6))


def test_the_replica_that_is_left_alone_sees_that_its_loss_is_not_finite() -> None:
    alone, _ = attempt(_broken, 2, nodes=[1, 1])
    assert isinstance(alone.error, NotFiniteError), alone.trace


class Reference(pl.Callback):
    """Keeps the weights that the replicas have in common, after each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        averager = trainer.strategy.averager
        self.seen = [*self.seen, (averager.commits, torch.cat([vector.flatten() for vector in averager.reference]))]


def _lost_twice(owner: Any, method: str, call: int) -> list[tuple[int, torch.Tensor]]:
    rank, usual, calls, reference = int(os.environ["RANK"]), getattr(owner, method), [], Reference()

    def called(self: Any) -> Any:
        calls.append(self)
        if rank == 2 and len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, called)
        strategy = DASOStrategy(
            on_peer_loss="continue", warmup=0, cooldown=0, global_every=3, wait=1, timeout=60, min_replicas=2
        )
        trainer = pl.Trainer(strategy=strategy, callbacks=[Killed(3, 5), reference], max_steps=6, **FAST)
        trainer.fit(Net(), DataLoader(dataset(400), batch_size=6))
    return reference.seen


@pytest.mark.parametrize(
    ("owner", "method", "call"), [(ReplicaLinks, "prepare", 2), (JobStrategy, "wrap_in_view", 1)], ids=["late", "early"]
)
def test_a_loss_while_ranks_recover_leaves_the_state_as_it_was(owner: Any, method: str, call: int) -> None:
    """The second rank is lost when averagers have begun again, or before."""
    first, second, *lost = attempt(_lost_twice, 4, owner, method, call, nodes=[1, 1, 1, 1])
    assert [outcome.exitcode for outcome in lost] == [-signal.SIGKILL] * 2
    assert first.value is not None, first.trace
    for (commits, reference), (its_commits, its_reference) in zip(first.value, second.value, strict=True):
        assert commits == its_commits
        assert torch.equal(reference, its_reference)
    (before, old), (after, new) = first.value[4:6]
    assert after == before > 0
    assert torch.equal(old, new)


def test_an_algorithm_acts_before_a_step_again_if_that_broke() -> None:
    called, broken = list[int](), iter([True, False])

    def before_step(context: StepContext) -> None:
        called.append(context.step)
        if next(broken):
            raise ConnectionError

    view = SimpleNamespace(count=2, ranks=((0,), (1,)), per_replica=list)
    accounting = SimpleNamespace(
        timer=SimpleNamespace(waiting=lambda exchange: nullcontext()),
        samples_per_rank=lambda: [1, 1],
        ended=[False] * 2,
    )
    engine: Any = Engine(view, SimpleNamespace(traffic=SimpleNamespace(skipped=[])), accounting, 8)  # type: ignore[arg-type]
    replica = SimpleNamespace(changed=dict[str, bool])
    engine.averager = SimpleNamespace(traits=Traits(), replica=replica, before_step=before_step)
    engine._metric = None
    with pytest.raises(ConnectionError):
        engine.before_window()
    engine.before_window()
    engine.before_window()  # within the window
    assert called == [0, 0]


def test_a_mean_loss_is_the_same_when_it_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = iter([True, False, False])

    def all_reduce(sums: torch.Tensor) -> None:
        if next(broken):
            raise ConnectionError
        sums.mul_(2)  # two ranks alike

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    losses = LossTracker()
    losses.take(torch.tensor(3.0), 4, step=0)
    losses.take(torch.tensor(1.0), 4, step=0)
    with pytest.raises(ConnectionError):
        losses.mean_over_ranks()
    assert losses.mean_over_ranks() == 2.0
    assert math.isnan(losses.mean_over_ranks())


class Quiet(Net):
    """Logs nothing, so that ranks need not meet."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)


class Slow(pl.Callback):
    """Makes the last rank slow: others reach a batch long before it."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        time.sleep(0.3 if os.environ["RANK"] == "2" else 0.1)


class Ended(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if os.environ["RANK"] == "1" and trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)


def _lost_at_an_agreed_batch(
    folder: str, owner: Any, method: str, callbacks: list[pl.Callback]
) -> tuple[int, list[int]]:
    """Train; rank 0 is killed where all act after the same batch; rank 1 has reached it, and rank 2 has not.

    Returns:
        The exit status, and the batches after which this rank has acted.
    """
    usual, batches = getattr(owner, method), list[int]()

    def called(self: Any, *args: Any) -> Any:
        batches.append(trainer.fit_loop.epoch_loop.total_batch_idx)
        if os.environ["RANK"] == "0":
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(self, *args)

    strategy = NodeAverageStrategy(every_n_steps=1000, on_peer_loss="continue", timeout=60, balance="off")
    settings = {
        **FAST,
        "max_epochs": -1,
        "max_steps": 24,
        "enable_checkpointing": True,
        "default_root_dir": folder,
        "callbacks": [Slow(), *callbacks],
    }
    trainer, code = pl.Trainer(strategy=strategy, **settings), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, called)
        try:
            trainer.fit(Quiet(), DataLoader(dataset(1000), batch_size=6))
        except SIGTERMException as stop:
            code = stop.code
    return code, batches


def test_all_stop_at_the_agreed_batch_though_a_rank_is_lost_there(tmp_path: Path) -> None:
    killed, *others = attempt(
        _lost_at_an_agreed_batch, 3, str(tmp_path), StopRequest, "_any_requested", [Ended()], nodes=[1, 1, 1]
    )
    assert killed.exitcode == -signal.SIGKILL
    (code, batches), other = (outcome.value for outcome in others)
    assert (code, batches) == other
    assert code == TERMINATED
    [batch] = batches
    assert 5 <= batch < 24


def test_all_save_at_the_agreed_batch_though_a_rank_is_lost_there(tmp_path: Path) -> None:
    saves = ResumableCheckpoint(tmp_path / "saved", every_n_seconds=0.3)
    killed, *others = attempt(
        _lost_at_an_agreed_batch, 3, str(tmp_path), ResumableCheckpoint, "_save", [saves], nodes=[1, 1, 1]
    )
    assert killed.exitcode == -signal.SIGKILL
    (code, batches), other = (outcome.value for outcome in others)
    assert (code, batches) == other
    assert code == 0
    assert batches[-1] == 23
    assert batches[0] < 23
    assert (tmp_path / "saved" / "step=24-complete.ckpt").exists()
