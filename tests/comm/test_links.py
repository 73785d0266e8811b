"""Averages and broadcasts that run at the same time do not take each other's messages."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run

from lightning_hetero.comm.all_reduce import Contribution, ReplicaLinks
from lightning_hetero.comm.groups import Groups

LIMIT = timedelta(seconds=20)
REPLICAS = [[0, 1], [2, 3]]
SIZE = 50_000


def joined(function: Any, *args: Any) -> Any:
    dist.init_process_group("gloo", timeout=LIMIT)
    value = function(*args)
    dist.barrier()  # rank 0 has the store, which the others need to make their groups
    return value


def own(value: float, payload: float = 0.0) -> Contribution:
    return Contribution([torch.full((SIZE,), value)], [1, 3], [torch.zeros(SIZE)], payload=payload)


def begin(links: ReplicaLinks, value: float, member: int = 0) -> Any:
    return links.begin(own(value), [torch.empty(SIZE)], member)


def _broadcast_meanwhile() -> tuple[list[float], list[float]]:
    links, rank = ReplicaLinks(dist.get_rank(), REPLICAS, Groups.open(LIMIT)), dist.get_rank()
    links.prepare()
    if links.index == 1:
        time.sleep(1.0)  # leader 0 waits for leader 2 in the background, and does not send to rank 1 until then
    exchange = begin(links, 1.0 + links.index)
    if rank in (1, 3):
        time.sleep(0.5)  # they wait for their leader in the background, and only then in the foreground
    seen = []
    for number in range(3):
        tensor = torch.full((7,), 10.0 * rank + number)
        links.broadcast(tensor)
        seen.append(tensor.unique().item())
    return seen, exchange.result().mean[0].unique().tolist()


def test_a_broadcast_while_an_average_is_under_way() -> None:
    for rank, (seen, mean) in enumerate(run(joined, 4, _broadcast_meanwhile)):
        assert seen == [20.0 * (rank // 2) + number for number in range(3)]  # those of ranks 0 and 2
        assert mean == [(1.0 + 3 * 2.0) / 4]


def _two_exchanges() -> list[list[float]]:
    links = ReplicaLinks(dist.get_rank(), REPLICAS, Groups.open(LIMIT))
    links.prepare()
    exchanges = []
    for number in range(3):
        if number == 1 and links.index == 1:
            time.sleep(0.5)
        exchanges.append(begin(links, 10.0 * number + links.index, member=number))
    return [exchange.result().mean[0].unique().tolist() for exchange in reversed(exchanges)]


def test_exchanges_that_begin_while_another_is_under_way_come_in_order() -> None:
    for means in run(joined, 4, _two_exchanges):
        assert means == [[20.75], [10.75], [0.75]]


def _interleaved(replicas: list[list[int]]) -> list[tuple[list[float], list[float]]]:
    links, found = ReplicaLinks(dist.get_rank(), replicas, Groups.open(LIMIT)), []
    for member in range(links.members):
        average = links.begin(own(1.0 + links.index, payload=dist.get_rank()), [torch.empty(SIZE)], member).result()
        found.append((average.payloads, average.mean[0].unique().tolist()))
    return found


@pytest.mark.parametrize("replicas", [[[0, 3], [1, 2]], [[0, 2], [1, 3]]])
def test_numbers_come_in_the_order_of_replicas_wherever_their_ranks_are(replicas: list[list[int]]) -> None:
    for found in run(joined, 4, _interleaved, replicas):
        assert found == [([float(ranks[member]) for ranks in replicas], [1.75]) for member in range(2)]


def _alone() -> tuple[list[float], list[float], float]:
    links = ReplicaLinks(dist.get_rank(), [[0, 1]], Groups.open(LIMIT))
    average = links.average([torch.full((3,), 2.0)], [5], [torch.zeros(3)], payload=7.0)
    return average.mean[0].tolist(), average.payloads, links.traffic.bytes


def test_one_replica_averages_with_itself() -> None:
    assert run(joined, 2, _alone) == [([2.0] * 3, [7.0], 0)] * 2
