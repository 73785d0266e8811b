"""Ends of centers, which leave nothing behind, and MPI's own way to end a job."""

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from homes import FORKED, HOMES, LIMIT, WORLD, attempt_mpi, layout_of
from ranks import run
from test_center_deaths import _no_new_files, begun, die, go  # noqa: F401 (a fixture for each test)

# -- the end -------------------------------------------------------------------------------------------------


def _leaves(home: str) -> tuple[set[str], list[str], bool]:
    """Open files, threads and mappings of this process, before and after a center is closed."""
    dist.init_process_group("gloo", timeout=LIMIT)

    def state() -> tuple[set[str], list[str], bool]:
        held = {
            os.readlink(path)
            for path in map("/proc/self/fd/{}".format, os.listdir("/proc/self/fd"))
            if os.path.islink(path)
        }
        named = {name for name in held if "lightning-hetero" in name}
        return named, [t.name for t in threading.enumerate()], "lightning-hetero" in Path("/proc/self/maps").read_text()

    center = HOMES[home](layout_of())
    center.open([torch.zeros(1000)])
    center.push_pull([torch.ones(1000)], 0.5)
    during = state()
    dist.barrier()
    center.leave()
    dist.barrier()
    center.close()
    center.close()
    end = time.monotonic() + 5
    while "hetero-center" in state()[1] and time.monotonic() < end:
        time.sleep(0.05)
    return during, state()


@pytest.mark.parametrize("home", FORKED)
def test_nothing_is_left_of_a_closed_center(home: str) -> None:
    for rank, (during, after) in enumerate(run(_leaves, WORLD, home)):
        shared = home in ("shared", "hogwild")
        assert (bool(during[0]), during[2]) == (shared, shared)  # else this test would see nothing
        assert ("hetero-center" in during[1]) == (rank == 0 and not shared)
        assert (after[0], after[2]) == (set(), False)
        assert "hetero-center" not in after[1]


def _late_to_leave(home: str) -> None:
    center = begun(home)
    go(center)
    dist.barrier()
    time.sleep(0.3 * (dist.get_rank() != 1))
    center.leave()
    center.close()


@pytest.mark.parametrize("home", ["shared", "thread", "turns"])
def test_the_host_may_end_as_soon_as_it_has_left(home: str) -> None:
    run(_late_to_leave, WORLD, home)


# -- MPI -----------------------------------------------------------------------------------------------------


def _mpi_fails(how: str) -> None:
    center = begun("mpi", limit=timedelta(seconds=5))
    for step in range(100):
        if step == 50 and how == "host dies" and dist.get_rank() == 1:
            die()
        if step == 50 and how == "client raises" and dist.get_rank() == 2:
            raise ValueError("a mistake of the user")
        go(center)
    dist.barrier()
    center.leave()
    center.close()


@pytest.mark.long
@pytest.mark.parametrize("how", ["host dies", "client raises"])
def test_mpiexec_ends_a_job_that_has_lost_a_rank(how: str) -> None:
    status, seconds, _, output = attempt_mpi(_mpi_fails, WORLD, how)
    assert status not in (0, None), (status, seconds, output)
