"""Runs functions of a center on ranks, for any home of the center: forked processes, or processes of ``mpiexec``."""

import functools
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "distributed")]
if __name__ == "__main__":  # a process of mpiexec: the center needs no Lightning, and its import takes seconds
    package = ModuleType("lightning_hetero")
    package.__path__ = [str(HERE.parents[1] / "lightning_hetero")]
    sys.modules["lightning_hetero"] = package

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from ranks import Outcome, free_port, quiet, run  # noqa: E402

from lightning_hetero.comm.centers.base import Center, CenterLayout  # noqa: E402
from lightning_hetero.comm.centers.mpi import MPICenter, mpi_missing  # noqa: E402
from lightning_hetero.comm.centers.shared import SharedCenter  # noqa: E402
from lightning_hetero.comm.centers.thread import ThreadCenter  # noqa: E402
from lightning_hetero.comm.groups import Groups  # noqa: E402

WORLD = 3
LIMIT = timedelta(seconds=20)


def _thread(layout: CenterLayout, **options: Any) -> ThreadCenter:
    return ThreadCenter(layout, Groups.open(layout.timeout), "127.0.0.1", **options)


HOMES: dict[str, Callable[[CenterLayout], Center]] = {
    "shared": lambda layout: SharedCenter(layout, locked=True),
    "hogwild": lambda layout: SharedCenter(layout, locked=False),
    "thread": _thread,
    "bf16": functools.partial(_thread, wire="bf16"),
    "fp16": functools.partial(_thread, wire="fp16"),
    "mpi": lambda layout: MPICenter(layout, across=False),
    "mpi-across": lambda layout: MPICenter(layout, across=True),
    "turns": functools.partial(_thread, in_turn=True),
    "turns-bf16": functools.partial(_thread, in_turn=True, wire="bf16"),
}
FORKED = [home for home in HOMES if not home.startswith("mpi")]
EACH = [[rank] for rank in range(WORLD)]  # replicas of one rank


class Case(NamedTuple):
    """A function that all ranks run with a center: ``body(center, layout, *args)``."""

    body: Callable[..., Any]
    args: tuple[Any, ...] = ()
    replicas: list[list[int]] = EACH


def layout_of(replicas: list[list[int]] = EACH, limit: timedelta = LIMIT) -> CenterLayout:
    """Layout of a center, for this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    index = next(i for i, ranks in enumerate(replicas) if rank in ranks)
    return CenterLayout(rank, world, tuple(ranks[0] for ranks in replicas), index, limit)


def bodies_in(home: str, cases: Sequence[Case]) -> list[Any]:
    """Results of the bodies on this rank, one after the other, each with a center of its own."""
    dist.init_process_group("gloo", timeout=LIMIT)
    values = []
    for body, args, replicas in cases:
        layout = layout_of(replicas)
        center = HOMES[home](layout)
        try:
            values.append(body(center, layout, *args))
            dist.barrier()
            center.leave()
            dist.barrier()  # otherwise the host may go too soon: see test_center_deaths
        finally:
            center.close()
    return values


def per_body(home: str, cases: Sequence[Case], world: int = WORLD, timeout: float = 200) -> list[list[Any]]:
    """Results of each body on every rank, from one job."""
    runner = run_mpi if home.startswith("mpi") else run
    values = runner(bodies_in, world, home, cases, timeout=timeout)
    return [list(of_ranks) for of_ranks in zip(*values, strict=True)]


#: From the folder of this Python, as `pip install mpich` puts it there; otherwise from the path.
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


@functools.cache
def no_mpi() -> str:
    """Reason that MPI is not tested here; empty if it is."""
    problem = mpi_missing(1)
    return f"{problem}" if problem else "" if MPIEXEC else "no mpiexec: pip install mpich"


def run_mpi(function: Callable[..., Any], world: int, *args: Any, timeout: float = 200) -> list[Any]:
    """Like ``ranks.run``, in a job of mpiexec."""
    status, seconds, outcomes, output = attempt_mpi(function, world, *args, timeout=timeout)
    if status or any(outcome is None or outcome.error for outcome in outcomes):
        traces = [outcome.trace if outcome else "(without a word)" for outcome in outcomes]
        raise AssertionError("\n".join([f"exit {status} after {seconds:.1f} s", *traces, output]))
    return [outcome.value for outcome in outcomes]


def attempt_mpi(
    function: Callable[..., Any], world: int, *args: Any, timeout: float = 200
) -> tuple[int | None, float, list[Outcome | None], str]:
    """Exit status of mpiexec (``None``: late), seconds, outcome of each rank (``None``: nothing), and the output."""
    if no_mpi():
        pytest.skip(no_mpi())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "work").write_bytes(pickle.dumps((function, args)))
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        began, status = time.monotonic(), None
        with open(folder / "output", "w") as output:
            process = subprocess.Popen(
                [str(MPIEXEC), "-n", str(world), sys.executable, __file__, name],
                env=env, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.terminate()  # which ends its ranks
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        paths = [folder / str(rank) for rank in range(world)]
        outcomes = [torch.load(path, weights_only=False) if path.exists() else None for path in paths]
        return status, time.monotonic() - began, outcomes, (folder / "output").read_text()[-3000:]


def _rank(folder: Path) -> None:
    from mpi4py import MPI

    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(MPI.COMM_WORLD.rank), str(MPI.COMM_WORLD.size)
    torch.set_num_threads(1)
    quiet()
    failed = None
    try:
        function, args = pickle.loads((folder / "work").read_bytes())
        outcome = Outcome(function(*args))
    except BaseException as error:
        failed = error
        outcome = Outcome(None, RuntimeError(repr(error)), traceback.format_exc())
    part = folder / f"{MPI.COMM_WORLD.rank}.part"
    torch.save(outcome, part)
    part.rename(part.with_suffix(""))
    if failed is not None:
        raise failed
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.modules["homes"] = sys.modules["__main__"]  # the tests import this file
    _rank(Path(sys.argv[1]))
