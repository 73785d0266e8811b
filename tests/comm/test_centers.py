"""One suite for all homes of a center, against NumPy and the differences that clients got."""

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from center_cases import (
    BAD,
    EXCHANGES,
    NARROW,
    PUSHES,
    ROUNDING,
    START,
    THREADS,
    broken,
    by_turns,
    crowd,
    drawn,
    losing,
    of_one,
    of_replicas,
    set_alike,
    threads,
    while_host_sleeps,
)
from homes import WORLD, Case, no_mpi, per_body

# -- the tests -----------------------------------------------------------------------------------------------

REPLICAS = [[0, 1], [2]]
CASES = {
    "by turns": Case(by_turns),
    "crowd": Case(crowd),
    "careful": Case(losing, (True,)),
    "careless": Case(losing, (False,)),
    "broken": Case(broken),
    "set": Case(set_alike),
    "asleep": Case(while_host_sleeps),
    "replicas": Case(of_replicas, (REPLICAS,), REPLICAS),
    "left": Case(threads),  # the last
}
ALL = ["shared", "hogwild", "thread", "bf16", "fp16", "mpi", "mpi-across"]
LOCKED = ["shared", *THREADS]
_LONG = {"hogwild", "bf16", "fp16", "mpi", "mpi-across"}
homes = pytest.mark.parametrize(  # a scope, so that all tests of a home run after each other
    "home", [pytest.param(home, marks=[pytest.mark.long] * (home in _LONG)) for home in ALL], scope="module"
)


@functools.cache
def _results(home: str) -> dict[str, list[Any]]:
    careless = home in ("shared", "hogwild", "mpi", "mpi-across")
    cases = {name: case for name, case in CASES.items() if name != "careless" or careless}
    return dict(zip(cases, per_body(home, list(cases.values())), strict=True))


def results(home: str, name: str) -> list[Any]:
    """Results of a case on every rank; all cases of a home run in one job."""
    if home.startswith("mpi") and no_mpi():
        pytest.skip(no_mpi())
    return _results(home)[name]


def doubles(values: list[torch.Tensor]) -> list[np.ndarray]:
    return [value.double().numpy() for value in values]


def unit(value: torch.Tensor, home: str) -> float:
    """Error that a number may have, relative to the values that it was computed from."""
    return 4 * torch.finfo(value.dtype).eps + 2 * ROUNDING.get(home, 0.0)


def assert_moved(
    before: list[torch.Tensor], differences: list[torch.Tensor], push: float, after: list[torch.Tensor]
) -> None:
    """The center has moved exactly by the difference that the client got, in every format."""
    for old, difference, new in zip(before, differences, after, strict=True):
        size = old.abs().maximum((push * difference).abs())
        assert (
            (new.double() - (old.double() + push * difference.double())).abs() <= torch.finfo(old.dtype).eps * size
        ).all()


@homes
def test_an_exchange_is_told_its_distance_and_pulls_the_center(home: str) -> None:
    ranks = results(home, "by turns")
    states = ranks[0][1]
    exchanges = [ranks[turn % WORLD][0][turn // WORLD] for turn in range(len(PUSHES))]
    assert all(torch.equal(a, b) for a, b in zip(states[0][0], START, strict=True))
    counts = [0] * WORLD
    for turn, ((exchange, differences), push) in enumerate(zip(exchanges, PUSHES, strict=True)):
        (before, _), (after, seen) = states[turn : turn + 2]
        counts[turn % WORLD] += 1
        assert (exchange.counts, seen) == (counts, counts)
        square, rounding = 0.0, ROUNDING.get(home, 0.0) if turn % WORLD else 0.0  # the host is at home
        known = states[turn - WORLD][0] if turn >= WORLD else START  # the center when this client last came
        for x, d, c, k in zip(doubles(drawn(turn)), differences, doubles(before), doubles(known), strict=True):
            truth = x - c
            size = 4 * torch.finfo(d.dtype).eps * (np.abs(x) + np.abs(c) + np.abs(k))
            off = np.abs(d.double().numpy() - truth)
            assert (off <= 1.1 * rounding * (np.abs(x - k) + np.abs(truth)) + size + rounding * 1e-4).all()
            square += float((truth**2).sum())
        assert exchange.square == pytest.approx(square, rel=1e-4 + 4 * ROUNDING.get(home, 0.0))
        assert_moved(before, differences, push, after)
        size = sum(v.numel() * (2 if home in NARROW else v.element_size()) for v in START)
        over = exchange.sent - (0 if turn % WORLD == 0 or home in ("shared", "hogwild") else size)
        assert 0 <= over <= (64 if home in THREADS else 0)


@homes
def test_a_crowd_of_clients_loses_nothing(home: str) -> None:
    ranks = results(home, "crowd")
    added = [sum(parts) for parts in zip(*(rank[0] for rank in ranks), strict=True)]
    values, counts = ranks[0][3]
    assert counts == [EXCHANGES] * WORLD
    for value, total in zip(values, added, strict=True):
        lost = float((value != total).double().mean())
        # Processes without a lock lose additions to the same number at the same moment: all of a small tensor,
        # and some of a large one. The next test measures the loss of processes that exchange more rarely.
        assert lost == 0 or (home == "hogwild" and (lost < 1 or value.numel() < 100))
    if home == "hogwild":  # without the lock exchanges are torn
        assert sum(rank[1] for rank in ranks) > 0
    if home not in LOCKED:
        return
    assert sorted(count for rank in ranks for count in rank[2]) == list(range(1, WORLD * EXCHANGES + 1))
    # An exchange as a whole is atomic: it sees a center that is the same number everywhere. Without the lock it is not.
    assert [rank[1] for rank in ranks] == [0] * WORLD


def lost(ranks: list[Any]) -> float:
    return 1 - ranks[0][1] / sum(added for added, _ in ranks)


@homes
def test_adds_are_not_lost(home: str) -> None:
    assert abs(lost(results(home, "careful"))) < (0.05 if home == "hogwild" else 1e-5)
    if home in ("shared", "mpi", "mpi-across"):  # the control: reading and writing without a lock loses additions
        assert lost(results(home, "careless")) > 0.05


@homes
def test_a_client_with_values_that_cannot_be_told_leaves_the_center_alone(home: str) -> None:
    ranks = results(home, "broken")
    for turn in range(WORLD * len(BAD)):
        rank, bad = turn % WORLD, BAD[turn // WORLD]
        (before, counts), _, (between, later), _, (after, _) = ranks[0][turn]
        _, first, _, (second, differences), _ = ranks[rank][turn]
        assert sum(later) == sum(counts) + 1
        if not math.isfinite(bad) or (home == "fp16" and rank > 0):
            assert not math.isfinite(first.square)
            assert all(torch.equal(a, b) for a, b in zip(before, between, strict=True)), (turn, rank, bad)
        else:
            assert math.isfinite(first.square)
        # The next exchange is correct again.
        assert math.isfinite(second.square)
        for x, d, c in zip(doubles(drawn(100 + turn)), differences, doubles(between), strict=True):
            around = 2 * (1 + np.abs(x) + np.abs(c) + turn)  # former values of this client and the center
            if home in NARROW and turn >= 2 * WORLD:
                around[-1] += 1e6
            assert (np.abs(d.double().numpy() - (x - c)) <= unit(d, home) * around).all(), (turn, rank, bad)
        assert_moved(between, differences, 0.5, after)


@homes
def test_what_is_set_is_what_clients_see(home: str) -> None:
    ranks = results(home, "set")
    values, counts = ranks[0][2]
    assert counts == [5, 6, 7]
    assert all(torch.equal(a, b) for a, b in zip(values, drawn(50), strict=True))
    assert max(sum(exchange.counts) for exchange, _, _ in ranks) == 21
    for rank, (_, differences, _) in enumerate(ranks):
        for x, d, c in zip(doubles(drawn(60 + rank)), differences, doubles(drawn(50)), strict=True):
            assert (np.abs(d.double().numpy() - (x - c)) <= unit(d, home) * (np.abs(x) + np.abs(c) + 4)).all()


@homes
def test_push_pull_go_on_while_the_training_thread_of_the_host_sleeps(home: str) -> None:
    host, *others = results(home, "asleep")
    assert host == 5 * len(others)


@homes
def test_all_ranks_of_a_replica_learn_the_same(home: str) -> None:
    leader, member, other = results(home, "replicas")
    for (exchange, differences), (exchange_there, differences_there) in zip(leader, member, strict=True):
        assert exchange == exchange_there
        assert all(torch.equal(a, b) for a, b in zip(differences, differences_there, strict=True))
    (counts, center), (set_counts, set_to) = leader[5:]
    assert (counts, set_counts) == ([5, 5], [3, 4])
    assert all(torch.equal(a, b) for a, b in zip(set_to, drawn(99), strict=True))
    for found in (member, other):
        assert [found[5][0], found[6][0]] == [counts, set_counts]
        assert all(torch.equal(a, b) for a, b in zip(found[5][1] + found[6][1], center + set_to, strict=True))
    if home == "hogwild":
        return
    for i, (start, value) in enumerate(zip(START, center, strict=True)):
        moved = sum(0.25 * found[step][1][i].double() for found in (leader, other) for step in range(5))
        size = start.abs() + sum(found[step][1][i].abs() for found in (leader, other) for step in range(5))
        assert ((value.double() - start - moved).abs() <= 10 * torch.finfo(value.dtype).eps * size).all()


@homes
def test_threads_of_closed_centers_have_ended(home: str) -> None:
    keeps = home in THREADS or home == "mpi-across"
    assert results(home, "left") == [(0, int(keeps)), (0, 0), (0, 0)]


@pytest.mark.parametrize("home", ["shared", "thread", "bf16"])
def test_a_job_of_one_rank(home: str) -> None:
    [[(values, counts)]] = per_body(home, [Case(of_one, (), [[0]])], world=1)
    assert counts == [1]
    for value, x, start in zip(values, drawn(0), START, strict=True):
        assert torch.allclose(value, (x + start) / 2, rtol=1e-6, atol=1e-6)
