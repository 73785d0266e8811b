"""One suite for all homes of a center, against NumPy and what visitors themselves were told."""

import functools
import math
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from homes import LIMIT, WORLD, Case, no_mpi, per_body

from lightning_hetero.comm.centers.center import Center, CenterLayout, PushPull
from lightning_hetero.comm.centers.client import CenterClient
from lightning_hetero.comm.groups import Groups
from lightning_hetero.comm.links import ReplicaLinks

SHAPES = [(70_001, torch.float32), (7, torch.float64), (1, torch.float32)]  # more than a chunk; odd; one
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # half a place
NARROW = list(ROUNDING)
THREADS = ["thread", *NARROW]
State = tuple[list[torch.Tensor], list[int]]


def filled(*numbers: float) -> list[torch.Tensor]:
    return [torch.full((length,), number, dtype=d) for number, (length, d) in zip(numbers, SHAPES, strict=True)]


def drawn(seed: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=g, dtype=torch.float64).to(dtype) for length, dtype in SHAPES]


def copies(values: list[torch.Tensor]) -> list[torch.Tensor]:
    return [value.clone() for value in values]


def seen_by_host(center: Center, layout: CenterLayout) -> State | None:
    """The center, while nobody visits."""
    dist.barrier()
    state = center.read() if layout.rank == layout.host else None
    dist.barrier()
    return state


# -- one visitor at a time -----------------------------------------------------------------------------------

START, PUSHES = filled(0.25, -3.0, 1000.0), [0.5, 0.125, 1.0, 0.0, 0.5, 0.5]


def by_turns(
    center: Center, layout: CenterLayout
) -> tuple[list[tuple[PushPull, list[torch.Tensor]]], list[State | None]]:
    center.open(START)
    visits, states = [], [seen_by_host(center, layout)]
    for turn, push in enumerate(PUSHES):
        if turn % layout.world == layout.rank:
            own = drawn(turn)
            visits.append((center.push_pull(own, push), own))
        states.append(seen_by_host(center, layout))
    return visits, states


# -- many at once --------------------------------------------------------------------------------------------

VISITS = 60


def crowd(center: Center, layout: CenterLayout) -> tuple[list[torch.Tensor], int, list[int], State | None]:
    """Whole numbers and ``push = 1``, so that all sums are exact: what this rank has added, torn visits, counts."""
    center.open(filled(0, 0, 0))
    added, torn, counts = [value.double() for value in filled(0, 0, 0)], 0, []
    dist.barrier()
    for step in range(VISITS):
        own = filled(*[float((7 * layout.rank + 5 * step) % 41 - 20)] * 3)
        counts.append(sum(center.push_pull(own, 1.0).counts))
        torn += any(bool((value != own[0][0]).any()) for value in own)
        for total, difference in zip(added, own, strict=True):
            total.add_(difference)
    return added, torn, counts, seen_by_host(center, layout)


def losing(center: Center, layout: CenterLayout, careful: bool) -> tuple[float, float | None]:
    """Slowly towards 1 from 0: what this rank has added to every number; where they are."""
    zero = torch.zeros(4096)
    center.open([zero])
    added, push = torch.zeros(4096, dtype=torch.float64), 1e-3
    dist.barrier()
    for _ in range(100):
        own = torch.ones(4096)
        if careful:
            time.sleep(2e-4)
            center.push_pull([own], push)
        else:
            read_and_write(center, own, push)
        added += push * own.double()
    state = seen_by_host(center, layout)
    return float(added.mean()), None if state is None else float(state[0][0].double().mean())


def read_and_write(center: Center, own: torch.Tensor, push: float) -> None:
    """The control: get the center, work, put it."""
    if not hasattr(center, "_window"):
        (now,), _ = center.read()
        own.sub_(now)
        time.sleep(2e-4)
        center._values[0].copy_(now.add_(own, alpha=push))
        return
    from mpi4py import MPI

    now, host = torch.empty_like(own), center.layout.host
    where = (center._starts[1], now.numel(), MPI.FLOAT)
    center._window.Get([now.numpy(), MPI.FLOAT], host, where)
    center._window.Flush(host)
    own.sub_(now)
    time.sleep(2e-4)
    now.add_(own, alpha=push)
    center._window.Put([now.numpy(), MPI.FLOAT], host, where)
    center._window.Flush(host)


# -- values that are not finite ------------------------------------------------------------------------------

BAD = [math.nan, math.inf, 1e6]  # the last one on an fp16 line only


def broken(
    center: Center, layout: CenterLayout
) -> list[tuple[State | None, PushPull | None, State | None, Any, State | None]]:
    """Another rank moves the center; then this rank visits with a bad number, and again with good ones."""
    center.open(filled(0, 0, 0))
    found = []
    for turn in range(layout.world * len(BAD)):
        rank, bad = turn % layout.world, BAD[turn // layout.world]
        if (rank + 1) % layout.world == layout.rank:
            center.push_pull(filled(*[1.0 + turn] * 3), 0.5)
        before, first, second = seen_by_host(center, layout), None, None
        if rank == layout.rank:
            own = drawn(turn)
            own[0][-1] = 1e3 if rank == layout.host and bad == 1e6 else bad  # the host has no line
            first = center.push_pull(own, 0.5)
        between = seen_by_host(center, layout)
        if rank == layout.rank:
            own = drawn(100 + turn)
            second = center.push_pull(own, 0.5), own
        found.append((before, first, between, second, seen_by_host(center, layout)))
    return found


# -- the rest ------------------------------------------------------------------------------------------------


def set_alike(center: Center, layout: CenterLayout) -> tuple[PushPull, list[torch.Tensor], State | None]:
    center.open(filled(0, 0, 0))
    center.push_pull(filled(1, 2, 3), 0.5)
    dist.barrier()
    center.write(drawn(50), [5, 6, 7])
    dist.barrier()
    state = seen_by_host(center, layout)
    own = drawn(60 + layout.rank)
    return center.push_pull(own, 0.0), own, state


def while_host_sleeps(center: Center, layout: CenterLayout) -> int:
    """Visits of all others, as the host has counted them before its training thread does anything with the center."""
    center.open(filled(0, 0, 0))
    store = dist.distributed_c10d._get_default_store()
    visits, others, end = 0, layout.world - 1, time.monotonic() + 60
    if layout.rank == layout.host:
        while visits < 5 * others and time.monotonic() < end:
            time.sleep(0.01)
            visits = store.add("visits while the host sleeps", 0)
    else:
        for _ in range(5):
            center.push_pull(filled(1, 1, 1), 0.01)
            store.add("visits while the host sleeps", 1)
    dist.barrier()
    return visits


def of_replicas(center: Center, layout: CenterLayout, replicas: list[list[int]]) -> list[Any]:
    """Visits of replicas of 2 ranks and 1, which begin together."""
    center.open(START)
    client, found = CenterClient(center, ReplicaLinks(layout.rank, replicas, Groups.open(LIMIT))), []
    for step in range(5):
        own = drawn(10 * step + layout.replica)
        found.append((client.push_pull(own, 0.25)(), own))
    for _ in range(2):
        out = filled(0, 0, 0)
        found.append((client.read(out), out))
        dist.barrier()
        client.write(drawn(99), [3, 4])
    return found


def threads(center: Center, layout: CenterLayout) -> tuple[int, int]:
    """Of the centers that were there before; of this one."""

    def count() -> int:
        return sum(thread.name == "hetero-center" for thread in threading.enumerate())

    end = time.monotonic() + 5
    while count() and time.monotonic() < end:
        time.sleep(0.01)
    before = count()
    center.open(START)
    return before, count()


def of_one(center: Center, layout: CenterLayout) -> State:
    """A job of one rank."""
    center.open(START)
    center.push_pull(drawn(0), 0.5)
    return center.read()


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
homes = pytest.mark.parametrize("home", ALL, scope="module")  # so that all tests of a home run after each other


@functools.cache
def _results(home: str) -> dict[str, list[Any]]:
    careless = home in ("shared", "hogwild", "mpi", "mpi-across")
    cases = {name: case for name, case in CASES.items() if name != "careless" or careless}
    return dict(zip(cases, per_body(home, list(cases.values())), strict=True))


def results(home: str, name: str) -> list[Any]:
    """What a case brings on every rank; all cases of a home run in one job."""
    if home.startswith("mpi") and no_mpi():
        pytest.skip(no_mpi())
    return _results(home)[name]


def doubles(values: list[torch.Tensor]) -> list[np.ndarray]:
    return [value.double().numpy() for value in values]


def unit(value: torch.Tensor, home: str) -> float:
    """How far a number may be off, in parts of what it was made of."""
    return 4 * torch.finfo(value.dtype).eps + 2 * ROUNDING.get(home, 0.0)


def assert_moved(before: list[torch.Tensor], told: list[torch.Tensor], push: float, after: list[torch.Tensor]) -> None:
    """Exactly by what the visitor was told, in every format."""
    for old, difference, new in zip(before, told, after, strict=True):
        size = old.abs().maximum((push * difference).abs())
        assert (
            (new.double() - (old.double() + push * difference.double())).abs() <= torch.finfo(old.dtype).eps * size
        ).all()


@homes
def test_a_visit_is_told_its_distance_and_pulls_the_center(home: str) -> None:
    ranks = results(home, "by turns")
    states = ranks[0][1]
    visits = [ranks[turn % WORLD][0][turn // WORLD] for turn in range(len(PUSHES))]
    assert all(torch.equal(a, b) for a, b in zip(states[0][0], START, strict=True))
    counts = [0] * WORLD
    for turn, ((visit, told), push) in enumerate(zip(visits, PUSHES, strict=True)):
        (before, _), (after, seen) = states[turn : turn + 2]
        counts[turn % WORLD] += 1
        assert (visit.counts, seen) == (counts, counts)
        square, rounding = 0.0, ROUNDING.get(home, 0.0) if turn % WORLD else 0.0  # the host is at home
        known = states[turn - WORLD][0] if turn >= WORLD else START  # the center when this visitor last came
        for x, d, c, k in zip(doubles(drawn(turn)), told, doubles(before), doubles(known), strict=True):
            truth = x - c
            size = 4 * torch.finfo(d.dtype).eps * (np.abs(x) + np.abs(c) + np.abs(k))
            off = np.abs(d.double().numpy() - truth)
            assert (off <= 1.1 * rounding * (np.abs(x - k) + np.abs(truth)) + size + rounding * 1e-4).all()
            square += float((truth**2).sum())
        assert visit.square == pytest.approx(square, rel=1e-4 + 4 * ROUNDING.get(home, 0.0))
        assert_moved(before, told, push, after)
        size = sum(v.numel() * (2 if home in NARROW else v.element_size()) for v in START)
        over = visit.sent - (0 if turn % WORLD == 0 or home in ("shared", "hogwild") else size)
        assert 0 <= over <= (64 if home in THREADS else 0)


@homes
def test_a_crowd_of_visitors_loses_nothing(home: str) -> None:
    ranks = results(home, "crowd")
    added = [sum(parts) for parts in zip(*(rank[0] for rank in ranks), strict=True)]
    values, counts = ranks[0][3]
    assert counts == [VISITS] * WORLD
    for value, total in zip(values, added, strict=True):
        lost = float((value != total).double().mean())
        assert lost == 0 or (home == "hogwild" and lost < 0.5)
    if home == "hogwild":  # without the lock visits are torn
        assert sum(rank[1] for rank in ranks) > 0
    if home not in LOCKED:
        return
    assert sorted(count for rank in ranks for count in rank[2]) == list(range(1, WORLD * VISITS + 1))
    # A visit as a whole is atomic: it sees a center that is the same number everywhere. Without the lock it is not.
    assert [rank[1] for rank in ranks] == [0] * WORLD


def lost(ranks: list[Any]) -> float:
    return 1 - ranks[0][1] / sum(added for added, _ in ranks)


@homes
def test_adds_are_not_lost(home: str) -> None:
    assert abs(lost(results(home, "careful"))) < (0.05 if home == "hogwild" else 1e-5)
    if home in ("shared", "mpi", "mpi-across"):  # the control: to read and to write loses adds
        assert lost(results(home, "careless")) > 0.05


@homes
def test_a_visitor_with_values_that_cannot_be_told_leaves_the_center_alone(home: str) -> None:
    ranks = results(home, "broken")
    for turn in range(WORLD * len(BAD)):
        rank, bad = turn % WORLD, BAD[turn // WORLD]
        (before, counts), _, (between, later), _, (after, _) = ranks[0][turn]
        _, first, _, (second, told), _ = ranks[rank][turn]
        assert sum(later) == sum(counts) + 1
        if not math.isfinite(bad) or (home == "fp16" and rank > 0):
            assert not math.isfinite(first.square)
            assert all(torch.equal(a, b) for a, b in zip(before, between, strict=True)), (turn, rank, bad)
        else:
            assert math.isfinite(first.square)
        # The next visit is all right.
        assert math.isfinite(second.square)
        for x, d, c in zip(doubles(drawn(100 + turn)), told, doubles(between), strict=True):
            around = 2 * (1 + np.abs(x) + np.abs(c) + turn)  # where this visitor and the center have been
            if home in NARROW and turn >= 2 * WORLD:
                around[-1] += 1e6
            assert (np.abs(d.double().numpy() - (x - c)) <= unit(d, home) * around).all(), (turn, rank, bad)
        assert_moved(between, told, 0.5, after)


@homes
def test_what_is_set_is_what_visitors_see(home: str) -> None:
    ranks = results(home, "set")
    values, counts = ranks[0][2]
    assert counts == [5, 6, 7]
    assert all(torch.equal(a, b) for a, b in zip(values, drawn(50), strict=True))
    assert max(sum(visit.counts) for visit, _, _ in ranks) == 21
    for rank, (_, told, _) in enumerate(ranks):
        for x, d, c in zip(doubles(drawn(60 + rank)), told, doubles(drawn(50)), strict=True):
            assert (np.abs(d.double().numpy() - (x - c)) <= unit(d, home) * (np.abs(x) + np.abs(c) + 4)).all()


@homes
def test_push_pull_go_on_while_the_training_thread_of_the_host_sleeps(home: str) -> None:
    host, *others = results(home, "asleep")
    assert host == 5 * len(others)


@homes
def test_all_ranks_of_a_replica_learn_the_same(home: str) -> None:
    leader, member, other = results(home, "replicas")
    for (visit, told), (visit_there, told_there) in zip(leader, member, strict=True):
        assert visit == visit_there
        assert all(torch.equal(a, b) for a, b in zip(told, told_there, strict=True))
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
