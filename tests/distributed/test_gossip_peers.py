"""Gossip of one replica, within nodes, with values that are not finite, and with late or dead peers."""

import gc
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Collection
from typing import Any

import lightning.pytorch as pl
import numpy as np
import psutil
import pytest
import torch
from center_tasks import Line, StartAt, fit
from leftovers import nothing_left_in_memory
from oracles import START, loader
from ranks import attempt, run
from test_gossip import Keep, Pause

from lightning_hetero import GossipAsyncStrategy, GossipPushSumStrategy, GossipStrategy, HeteroMonitor
from lightning_hetero.algorithms.topologies import hypercube, random_matching
from lightning_hetero.comm.agreement import gather
from lightning_hetero.errors import NotFiniteError

APART = [1, 1, 1]
FORMS: list[tuple[Any, dict[str, Any]]] = [
    (GossipStrategy, {}),
    (GossipStrategy, {"overlap": False}),
    (GossipStrategy, {"exchange": "push", "topology": "exponential"}),
    (GossipPushSumStrategy, {}),
    (GossipAsyncStrategy, {}),
]


# -- alone, and within nodes ---------------------------------------------------------------------------------


class Waits(pl.Callback):
    """Keeps the time in which a peer must answer."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        client = trainer.strategy.averager.client
        [client] = client if isinstance(client, list) else [client]  # one for each column
        self.seconds.append(client.transport.session.deadline)


def _alone() -> Any:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(handler)
    waits = Waits()
    common: dict[str, Any] = {"epochs": 1, "trainer": {"callbacks": [waits]}, "timeout": 27}
    results = [fit(kind, Line(), **common, **options) for kind, options in FORMS]
    results.append(fit(GossipAsyncStrategy, Line(), **common, deadline=0.5))
    return messages, results, waits.seconds


def test_one_replica_trains_alone_and_says_so() -> None:
    [(messages, results, seconds)] = run(_alone, 1)
    assert seconds == [*[3.0] * len(FORMS), 0.5]  # with timeout=27, in which all of an exchange must end
    for kind in (GossipStrategy, GossipPushSumStrategy, GossipAsyncStrategy):
        assert any(f"{kind.__name__}: there is one replica" in words for words in messages)
    for result in results:
        assert torch.equal(result["path"], results[0]["path"])
        assert torch.equal(result["final"], result["path"][-1])
        assert result["traffic"]["exchanges"] == 0
        assert abs(result["final"] - torch.tensor(START)).max() > 1e-3


def _nodes() -> Any:
    results = []
    for kind, options in FORMS:
        keep = Keep()
        callbacks = [StartAt([6.0, 6.0, -3.0]), keep, Pause(), HeteroMonitor(report=None)]
        given = {"replica": "node", **options}
        found = fit(kind, Line(lr=0.0), epochs=3, trainer={"callbacks": callbacks}, **given)
        results.append({**found, **keep.known})
    return results


@pytest.mark.long
def test_nodes_gossip_as_one() -> None:
    # Nodes of two ranks and of one, with 8 and 4 of 12 samples.
    results = run(_nodes, 3, nodes=[2, 1])
    for i, (kind, options) in enumerate(FORMS):
        goal = torch.tensor(START) + (1.5 if "exchange" in options else (8 * 6.0 - 4 * 3.0) / 12)
        for rank in range(3):
            assert torch.equal(results[rank][i]["path"], results[0 if rank < 2 else 2][i]["path"])
            assert abs(results[rank][i]["path"][-1] - goal).max() < 1e-6, (kind, options)
            assert np.shape(results[rank][i]["pairings"]) == (2, 2)


# -- not finite ----------------------------------------------------------------------------------------------


class Explodes(Line):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.global_rank == 1 and self.trainer.global_step == 5 else loss


def _exploding(kind: Any, options: dict[str, Any]) -> Any:
    warnings.filterwarnings("ignore", ".*was left out of the average.*It goes on with (the|its) values")
    return fit(kind, Explodes(), epochs=2, deadline=2.0, **options)


@pytest.mark.parametrize(("kind", "options"), [FORMS[0], FORMS[3]])
def test_an_error_names_the_replica_that_is_not_finite(kind: Any, options: dict[str, Any]) -> None:
    outcomes = attempt(_exploding, 3, kind, {**options, "timeout": 5}, nodes=APART)
    assert isinstance(outcomes[1].error, NotFiniteError), outcomes[1].trace
    assert outcomes[1].error.replicas == [1]
    for outcome in outcomes:
        assert outcome.error is not None, outcome.trace


def _skipping() -> Any:
    return [_exploding(kind, {**options, "on_nan": "skip"}) for kind, options in FORMS]


@pytest.mark.long
def test_a_replica_that_is_not_finite_begins_again() -> None:
    results = run(_skipping, 3, nodes=APART)
    for rank, of_rank in enumerate(results):
        for form, result, first in zip(FORMS, of_rank, results[0], strict=True):
            assert result["final"].isfinite().all(), form
            assert torch.equal(result["final"], first["final"]), form
            assert result["path"][-1].isfinite().all()
            assert rank == 1 or result["path"].isfinite().all(), form
            assert result["traffic"]["skipped"] == ([1] if rank == 1 else []), form


class Steady(Line):
    """All have moved by 1 after two steps, and learn no more; then replica 1, or some, are not finite."""

    def __init__(self, broken: Collection[int] = (1,)) -> None:
        super().__init__()
        self.broken = broken

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 2:
            self.w.data.add_(1.0)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        broken = self.global_rank in self.broken and self.trainer.global_step == 5
        return super().training_step(batch, batch_idx) * (float("nan") if broken else 0.0)


def _steady() -> Any:
    warnings.filterwarnings("ignore", ".*was left out of the average")
    options = {"epochs": 2, "deadline": 2.0, "on_nan": "skip", "trainer": {"callbacks": [Pause()]}}
    return [fit(kind, Steady(), **options, **form) for kind, form in FORMS]


def test_what_a_replica_that_is_not_finite_begins_with_does_not_spread() -> None:
    wanted = torch.tensor(START) + 1.0
    healthy, other = run(_steady, 2, nodes=[1, 1])
    for form, one, two in zip(FORMS, healthy, other, strict=True):
        assert (one["path"][3:] - wanted).abs().max() < 1e-12, form
        assert (one["final"] - wanted).abs().max() < 1e-12, form
        assert (two["final"] - wanted).abs().max() < 1e-12, form


def _two_broken() -> list[dict[str, Any]]:
    warnings.filterwarnings("ignore", ".*was left out of the average")
    results = []
    for overlap, met in ((True, 7), (False, 6)):  # the round in which those that are not finite begin again
        [peer] = hypercube(4, met, 0)[1]
        options: dict[str, Any] = {
            "topology": "hypercube",
            "overlap": overlap,
            "epochs": 2,
            "deadline": 10.0,
            "on_nan": "skip",
        }
        results.append(fit(GossipStrategy, Steady((1, peer)), **options))
    return results


def test_two_replicas_that_are_not_finite_and_meet_spread_nothing() -> None:
    """Neither has anything for the other: both begin with the first values, which do not count."""
    wanted, results = torch.tensor(START) + 1.0, run(_two_broken, 4, nodes=[1, 1, 1, 1])
    for case, met in enumerate((7, 6)):
        broken = 1, hypercube(4, met, 0)[1][0]
        for rank, of_rank in enumerate(results):
            assert (of_rank[case]["final"] - wanted).abs().max() < 1e-12
            assert rank in broken or (of_rank[case]["path"][3:] - wanted).abs().max() < 1e-12


# -- late and dead peers -------------------------------------------------------------------------------------


class Naps(pl.Callback):
    """The last rank is frozen for a while in the first epoch, from outside, so that all its threads are."""

    def __init__(self, seconds: float, batch: int = 4, pause: float = 0.0) -> None:
        self.seconds, self.batch, self.pause = seconds, batch, pause

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(self.pause)
        last = trainer.global_rank == trainer.world_size - 1
        if last and batch_idx == self.batch and trainer.current_epoch == 0:
            if os.fork() == 0:
                os.kill(os.getppid(), signal.SIGSTOP)
                time.sleep(self.seconds)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.wait()


def _napping(kind: Any, options: dict[str, Any]) -> Any:
    keep = Keep()
    callbacks = [StartAt([8.0, 0.0, -4.0]), Naps(1.5), Pause(), keep]
    found = fit(kind, Line(lr=0.0), epochs=2, deadline=0.4, trainer={"callbacks": callbacks}, **options)
    return {**found, **keep.known}


@pytest.mark.parametrize(("kind", "options"), [FORMS[0], (GossipPushSumStrategy, {"topology": "exponential"})])
def test_a_frozen_rank_is_missed_and_nothing_is_lost(kind: Any, options: dict[str, Any]) -> None:
    results = run(_napping, 3, kind, options, nodes=APART)
    goal = torch.tensor(START) + (6 * 8.0 - 4 * 4.0) / 12
    for result in results:
        assert abs(result["final"] - goal).max() < 1e-9
    assert any(result["missed"].get(2, 0) > 0 for result in results[:2])
    if kind is not GossipPushSumStrategy:
        table = np.array(results[0]["pairings"])
        assert np.array_equal(table, table.T)


class Watch(pl.Callback):
    """Keeps the weight after each step; and at the end the weight of this rank and of its waiting pushes."""

    def __init__(self) -> None:
        self.weights: list[float] = []
        self.held = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.weights.append(trainer.strategy.averager.status(0)["weight"])

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        averager = trainer.strategy.averager
        self.held = averager.status(0)["weight"] + sum(push.weight for push in averager.client[0].transport.waiting())


def _thawing(rates: list[float]) -> Any:
    results = []
    for rate in rates:
        watch = Watch()
        callbacks = [StartAt([8.0, 0.0]), Naps(2.5, 10, 0.03), watch]
        options: dict[str, Any] = {"balance": "off", "deadline": 0.4}
        found = fit(GossipPushSumStrategy, Line(lr=rate), loader(960), 1, {"callbacks": callbacks}, **options)
        results.append({**found, "weights": watch.weights, "held": watch.held})
    return results


def test_a_rank_that_thaws_has_kept_its_weight() -> None:
    # At this rate a step that is 8 times too large leads away from the goal, and one of 128 times far away.
    results = run(_thawing, 2, [0.03, 0.0], nodes=[1, 1])
    for moving, still in results:
        for found in (moving, still):
            assert len(found["weights"]) == 80
            assert min(found["weights"]) > 1 / 8  # not halved in every round in which the other did not come
        assert moving["path"].abs().max() < 9.5  # it begins at 9, and comes nearer to the goal
        assert moving["path"][-1].abs().max() < 4
        # Without steps the mean of the starts must be left at the end.
        assert abs(still["final"] - (torch.tensor(START) + 4.0)).max() < 1e-9
    for case in range(2):
        assert abs(sum(found[case]["held"] for found in results) - 2.0) < 1e-12


class LostMeanwhile(Line):
    """While two replicas exchange in the background of the first step, the second is late, and the third is killed."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == 0 and self.global_rank == 2:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.trainer.global_step == 0 and self.global_rank == 1:
            time.sleep(2.0)
        return super().training_step(batch, batch_idx)


def _lost_meanwhile(seed: int) -> dict[str, Any]:
    warnings.filterwarnings("ignore")  # that a rank was lost
    keep = Keep()
    options: dict[str, Any] = {"balance": "off", "deadline": 3.0, "on_peer_loss": "continue", "timeout": 60}
    callbacks = [StartAt([8.0, 0.0, -4.0]), keep]
    found = fit(GossipStrategy, LostMeanwhile(lr=0.0), epochs=1, trainer={"callbacks": callbacks}, seed=seed, **options)
    return {**found, **keep.known}


def test_both_of_a_pair_count_what_they_exchanged_before_a_third_was_lost() -> None:
    seed = next(seed for seed in range(99) if not random_matching(3, 1, seed)[2])  # the first two are a pair
    first, second, third = attempt(_lost_meanwhile, 3, seed, nodes=APART)
    assert third.exitcode == -signal.SIGKILL
    for outcome in (first, second):
        assert outcome.value is not None, outcome.trace
        assert (outcome.value["final"] - torch.tensor(START) - 4.0).abs().max() < 1e-12
        table = np.array(outcome.value["pairings"])
        assert np.array_equal(table, table.T)


class Downhill(Line):
    """Each step moves each replica by the learning rate, whatever the data."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.w.sum()


class LostWithMail(pl.Callback):
    """The last rank sleeps while the others send to it, and is killed; later all see their mean, and sum of weights."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, float]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        time.sleep(0.02)
        if trainer.global_rank == 2 and trainer.global_step == 4:
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in (25, 35):  # in the second epoch, which begins without the lost one
            averager: Any = trainer.strategy.averager  # type: ignore[attr-defined]
            mean = trainer.strategy.engine.consensus()[0].clone()  # type: ignore[attr-defined]
            mail = sum(push.weight for push in averager.client[0].transport.waiting())
            self.seen.append((mean, sum(gather(averager.weights[0] + mail, "all weight"))))


def _lost_with_mail() -> list[tuple[torch.Tensor, float]]:
    warnings.filterwarnings("ignore")  # that a rank was lost
    lost = LostWithMail()
    options: dict[str, Any] = {"balance": "off", "deadline": 0.4, "on_peer_loss": "continue", "timeout": 60}
    callbacks = [StartAt([8.0, 0.0, -4.0]), lost]
    fit(GossipPushSumStrategy, Downhill(lr=0.01), epochs=2, trainer={"callbacks": callbacks}, **options)
    return lost.seen


def test_push_sums_steps_keep_their_size_after_a_loss() -> None:
    first, second, third = attempt(_lost_with_mail, 3, nodes=APART)
    assert third.exitcode == -signal.SIGKILL
    for outcome in (first, second):
        assert outcome.value is not None, outcome.trace
        [(before, weight), (after, still)] = outcome.value
        assert weight == pytest.approx(2.0, abs=1e-12)
        assert still == pytest.approx(2.0, abs=1e-12)
        assert (after - before + 10 * 0.01).abs().max() < 1e-12


class Killed(pl.Callback):
    """Rank 1 is killed after a few steps; the others keep the time of each of their steps."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.times.append(time.monotonic())
        if trainer.global_rank == 1 and batch_idx == 4:
            os.kill(os.getpid(), signal.SIGKILL)


def _killed(kind: Any, options: dict[str, Any]) -> Any:
    killed = Killed()
    try:
        fit(kind, Line(), epochs=1, deadline=60.0, timeout=600, trainer={"callbacks": [killed]}, **options)
    except Exception:
        return killed.times
    return []


@pytest.mark.clock
@pytest.mark.parametrize(
    ("kind", "options"),
    [FORMS[0], FORMS[3]],
)
def test_a_dead_rank_is_not_waited_for(kind: Any, options: dict[str, Any]) -> None:
    outcomes = attempt(_killed, 3, kind, options, nodes=APART)
    for outcome in outcomes[::2]:  # of a pair, the first asks: rank 1 would have asked rank 2
        assert outcome.error is None
        assert len(outcome.value) == 20  # to the end of the epoch; then they must know
        steps = np.diff(outcome.value)
        assert sum(steps > 0.8) <= 1, steps.round(2)  # seconds; its port refuses, which is known at once
        assert steps.max() < 10


def _left() -> Any:
    for kind, options in (FORMS[0], FORMS[3], FORMS[4]):
        fit(kind, Line(), epochs=1, **options)
    time.sleep(0.5)
    gc.collect()
    maps = [m.path for m in psutil.Process().memory_maps() if "lightning-hetero-" in m.path]
    return [t.name for t in threading.enumerate() if t.name.startswith("hetero-gossip")] + maps


def test_nothing_is_left() -> None:
    with nothing_left_in_memory():
        for left in run(_left, 2, nodes=[1, 1]):
            assert not left
