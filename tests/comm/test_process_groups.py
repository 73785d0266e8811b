"""Process groups: made at first use, by their members only; their number does not grow with the replicas."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import attempt, free_port, run
from torch.distributed import distributed_c10d

from lightning_hetero.comm import failures
from lightning_hetero.comm import groups as module
from lightning_hetero.comm.all_reduce import ReplicaLinks
from lightning_hetero.comm.groups import Groups
from lightning_hetero.comm.job import Job
from lightning_hetero.comm.threads import Background
from lightning_hetero.comm.topology import Place, Topology
from lightning_hetero.comm.view import View
from lightning_hetero.errors import CommunicationError, UnsupportedError

LIMIT = timedelta(seconds=20)


class Fake:
    """Stands for a process group."""


def asked_for(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> list[Counter[tuple[str, tuple[int, ...]]]]:
    """The groups that each rank makes, by name and members, if a strategy uses all that there are."""
    places = [Place(f"host{node}", node, i, "cpu") for node, size in enumerate(sizes) for i in range(size)]
    made: list[Counter[tuple[str, tuple[int, ...]]]] = []

    def new_group(name: str, ranks: Any, *_: Any) -> Fake:
        made[-1][name, tuple(ranks)] += 1
        return Fake()

    monkeypatch.setattr(module, "_new_group", new_group)
    monkeypatch.setattr(module, "gather", lambda value, what: ["a name"])
    for rank in range(len(places)):
        made.append(Counter())
        topology = Topology.of(rank, places)
        job = Job(View.first(topology, topology.nodes), LIMIT, within="gloo")
        links = ReplicaLinks(rank, topology.nodes, job.groups)
        assert not made[-1]  # nothing is needed yet
        for _ in range(2):
            job.report_group()
            job.data_group()
            job.small_group()
            links._foreground.route(0)
            links.prepare()
            links.broadcaster("broadcasts")
            links.broadcaster("the center")
    return made


@pytest.mark.parametrize(("size", "most"), [(1, 3), (2, 9), (8, 9)])
def test_the_number_of_groups_does_not_grow_with_the_number_of_replicas(
    size: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in (4, 16, 64):
        assert max(sum(groups.values()) for groups in asked_for([size] * count, monkeypatch)) == most


@pytest.mark.parametrize("sizes", [[1, 1], [2, 1], [3, 1, 2], [1], [4]])
def test_all_members_of_a_group_make_it_once_and_nobody_else_does(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = asked_for(sizes, monkeypatch)
    everyone = sum(made, Counter())
    names = [name for name, _ in everyone]
    assert len(set(names)) == len(names)
    for (name, ranks), times in everyone.items():
        assert times == len(ranks) > 1
        assert [rank for rank, groups in enumerate(made) if (name, ranks) in groups] == sorted(ranks)


# -- with real ranks -----------------------------------------------------------------------------------------


def joined(function: Any, *args: Any) -> Any:
    dist.init_process_group("gloo", timeout=LIMIT)
    return function(*args)


def _uneven() -> list[list[float]]:
    """Use overlapping groups, of different numbers on each rank, of two objects at the same time."""
    rank, found = dist.get_rank(), []
    for groups in (Groups.open(LIMIT), Groups.open(LIMIT)):
        for ranks in ((0, 1), (2,), (2, 0), (1, 2), (0, 1, 2)):
            if rank in ranks and (group := groups.get("a sum", ranks)) is not None:
                assert groups.get("a sum", ranks) is group
                assert dist.get_process_group_ranks(group) == list(ranks)
                rows = [torch.zeros(1) for _ in ranks]
                dist.all_gather(rows, torch.tensor([float(rank)]), group=group)
                found.append([row.item() for row in rows])
    dist.barrier()
    return found


def test_members_find_each_other_whatever_groups_they_have_beside() -> None:
    [first, second, third] = run(joined, 3, _uneven)
    assert first == [[0, 1], [2, 0], [0, 1, 2]] * 2
    assert second == [[0, 1], [1, 2], [0, 1, 2]] * 2
    assert third == [[2, 0], [1, 2], [0, 1, 2]] * 2  # in the order in which they were given


def _missing() -> tuple[str, float]:
    groups, began = Groups.open(timedelta(seconds=2)), time.monotonic()
    try:
        if dist.get_rank() == 0:
            groups.get("a test", (0, 1))
    except CommunicationError as error:
        return str(error), time.monotonic() - began
    finally:
        dist.barrier()
    return "", 0.0


def test_a_member_that_does_not_ask_is_an_error_in_time() -> None:
    [(message, seconds), _] = run(joined, 2, _missing)
    assert "rank 0 of 2 could not make the process group of ranks [0, 1] for 'a test'" in message
    assert seconds < 15


def _killed() -> tuple[str, float]:
    failures.watch_ranks("127.0.0.1", 60)
    groups, began = Groups.open(timedelta(seconds=300)), time.monotonic()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        groups.get("a test", (0, 1))
    except CommunicationError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


def test_a_member_that_has_died_is_not_waited_for() -> None:
    """A rank that is killed before the first exchange would otherwise hold up the others for the whole timeout."""
    survivor, killed = attempt(joined, 2, _killed)
    assert killed.exitcode == -signal.SIGKILL
    message, seconds = survivor.value
    assert "'a test': rank 1 has ended without an error message" in message
    assert "rank(s) [1] did not ask for the group" in message
    assert seconds < 100


def _in_background() -> str:
    groups = Groups.open(LIMIT)
    with pytest.raises(UnsupportedError, match="first asked for in a background thread") as caught:
        Background(lambda: groups.get("a test", (0, 1))).result()
    group = groups.get("a test", (0, 1))
    assert Background(lambda: groups.get("a test", (0, 1))).result() is group
    return str(caught.value)


def test_a_background_thread_is_never_the_first_to_ask() -> None:
    assert all("ranks [0, 1] for 'a test'" in message for message in run(joined, 2, _in_background))


def _ended() -> tuple[int, int, int]:
    groups = Groups.open(LIMIT)
    before = len(distributed_c10d._world.pg_names)
    groups.get("a test", (0, 1))
    during = len(distributed_c10d._world.pg_names)
    del groups
    dist.barrier()
    module.end_unused()
    return before, during, len(distributed_c10d._world.pg_names)


def test_groups_end_with_the_object_that_hands_them_out() -> None:
    assert run(joined, 2, _ended) == [(1, 2, 1)] * 2


def test_groups_that_hold_a_device_are_ended_with_the_process(tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(
        "import atexit\n"
        "import torch.distributed as dist\n"
        "atexit.register(lambda: print('ended', ended))\n"  # runs last
        "from lightning_hetero.comm import groups\n"
        "ended = []\n"
        "dist.destroy_process_group = ended.append\n"
        "groups._on_devices += ['first', 'second']\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "ended ['second', 'first']\n"


def test_only_groups_that_hold_a_device_are(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(module, "_on_devices", made)
    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", lambda *_, **__: (Fake(), None))
    monkeypatch.setattr(module, "default_store", lambda: None)
    monkeypatch.setattr(module, "_await_members", lambda *_: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "Backend", str)
    module._new_group("sockets", (0, 1), LIMIT, "gloo")
    assert not made
    module._new_group("cards", (0, 1), LIMIT, "nccl")
    assert len(made) == 1


def _meet_after_one_has_tried_in_vain(address: tuple[str, int]) -> list[int]:
    rank = int(os.environ["RANK"])
    host = dist.TCPStore(*address, is_master=rank == 0, wait_for_workers=False, timeout=LIMIT)
    if rank == 0:
        with pytest.raises(dist.DistError):
            module.begin_world(host, 1, 0, 2, timedelta(seconds=1))  # the other one has not come yet
    module.begin_world(host, 2, rank, 2, LIMIT)
    numbers = torch.tensor([rank + 1])
    dist.all_reduce(numbers)
    dist.barrier()  # the store is on rank 0
    dist.destroy_process_group()
    return numbers.tolist()


def test_ranks_meet_though_one_of_them_has_tried_in_vain_before() -> None:
    """This happens if one more rank is lost while ranks meet: in PyTorch they would wait under different names."""
    assert run(_meet_after_one_has_tried_in_vain, 2, ("127.0.0.1", free_port())) == [[3], [3]]
