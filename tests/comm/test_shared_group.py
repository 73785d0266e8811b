"""A process group in shared memory: collectives against NumPy and gloo, the files that it leaves, and its choice."""

import os
import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from leftovers import nothing_left_in_memory
from lightning_utilities.core.rank_zero import rank_zero_only
from ranks import attempt, run

from lightning_hetero.comm import groups, shared_memory
from lightning_hetero.comm.all_reduce import ReplicaLinks
from lightning_hetero.comm.compression import all_gather
from lightning_hetero.comm.failures import deadline
from lightning_hetero.comm.groups import Groups, SharedGroup
from lightning_hetero.errors import CommunicationError, UnsupportedError

LIMIT = timedelta(seconds=60)
SIZES = [1, 7, 1000, 4097]


def _groups(nodes: list[str], way: Any = "auto", limit: timedelta = LIMIT) -> Groups:
    groups.ROW = groups.ROW = 4 * 256  # several pieces for each tensor
    dist.init_process_group("gloo", timeout=limit)
    return Groups.open(limit, nodes, way)


def _own(rank: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * rank + size))


# -- collectives ---------------------------------------------------------------------------------------------


def _reduced() -> dict[str, Any]:
    rank, world = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    groups = _groups(["here"] * world)
    group = groups.bulk("averages", range(world))
    assert isinstance(group, SharedGroup)
    assert groups.bulk("averages", range(world)) is group  # the same at each call
    found: dict[str, Any] = {"sum": [], "halves": []}
    for size in SIZES:
        for name, dtype in (("sum", torch.float32), ("halves", torch.bfloat16)):
            found[name].append(tensor := _own(rank, size).to(dtype))
            dist.all_reduce(tensor, group=group)
    for name, op in (("max", dist.ReduceOp.MAX), ("min", dist.ReduceOp.MIN)):
        found[name] = torch.arange(600).roll(rank)
        dist.all_reduce(found[name], op, group=group)
    found["mean"] = torch.full((5,), float(rank))
    dist.all_reduce(found["mean"], dist.ReduceOp.AVG, group=group)
    found["rows"] = torch.full((4, 3), float(rank))
    dist.all_reduce(found["rows"], group=group)
    image = torch.arange(24.0).view(1, 2, 3, 4) + rank
    image = image.contiguous(memory_format=torch.channels_last if rank else torch.contiguous_format)
    dist.all_reduce(image, group=group)
    assert torch.equal(image, torch.arange(24.0).view(1, 2, 3, 4) * world + sum(range(world)))
    found["future"] = dist.all_reduce(torch.ones(2), group=group, async_op=True).get_future().wait()[0]
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_reduces(world: int) -> None:
    ranks = run(_reduced, world)
    for i, size in enumerate(SIZES):
        values = [_own(rank, size) for rank in range(world)]
        total = np.sum([value.double().numpy() for value in values], axis=0)
        np.testing.assert_allclose(ranks[0]["sum"][i].numpy(), total, atol=1e-5)
        in_order = values[0].clone()
        for value in values[1:]:
            in_order += value
        assert torch.equal(ranks[0]["sum"][i], in_order)  # in the order of ranks, so the same in each run
        halves = sum(value.bfloat16().float() for value in values)
        torch.testing.assert_close(ranks[0]["halves"][i].float(), halves, rtol=1 / 128, atol=1e-2)
    rolled = np.stack([np.roll(np.arange(600), rank) for rank in range(world)])
    for found in ranks:
        assert all(torch.equal(a, b) for a, b in zip(found["sum"], ranks[0]["sum"], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(found["halves"], ranks[0]["halves"], strict=True))
        np.testing.assert_array_equal(found["max"].numpy(), rolled.max(0))
        np.testing.assert_array_equal(found["min"].numpy(), rolled.min(0))
        assert found["mean"].tolist() == [(world - 1) / 2] * 5
        assert found["rows"].tolist() == [[sum(range(world))] * 3] * 4
        assert found["future"].tolist() == [world, world]


def _moved() -> list[Any]:
    rank = int(os.environ["RANK"])
    groups = _groups(["here"] * 3)
    group = groups.bulk("averages", [0, 1, 2])
    assert isinstance(group, SharedGroup)
    found: list[Any] = []
    for root in range(3):
        tensor = torch.arange(600.0) + 1000 * rank
        dist.broadcast(tensor, root, group=group)
        found.append(tensor)
    rows = [torch.empty(2) for _ in range(3)]
    dist.all_gather(rows, torch.tensor([rank, 0.5]), group=group)
    flat = torch.empty(6)
    all_gather(flat, torch.tensor([rank, 0.5]), group=group)
    other = torch.empty(1)
    sent = dist.isend(torch.tensor([float(rank)]), (rank + 1) % 3, group)
    dist.irecv(other, (rank - 1) % 3, group).wait()
    sent.wait()
    turned = torch.tensor([1j * rank])
    dist.all_reduce(turned, group=group)
    at_one, part = torch.tensor([float(rank)]), torch.empty(1)
    dist.reduce(at_one, 1, group=group)
    dist.scatter(part, list(torch.arange(3.0).split(1)) if rank == 2 else None, 2, group=group)
    dist.barrier(group=group)
    return [*found, torch.stack(rows), flat, other, turned, at_one if rank == 1 else torch.tensor([3.0]), part]


def test_broadcasts_and_what_goes_over_gloo() -> None:
    for rank, found in enumerate(run(_moved, 3)):
        for root in range(3):
            assert torch.equal(found[root], torch.arange(600.0) + 1000 * root)
        rows = torch.tensor([[0, 0.5], [1, 0.5], [2, 0.5]])
        assert torch.equal(found[3], rows)
        assert torch.equal(found[4], rows.flatten())
        assert found[5].tolist() == [(rank - 1) % 3]
        assert found[6].tolist() == [3j]
        assert found[7].tolist() == [3]
        assert found[8].tolist() == [rank]


def _averaged(way: Any, replicas: list[list[int]]) -> dict[str, Any]:
    rank, kinds = int(os.environ["RANK"]), []
    links = ReplicaLinks(rank, replicas, _groups(["here"] * 4, way))
    index = links.index
    values = [_own(index, 3000), _own(index + 10, 41).double()]
    reference = [torch.zeros(3000), torch.zeros(41, dtype=torch.float64)]
    found = links.average(values, [1.0 + i for i in range(len(replicas))], reference)
    route = links._foreground.route(0)
    kinds = [type(group).__name__ for group in (route.across, route.inner)]
    message = torch.full((2000,), float(rank))
    links.broadcast(message)
    return {"mean": found.mean, "distance": found.distance, "kinds": kinds, "message": message}


@pytest.mark.long(after=1)
@pytest.mark.parametrize("replicas", [[[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 1, 2], [3]]])
def test_averages_of_replicas_and_what_their_ranks_are_told(replicas: list[list[int]]) -> None:
    shared, plain = run(_averaged, 4, "shm", replicas), run(_averaged, 4, "gloo", replicas)
    weights = np.arange(1.0, len(replicas) + 1)
    for rank, (own, other) in enumerate(zip(shared, plain, strict=True)):
        for i, (start, size, dtype) in enumerate(((0, 3000, torch.float32), (10, 41, torch.float64))):
            rows = np.stack([_own(start + r, size).to(dtype).numpy() for r in range(len(replicas))])
            np.testing.assert_allclose(own["mean"][i].numpy(), weights @ rows / weights.sum(), atol=1e-6)
            assert torch.equal(own["mean"][i], shared[0]["mean"][i])
        assert own["distance"] == pytest.approx(other["distance"], rel=1e-6)
        [mine] = [ranks for ranks in replicas if rank in ranks]
        assert own["message"].tolist() == [float(mine[0])] * 2000
        assert set(own["kinds"]) <= {"SharedGroup", "NoneType"}
        assert "SharedGroup" in own["kinds"]
        assert "SharedGroup" not in other["kinds"]


# -- who gets one --------------------------------------------------------------------------------------------


def _chosen(nodes: list[str], way: Any) -> list[str]:
    groups = _groups(nodes, way)
    pairs = [pair for pair in ((0, 1), (1, 2)) if int(os.environ["RANK"]) in pair]
    kinds = [type(groups.bulk(str(pair), pair)).__name__ for pair in pairs]
    dist.barrier()  # rank 0 has the store, which others need until all groups are made
    return kinds


@pytest.mark.parametrize(
    ("nodes", "way", "kinds"),
    [
        (["a", "a", "a"], "auto", ["SharedGroup", "SharedGroup"]),
        (["a", "a", "b"], "auto", ["SharedGroup", "ProcessGroup"]),
        (["a", "a", "b"], "shm", ["SharedGroup", "ProcessGroup"]),
        (["a", "a", "a"], "gloo", ["ProcessGroup", "ProcessGroup"]),
    ],
)
def test_ranks_of_one_node_unless_the_user_says_otherwise(nodes: list[str], way: str, kinds: list[str]) -> None:
    first, both, last = run(_chosen, 3, nodes, way)
    assert (first, both, last) == (kinds[:1], kinds, kinds[1:])


def _without_room(way: Any) -> str:
    shared_memory.SHARED = "/proc"  # no file can be made there
    rank_zero_only.rank = 0  # as Lightning sets it: both ranks are to warn
    groups = _groups(["a", "a"], way)
    if way == "shm":
        with pytest.raises(UnsupportedError, match="docker run --shm-size") as raised:
            groups.bulk("averages", (0, 1))
        return str(raised.value)
    with pytest.warns(UserWarning, match="docker run --shm-size"):
        group = groups.bulk("averages", (0, 1))
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert groups.bulk("averages", (0, 1)) is group  # and no second warning
    return str(tensor.tolist())


def test_without_room_it_is_gloo_with_a_warning_or_an_error_if_it_was_asked_for() -> None:
    assert run(_without_room, 2, "auto") == ["[2.0, 2.0, 2.0]"] * 2
    assert all("within='shm'" in text for text in run(_without_room, 2, "shm"))


# -- what is left --------------------------------------------------------------------------------------------


def _killed() -> float:
    groups = _groups(["a"] * 3, limit=timedelta(seconds=20))
    group = groups.bulk("averages", (0, 1, 2))
    assert group is not None
    dist.all_reduce(torch.ones(3), group=group)
    if dist.get_rank() == 1:
        os._exit(0)
    began = time.monotonic()
    with (
        pytest.raises(CommunicationError, match=r"could not average: .*Connection closed by rank"),
        deadline("average"),
    ):
        dist.all_reduce(torch.ones(3), group=group)
    return time.monotonic() - began


def test_a_rank_that_ends_is_an_error_at_once_and_nothing_is_left_in_the_memory() -> None:
    with nothing_left_in_memory():
        outcomes = attempt(_killed, 3)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome.trace
        assert outcome.value < 10


def _many() -> int:
    dist.init_process_group("gloo")
    counts = []
    for _ in range(30):
        groups = Groups.open(LIMIT, ["a", "a"], "auto")
        dist.all_reduce(torch.ones(3), group=groups.bulk("averages", (0, 1)))
        del groups
        with open("/proc/self/maps") as maps:
            counts.append(sum("lightning-hetero" in line for line in maps))
    return max(counts)


def test_memory_is_given_back_with_the_groups() -> None:
    assert max(run(_many, 2)) <= 2
