"""Cases for ranks with a center of any home, and the results of each rank."""

import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from homes import LIMIT
from typing_extensions import override

from lightning_hetero.comm.all_reduce import ReplicaLinks
from lightning_hetero.comm.centers.base import Center, CenterLayout, CenterPart, CenterRule, PushPull
from lightning_hetero.comm.centers.client import CenterClient
from lightning_hetero.comm.centers.shared import SharedCenter
from lightning_hetero.comm.groups import Groups

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
    """State of the center, on its host, while nobody exchanges."""
    dist.barrier()
    state = center.read() if layout.rank == layout.host else None
    dist.barrier()
    return state


# -- one client at a time -----------------------------------------------------------------------------------

START, PUSHES = filled(0.25, -3.0, 1000.0), [0.5, 0.125, 1.0, 0.0, 0.5, 0.5]


def by_turns(
    center: Center, layout: CenterLayout
) -> tuple[list[tuple[PushPull, list[torch.Tensor]]], list[State | None]]:
    center.open(START)
    exchanges, states = [], [seen_by_host(center, layout)]
    for turn, push in enumerate(PUSHES):
        if turn % layout.world == layout.rank:
            own = drawn(turn)
            exchanges.append((center.push_pull(own, push), own))
        states.append(seen_by_host(center, layout))
    return exchanges, states


# -- many at once --------------------------------------------------------------------------------------------

EXCHANGES = 60


class PausingRule(CenterRule):
    """Pauses between the first vector and the others, so that an exchange without a lock can be seen half done."""

    @override
    def move(self, values: Sequence[torch.Tensor], center: Sequence[torch.Tensor], push: float, square: float) -> None:
        super().move(values[:1], center[:1], push, square)
        time.sleep(1e-3)
        super().move(values[1:], center[1:], push, square)


def crowd(center: Center, layout: CenterLayout) -> tuple[list[torch.Tensor], int, list[int], State | None]:
    """Exact sums (whole numbers, ``push = 1``): this rank's additions, its torn exchanges, its counts, the center."""
    if isinstance(center, SharedCenter):
        center.parts = (CenterPart(PausingRule()),)
    center.open(filled(0, 0, 0))
    added, torn, counts = [value.double() for value in filled(0, 0, 0)], 0, []
    dist.barrier()
    for step in range(EXCHANGES):
        own = filled(*[float((7 * layout.rank + 5 * step) % 41 - 20)] * 3)
        counts.append(sum(center.push_pull(own, 1.0).counts))
        torn += any(bool((value != own[0][0]).any()) for value in own)
        for total, difference in zip(added, own, strict=True):
            total.add_(difference)
    return added, torn, counts, seen_by_host(center, layout)


def losing(center: Center, layout: CenterLayout, careful: bool) -> tuple[float, float | None]:
    """Move slowly from 0 to 1; the mean that this rank has added to each number, and the mean of the center."""
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
    """The control, without a lock: get the center, work, put it."""
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
    """Another rank moves the center; then this rank exchanges a bad number, and again good ones."""
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
    """Number of exchanges of all others, as the host has counted them before its training thread uses the center."""
    center.open(filled(0, 0, 0))
    store = dist.distributed_c10d._get_default_store()
    exchanges, others, end = 0, layout.world - 1, time.monotonic() + 60
    if layout.rank == layout.host:
        while exchanges < 5 * others and time.monotonic() < end:
            time.sleep(0.01)
            exchanges = store.add("exchanges while the host sleeps", 0)
    else:
        for _ in range(5):
            center.push_pull(filled(1, 1, 1), 0.01)
            store.add("exchanges while the host sleeps", 1)
    dist.barrier()
    return exchanges


def of_replicas(center: Center, layout: CenterLayout, replicas: list[list[int]]) -> list[Any]:
    """Results of exchanges of two replicas, of 2 ranks and of 1, which begin together."""
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
    """Number of threads of earlier centers, and number after this one has opened."""

    def count() -> int:
        return sum(thread.name == "hetero-center" for thread in threading.enumerate())

    end = time.monotonic() + 5
    while count() and time.monotonic() < end:
        time.sleep(0.01)
    before = count()
    center.open(START)
    return before, count()


def of_one(center: Center, layout: CenterLayout) -> State:
    """Exchanges in a job of one rank."""
    center.open(START)
    center.push_pull(drawn(0), 0.5)
    return center.read()
