"""Gossip converges to the weighted mean of the replicas' starts, by the matrices of its rounds, without collectives."""

import time
from functools import partial
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from center_tasks import SHARES as BY_WORLD
from center_tasks import Line, StartAt, fit
from oracles import START, loader, matrix
from ranks import run

from lightning_hetero import (
    GossipAsyncStrategy,
    GossipPushSumStrategy,
    GossipStrategy,
    HeteroMonitor,
    NodeAverageStrategy,
)
from lightning_hetero.algorithms.topologies import DIRECTED, MATCHINGS, Rule

WORLD, APART = 4, [1, 1, 1, 1]
STARTS, SHARES, EQUAL = [8.0, 0.0, -4.0, 1.0], [5.0, 1.0, 2.0, 4.0], [3.0, 3.0, 3.0, 3.0]  # shares of 12 samples
BY_WORLD.setdefault(WORLD, EQUAL)
Case = tuple[Any, dict[str, Any]]
PAIRS: list[Case] = [(GossipStrategy, {"topology": name}) for name in MATCHINGS]
SUMS: list[Case] = [(GossipPushSumStrategy, {"topology": name}) for name in DIRECTED]
ASYNC: Case = (GossipAsyncStrategy, {"epochs": 4})
WEIGHTED: list[Case] = [PAIRS[0], (GossipStrategy, {"overlap": False}), SUMS[0], ASYNC]
PLAIN: list[Case] = [
    (GossipStrategy, {"exchange": exchange, "topology": name})
    for exchange, name in [("push", "one_peer_exponential"), ("pull", "exponential"), ("push", "random")]
]  # fmt: skip


def weighted(starts: list[float], shares: list[float]) -> float:
    return float(np.dot(starts, shares) / sum(shares))


class Keep(pl.Callback):
    """Keeps the averager's counts and status at the end, after replicas have become equal."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        averager = trainer.strategy.averager
        self.known = {"pairings": averager.pairings, "met": dict(averager.met), "missed": dict(averager.missed)}
        self.known["status"] = averager.status(trainer.global_step)


class Pause(pl.Callback):
    """A short pause in each step, so that first-come partners meet."""

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.004)


class Drift(Line):
    """Linear loss: each replica moves at a speed of its own, whatever the data."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.w * (self.global_rank + 1)).sum()


def each(cases: list[Case], make: Any, callbacks: Any = (), **common: Any) -> list[dict[str, Any]]:
    """Results of a fit for each case."""
    results = []
    for kind, options in cases:
        keep = Keep()
        more = [StartAt(STARTS), keep, *([Pause()] if kind is GossipAsyncStrategy else []), *(c() for c in callbacks)]
        given = {"deadline": 10.0, **common, **options}
        results.append({**fit(kind, make(), trainer={"callbacks": more}, **given), **keep.known})
    return results


def still() -> Line:
    return Line(lr=0.0)


# -- consensus -----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_replicas_come_to_the_mean_of_where_they_began() -> None:
    assert abs(weighted(STARTS, SHARES) - weighted(STARTS, EQUAL)) > 1
    cases = [*((kind, {"balance": SHARES, **options}) for kind, options in WEIGHTED), PLAIN[0]]
    for results in run(each, WORLD, cases, still, balance=EQUAL, epochs=2, nodes=APART):
        for (kind, options), result in zip(cases, results, strict=True):
            goal = torch.tensor(START + weighted(STARTS, options.get("balance", EQUAL)))
            assert abs(result["path"][-1] - goal).max() < 1e-6, options  # before the exact average at the end
            assert abs(result["final"] - goal).max() < 1e-9, options
            assert result["traffic"]["exchanges"] > 0
            assert not result["missed"], options
            if kind in (GossipStrategy, GossipAsyncStrategy) and "exchange" not in options:
                table = np.array(result["pairings"])
                assert table.shape == (WORLD, WORLD)
                assert np.array_equal(table, table.T), options
                assert not table.diagonal().any()
                assert table.sum() > 40 if kind is GossipAsyncStrategy else table.sum() == WORLD * 40


# -- the matrices --------------------------------------------------------------------------------------------


class OneHot(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        with torch.no_grad():
            pl_module.w.zero_()[trainer.global_rank] = 1.0


def _one_hot(cases: list[Case]) -> list[torch.Tensor]:
    return [
        fit(kind, still(), trainer={"callbacks": [OneHot()], "max_steps": 5}, seed=3, **options)["path"]
        for kind, options in cases
    ]


def by_weight(rule: Rule, n: int, turn: int, shares: list[float]) -> np.ndarray:
    """The mixing matrix of weighted pairs."""
    mixing = np.eye(n)
    for i, to in enumerate(rule(n, turn, 3)):
        for j in to:
            mixing[i, [i, j]] = shares[i] / (shares[i] + shares[j]), shares[j] / (shares[i] + shares[j])
    return mixing


@pytest.mark.long
def test_the_matrices_that_are_executed() -> None:
    shares, forms = SHARES, [*PAIRS, *SUMS, *PLAIN]
    cases = [(kind, {**options, "balance": shares}) for kind, options in forms]
    paths = [np.stack(of_ranks) for of_ranks in zip(*run(_one_hot, WORLD, cases, nodes=APART), strict=True)]
    for (kind, options), path in zip(cases, paths, strict=True):
        exchange = "sum" if kind is GossipPushSumStrategy else options.get("exchange", "pairwise")
        rule = (MATCHINGS if exchange == "pairwise" else DIRECTED)[options["topology"]]
        s = np.array(shares) / np.mean(shares)
        x, w, z = np.diag(s), s.copy(), np.eye(WORLD)
        for turn in range(1, 6):
            mixing = matrix(rule, WORLD, turn, 3)
            if exchange == "pairwise":
                z = by_weight(rule, WORLD, turn, shares) @ z
            elif exchange == "sum":
                x, w = mixing @ x, mixing @ w
                z = x / w[:, None]
            else:
                z = (mixing.T if exchange == "pull" else mixing) @ z
            np.testing.assert_allclose(path[:, turn - 1, :WORLD], z, atol=1e-12, err_msg=f"{options} {turn}")
            assert not path[:, turn - 1, WORLD:].any()


# -- while they move -----------------------------------------------------------------------------------------

MOVING: list[Case] = [
    (GossipStrategy, {"wire": "bf16"}),
    (GossipStrategy, {"overlap": False}),
    (GossipPushSumStrategy, {}),
    (GossipPushSumStrategy, {"wire": "fp16"}),
    (GossipAsyncStrategy, {"wire": "bf16", "every_n_steps": 2}),
]


@pytest.mark.long
def test_the_weighted_mean_moves_as_steps_say() -> None:
    rate, steps = 0.01, 40
    results = run(each, WORLD, MOVING, Drift, balance=SHARES, epochs=2, nodes=APART)
    speed = weighted([1.0, 2.0, 3.0, 4.0], SHARES)
    s = torch.tensor(SHARES).double() / sum(SHARES)
    for i, (kind, options) in enumerate(MOVING):
        goal = torch.tensor(START) + weighted(STARTS, SHARES) - rate * steps * speed
        for rank in range(WORLD):
            assert abs(results[rank][i]["final"] - goal).max() < 1e-9, (kind, options)
            assert torch.equal(results[rank][i]["final"], results[0][i]["final"])
        if kind is GossipStrategy:  # nobody waits for anybody, but all take the same steps
            path = torch.stack([results[rank][i]["path"] for rank in range(WORLD)])
            mean = torch.tensordot(s, path, 1)
            moved = torch.tensor(START) + weighted(STARTS, SHARES)
            moved = moved - rate * speed * torch.arange(1, steps + 1).double()[:, None]
            assert abs(mean - moved).max() < 1e-9, options
            assert (path - mean).abs()[:, -1].max() < 0.2  # near
            assert (path - mean).abs()[:, 0].max() > 0.2


# -- no collective -------------------------------------------------------------------------------------------


class NoCollectives(pl.Callback):
    """Lets collectives fail from the second batch of an epoch to its last but one."""

    NAMES = ("all_reduce", "broadcast", "all_gather", "all_gather_object", "all_gather_into_tensor", "barrier",
             "gather", "gather_object", "reduce", "scatter", "reduce_scatter", "broadcast_object_list", "all_to_all",
             "monitored_barrier", "send", "recv", "isend", "irecv", "batch_isend_irecv")  # fmt: skip

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            broken = AssertionError("a collective in the middle of an epoch")
            self.patches = [mock.patch.object(dist, name, side_effect=broken) for name in self.NAMES]
            for patch in self.patches:
                patch.start()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, out: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == trainer.num_training_batches - 2:
            for patch in self.patches:
                patch.stop()


@pytest.mark.long
def test_no_collective_within_an_epoch() -> None:
    cases = [PAIRS[0], PLAIN[0], SUMS[0], ASYNC]
    for results in run(
        each, 3, cases, Line, [NoCollectives, partial(HeteroMonitor, report=None)], epochs=2, nodes=[1, 1, 1]
    ):
        assert all(result["traffic"]["exchanges"] > 0 for result in results)


def _meets_at_every_step() -> str:
    try:
        fit(NodeAverageStrategy, Line(), epochs=1, trainer={"callbacks": [NoCollectives()]}, every_n_steps=1)
    except Exception as error:
        return str(error)
    return ""


def test_the_control_has_collectives() -> None:
    for words in run(_meets_at_every_step, 2, nodes=[1, 1]):
        assert "in the middle of an epoch" in words


# -- nobody is waited for ------------------------------------------------------------------------------------


class Sleeper(pl.Callback):
    """Rank 2 sleeps within an epoch; all keep the times of their steps and their numbers of exchanges."""

    def __init__(self) -> None:
        self.slept, self.times, self.met = (0.0, 0.0), [], []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(0.01)
        if trainer.global_rank == 2 and batch_idx == 20:
            began = time.monotonic()
            time.sleep(2)
            self.slept = began, time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.times.append(time.monotonic())
        self.met.append(sum(trainer.strategy.averager.met[peer] for peer in (0, 1)))


def _sleeping() -> Any:
    sleeper = Sleeper()
    fit(GossipAsyncStrategy, Line(), loader(1200), 1, {"callbacks": [sleeper]}, deadline=10.0)
    return sleeper.slept, sleeper.times, sleeper.met


@pytest.mark.clock
def test_a_sleeper_holds_nobody_up() -> None:
    results = run(_sleeping, 3, nodes=[1, 1, 1])
    began, ended = results[2][0]
    for _, times, met in results[:2]:
        within = [count for at, count in zip(times, met, strict=True) if began < at < ended]
        assert len(within) >= 8
        assert within[-1] - within[0] >= 5
