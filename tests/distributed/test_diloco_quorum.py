"""`hetero_diloco_async` with a quorum: synchronous if it is all replicas, and late parts in the next outer step."""

import signal
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from center_tasks import Line, fit
from oracles import LR, MOMENTUM, SAMPLES, START, data, order, split
from ranks import attempt, run
from saved import consensus
from tasks import Killed, Save
from test_streaming import Pieces
from torch import nn

from lightning_hetero import DiLoCoAsyncStrategy, DiLoCoStrategy, HeteroMonitor, NodeAverageStrategy
from lightning_hetero.callbacks import ResumableCheckpoint
from lightning_hetero.comm.centers.rounds import Quorum, RoundClock
from lightning_hetero.errors import CheckpointError, ConfigurationError

SHARES, BATCH, TAU = [3.0, 1.0, 2.0, 2.0], 16, 3  # of 16 samples 6, 2, 4 and 4
ALL: dict[str, Any] = {"quorum": 4, "patience": 0.0}
LATE = 3  # the replica that comes when the round of the others has closed


def trained(kind: Any, **options: Any) -> Any:
    module = Pieces() if options.get("fragments") else Line(momentum=MOMENTUM)
    found = fit(kind, module, epochs=2, **{"balance": SHARES, "global_batch_size": BATCH, **options})
    return found["path"].numpy(), found["final"].numpy()


@pytest.mark.parametrize("quorum", [{"quorum": 4, "patience": 0.0}, {"quorum": 1, "patience": 1e9}], ids=str)
@pytest.mark.parametrize("options", [{"tau": 4}, {"tau": 5, "fragments": 3, "outer_lr": 0.5, "outer_momentum": 0.6}])
def test_a_quorum_of_all_is_synchronous(options: dict[str, Any], quorum: dict[str, Any]) -> None:
    ours = run(trained, 4, DiLoCoAsyncStrategy, **quorum, **options, nodes=[1, 1, 1, 1])
    theirs = run(trained, 4, DiLoCoStrategy, **options, nodes=[1, 1, 1, 1])
    for (path, end), (true_path, true_end) in zip(ours, theirs, strict=True):
        assert abs(path - true_path).max() < 1e-10
        assert abs(end - true_end).max() < 1e-10


class Normed(pl.LightningModule):
    """A linear model of normalised data, which has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.line = nn.BatchNorm1d(8).double(), nn.Linear(8, 1).double()
        nn.init.zeros_(self.line.weight)
        nn.init.zeros_(self.line.bias)
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.line(self.norm(batch[0])).squeeze(1) - batch[1]).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(torch.cat([value.clone() for value in (self.norm.running_mean, self.norm.running_var)]))  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)


def statistics(kind: Any, **options: Any) -> Any:
    module = Normed()
    fit(kind, module, epochs=1, tau=TAU, balance=SHARES, global_batch_size=BATCH, **options)
    return torch.stack(module.seen)[:-1].numpy()  # of the last batch other replicas may get what is left over


def test_a_quorum_of_all_gives_buffers_their_mean() -> None:
    ours = run(statistics, 4, DiLoCoAsyncStrategy, **ALL, nodes=[1, 1, 1, 1])
    theirs = run(statistics, 4, DiLoCoStrategy, nodes=[1, 1, 1, 1])
    for seen, truth in zip(ours, theirs, strict=True):
        assert abs(seen - truth).max() < 1e-10


class Late(pl.Callback):
    """The last replica visits the center after the answer to the first one, and before the first one's next visit."""

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        averager: Any = trainer.strategy.averager  # type: ignore[attr-defined]
        visit, rank, store = averager._visit, trainer.global_rank, dist.distributed_c10d._get_default_store()
        begins = trainer.global_step

        def visited(context: Any) -> None:
            if rank == LATE:
                store.get(f"0 after {context.step}")
            if rank == 0 and context.step - TAU > begins:
                store.get(f"{LATE} after {context.step - TAU}")
            visit(context)
            store.set(f"{rank} after {context.step}", "")

        averager._visit = visited


def late(save: Path | None = None, **options: Any) -> Any:
    saves, monitor = [] if save is None else [Save(str(save), 7, False)], HeteroMonitor(report=None)
    callbacks, module = [Late(), monitor, *saves], Line(momentum=options.pop("momentum", MOMENTUM))
    given = {"trainer": {"callbacks": callbacks}, "balance": SHARES, "global_batch_size": BATCH, **options}
    found = fit(DiLoCoAsyncStrategy, module, epochs=2, tau=TAU, quorum=3, patience=0.0, **given)
    return found["path"].numpy(), found["final"].numpy(), monitor.exchanges[-1].status


def by_hand(lr: float, mu: float, mutant: str = "") -> Any:
    """Rounds of three replicas, with the fourth one late by a round: paths of the replicas, and final weights."""
    x, y = data()
    weights = np.array(split(BATCH, SHARES)) / BATCH
    center, m, total = START.copy(), np.zeros(8), np.zeros(8)
    w, v, begun = np.tile(START, (4, 1)), np.zeros((4, 8)), np.tile(START, (4, 1))
    path = np.zeros((30, 4, 8))
    for step in range(30):
        epoch, batch = divmod(step, 15)
        rows = order(epoch, SAMPLES)[BATCH * batch : BATCH * (batch + 1)]
        for i, part in enumerate(np.split(rows, np.cumsum(split(len(rows), SHARES))[:-1])):
            v[i] = MOMENTUM * v[i] + 2 / len(part) * x[part].T @ (x[part] @ w[i] - y[part])
            w[i] = w[i] - LR * v[i]
        if (step + 1) % TAU == 0:
            for i in range(LATE):
                total += weights[i] * (w[i] - begun[i])
            m = mu * m + total
            center, total = center + lr * (total + mu * m), np.zeros(8)
            total = np.zeros(8) if mutant == "late ones are lost" else weights[LATE] * (w[LATE] - begun[LATE])
            w[:], begun[:] = center, center
        path[step] = w
    return path, center + (0 if mutant == "waiting ones are forgotten" else total) + weights @ (w - begun)


@pytest.mark.parametrize("options", [{}, {"outer_lr": 1.0, "outer_momentum": 0.0}], ids=str)
def test_a_late_replica_takes_part_in_the_next_outer_step(options: dict[str, float]) -> None:
    settings = options.get("outer_lr", 0.7), options.get("outer_momentum", 0.9)
    truth, final = by_hand(*settings)
    for i, (path, end, status) in enumerate(run(late, 4, nodes=[1, 1, 1, 1], **options)):
        assert abs(path - truth[:, i]).max() < 1e-10
        assert abs(end - final).max() < 1e-10
        counts = [status[f"late/replica{j}"] for j in range(4)]
        assert counts == [0, 0, 0, 10 if i == LATE else 9]  # of ten rounds; at its last visit nobody comes after it
    assert abs(by_hand(*settings, "late ones are lost")[0] - truth).max() > 1e-4
    assert abs(by_hand(*settings, "waiting ones are forgotten")[1] - final).max() > 1e-4


def test_resumed_with_a_part_that_waits_for_its_outer_step(tmp_path: Path) -> None:
    undisturbed = run(late, 4, save=tmp_path / "a", nodes=[1, 1, 1, 1])
    resumed = run(late, 4, resume=tmp_path / "a", nodes=[1, 1, 1, 1])
    for (path, end, status), (later_path, later_end, later_status) in zip(undisturbed, resumed, strict=True):
        assert abs(path[7:] - later_path).max() < 1e-12  # three replicas come to a round in any order
        assert abs(end - later_end).max() < 1e-12
        assert [status[f"late/replica{i}"] for i in range(4)] == [later_status[f"late/replica{i}"] for i in range(4)]


def complete(folder: Path, finished: bool) -> Any:
    class AtStart(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(folder / "start")

    again = ResumableCheckpoint(folder, every_n_steps=99)
    callbacks, module = [Late(), again, *([AtStart()] if finished else [])], Line(momentum=MOMENTUM)
    given = {"trainer": {"callbacks": callbacks, "enable_checkpointing": True}, "balance": SHARES}
    epochs = 3 if finished else 2
    return fit(
        DiLoCoAsyncStrategy, module, epochs=epochs, tau=TAU, quorum=3, patience=0.0, global_batch_size=BATCH, **given
    )["final"].double()


def test_a_part_that_waits_at_the_end_of_a_run_counts_once_in_one_that_goes_on(tmp_path: Path) -> None:
    final = run(complete, 4, tmp_path, False, nodes=[1, 1, 1, 1])[0]
    run(complete, 4, tmp_path, True, nodes=[1, 1, 1, 1])
    assert torch.equal(consensus(tmp_path / "step=30-complete.ckpt"), final)
    assert (consensus(tmp_path / "start") - final).abs().max() < 1e-12


def stopped(kind: Any, path: Path, resume: bool = False, **options: Any) -> Any:
    """Fit that saves a checkpoint, or fit that resumes from one."""
    callbacks = [] if resume else [Save(str(path), 7, False)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "all begin from the weights of a checkpoint"
        given: dict[str, Any] = {"resume": str(path) if resume else None, "balance": "off", "timeout": 60, **options}
        path = fit(kind, Line(), epochs=1, trainer={"callbacks": callbacks}, **given)["path"].numpy()
        return path[:-1]  # of the last batch other replicas may get what is left over


@pytest.mark.parametrize("tau", [2, 5])
def test_resumed_with_another_tau(tmp_path: Path, tau: int) -> None:
    paths = []
    for kind, options in ((DiLoCoAsyncStrategy, ALL), (DiLoCoStrategy, {})):
        run(stopped, 4, kind, tmp_path / kind.__name__, tau=3, **options, nodes=[1, 1, 1, 1])
        paths.append(run(stopped, 4, kind, tmp_path / kind.__name__, True, tau=tau, **options, nodes=[1, 1, 1, 1]))
    for ours, theirs in zip(*paths, strict=True):
        assert abs(ours - theirs).max() < 1e-10


def test_begins_from_the_weights_of_another_strategy(tmp_path: Path) -> None:
    run(stopped, 4, NodeAverageStrategy, tmp_path / "a", nodes=[1, 1, 1, 1])
    ours = run(stopped, 4, DiLoCoAsyncStrategy, tmp_path / "a", True, tau=3, **ALL, nodes=[1, 1, 1, 1])
    theirs = run(stopped, 4, DiLoCoStrategy, tmp_path / "a", True, tau=3, nodes=[1, 1, 1, 1])
    for path, true_path in zip(ours, theirs, strict=True):
        assert abs(path - true_path).max() < 1e-10


def test_a_part_that_waits_counts_once_for_fewer_replicas(tmp_path: Path) -> None:
    plain = {"outer_lr": 1.0, "outer_momentum": 0.0}  # an outer step takes the mean, and remembers nothing
    run(late, 4, save=tmp_path / "a", momentum=0.0, **plain, nodes=[1, 1, 1, 1])
    options = {"tau": TAU, **plain}
    ours = run(stopped, 3, DiLoCoAsyncStrategy, tmp_path / "a", True, quorum=3, **options, nodes=[1, 1, 1])
    theirs = run(stopped, 3, DiLoCoStrategy, tmp_path / "a", True, **options, nodes=[1, 1, 1])
    for path, true_path in zip(ours, theirs, strict=True):
        assert abs(path - true_path).max() < 1e-10


def test_a_checkpoint_of_another_rule_is_refused(tmp_path: Path) -> None:
    run(stopped, 2, DiLoCoAsyncStrategy, tmp_path / "a", tau=3, nodes=[1, 1])
    for failure in attempt(stopped, 2, DiLoCoAsyncStrategy, tmp_path / "a", True, tau=3, quorum=2, nodes=[1, 1]):
        assert isinstance(failure.error, CheckpointError)
        assert "saved with momentum_rule='delayed_nesterov', here it is a quorum" in str(failure.error)


def lost(step: int) -> Any:
    options = {"tau": TAU, "quorum": 3, "patience": 0.0, "balance": "off", "on_peer_loss": "continue"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a rank was lost
        callbacks = [Killed(2, step)]
        return fit(DiLoCoAsyncStrategy, Line(), epochs=2, trainer={"callbacks": callbacks}, **options)["final"].numpy()


@pytest.mark.parametrize("step", [1, 7])
def test_a_quorum_of_all_goes_on_without_one_that_is_lost(step: int) -> None:
    first, second, third = attempt(lost, 3, step, nodes=[1, 1, 1])
    assert third.exitcode == -signal.SIGKILL
    assert first.value is not None, first.trace
    assert np.array_equal(first.value, second.value), second.trace


def test_a_round_waits_for_a_quorum_and_then_with_patience() -> None:
    now = 0.0
    clock = RoundClock(Quorum(2, 0.5), 4, lambda: now)
    assert clock.seconds_left(0) is clock.seconds_left(1) is None
    now = 10.0
    assert clock.seconds_left(2) == 5.0  # half of the 10 s that it took to come to a quorum
    now = 12.0
    assert clock.seconds_left(3) == 3.0
    assert clock.seconds_left(4) == 0.0  # all are here
    now = 16.0
    assert clock.seconds_left(3) == 0.0
    clock.begin()
    now = 20.0
    assert clock.seconds_left(2) == 3.5  # half of the median of 10 s and 4 s


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quorum": 0}, "quorum=0 must be a whole number of at least 1"),
        ({"quorum": 1.5}, "quorum=1.5 must be"),
        ({"quorum": 2, "patience": -1.0}, "patience=-1.0"),
        ({"patience": float("nan")}, "patience=nan"),
        ({"patience": 0.5}, "patience=0.5 without a quorum"),
        ({"quorum": 2, "momentum_rule": "heloco"}, "momentum_rule='heloco' with quorum=2"),
        ({"quorum": 2, "follow_speed": True}, "follow_speed=True with quorum=2"),
        ({"quorum": 2, "center": "shared_memory"}, "center='shared_memory' with quorum=2"),
    ],
)
def test_what_does_not_go_with_a_quorum(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DiLoCoAsyncStrategy(**options)


def test_a_quorum_of_more_replicas_than_there_are() -> None:
    for failure in attempt(trained, 2, DiLoCoAsyncStrategy, quorum=3, balance="off", nodes=[1, 1]):
        assert "quorum=3: there are 2 replicas. Use at most as many." in str(failure)
