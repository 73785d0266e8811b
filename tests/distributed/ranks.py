"""Runs a function on several ranks, each a real process, over gloo on loopback.

Processes are forked from a server that has imported Lightning once, so that a job starts in a fraction of a second.
"""

import contextlib
import faulthandler
import functools
import gc
import io
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch

_context = multiprocessing.get_context("forkserver")
_preloaded = ["lightning_hetero.callbacks", "lightning_hetero.strategies", "torchmetrics", "sklearn.datasets", "pytest"]
# With CUDA a fit begins threads, which forked processes would lack.
_context.set_forkserver_preload(_preloaded if torch.cuda.device_count() else [*_preloaded, "warm"])

#: Seconds in which a job ends unless it hangs. Most take a few; one of many fits takes minutes on a very busy machine.
LIMIT = 400.0
_START = 300.0  # seconds in which all processes of a job have started; the first one waits for the server's imports


@dataclass
class Outcome:
    """Outcome of one rank: a value, an error, or (both None) neither.

    ``late`` is true where it was still running at the job's limit, and was killed.
    """

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    exitcode: int | None = None
    late: bool = False


def run(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    nodes: list[int] | None = None,
    timeout: float = LIMIT,
    env: dict[str, str] | None = None,
    env_of: Callable[[int], dict[str, str]] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Values of ``function`` on every rank; fails with all tracebacks if a rank fails or is late."""
    outcomes = attempt(function, world, *args, nodes=nodes, timeout=timeout, env=env, env_of=env_of, **kwargs)
    bad = [
        f"--- rank {rank} (exit {outcome.exitcode})\n" + "\n".join(outcome.trace.splitlines()[-24:])
        for rank, outcome in enumerate(outcomes)
        if outcome.error or outcome.exitcode
    ]
    if bad:
        raise AssertionError("\n".join(bad))
    return [outcome.value for outcome in outcomes]


def attempt(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    nodes: list[int] | None = None,
    timeout: float = LIMIT,
    env: dict[str, str] | None = None,
    env_of: Callable[[int], dict[str, str]] | None = None,
    **kwargs: Any,
) -> list[Outcome]:
    """Outcome of ``function`` on every rank. A rank that is late is killed and has no value.

    All ranks begin at the same moment, when the last process has started: no limit, the tests' or the strategies',
    includes the time that processes take to start.
    """
    _start_server()
    nodes = nodes or [world]
    port = free_port()
    processes, ends = [], []
    for rank in range(world):
        node = next(i for i in range(len(nodes)) if rank < sum(nodes[: i + 1]))
        variables = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank - sum(nodes[:node])),
            "LOCAL_WORLD_SIZE": str(nodes[node]),
            "GROUP_RANK": str(node),
            "TORCHELASTIC_RUN_ID": "tests",
            "OMP_NUM_THREADS": "1",
            **(env or {}),
            **(env_of(rank) if env_of else {}),
        }
        ours, theirs = _context.Pipe()
        process = _context.Process(target=_rank, args=(theirs, variables, function, args, kwargs))
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(ours)
    outcomes = [Outcome() for _ in range(world)]
    stacks = [Path(tempfile.gettempdir(), f"stacks-of-rank-{process.pid}") for process in processes]
    try:
        _begin(ends)
        open_ends, deadline = set(ends), time.monotonic() + timeout
        while open_ends and (left := deadline - time.monotonic()) > 0:
            for end in wait(list(open_ends), left):
                rank = ends.index(end)
                try:
                    outcomes[rank] = Outcome(*torch.load(io.BytesIO(end.recv_bytes()), weights_only=False))
                except EOFError:
                    outcomes[rank].trace = outcomes[rank].trace or "(died without an error message)"
                open_ends.discard(end)
        for rank, process in enumerate(processes):
            process.join(max(0.0, min(10.0, deadline + 5 - time.monotonic())))
            if process.exitcode is None:
                outcomes[rank].late = True
                outcomes[rank].trace += f"(still running at the limit: killed)\n{_stacks_of(process.pid, stacks[rank])}"
    finally:
        for rank, process in enumerate(processes):
            if process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):  # it has not made its group yet
                    os.killpg(process.pid, signal.SIGKILL)  # the rank and its dataloader workers
                process.kill()
                process.join()
            outcomes[rank].exitcode = process.exitcode
            stacks[rank].unlink(missing_ok=True)
            ends[rank].close()
    return outcomes


def _stacks_of(pid: int, path: Path) -> str:
    """Stacks of the threads of a rank that does not end; empty if it is frozen."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGUSR2)
        time.sleep(0.5)
        return path.read_text()
    return ""


@functools.cache
def _start_server() -> None:
    with pytest.MonkeyPatch.context() as patch:  # before Python 3.13 the server does not get this process's `sys.path`
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
        forkserver.ensure_running()


def _begin(ends: list[Connection]) -> None:
    deadline = time.monotonic() + _START
    for rank, end in enumerate(ends):
        if not end.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"the process of rank {rank} has not started within {_START:.0f} s")
        end.recv_bytes()
    for end in ends:
        end.send_bytes(b"begin")


_reserved: deque[socket.socket] = deque(maxlen=50)


def free_port() -> int:
    """A port below those that the kernel gives to connections, so that none takes it before rank 0 listens.

    Other tests on this machine do not get the same one: a name, which needs no file, is taken for it.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32000)  # whatever seeds the tests have set
        name = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe:
            try:
                name.bind(f"\0lightning-hetero-tests-{port}")
                probe.bind(("127.0.0.1", port))
            except OSError:
                name.close()
                continue
        if len(_reserved) == _reserved.maxlen:
            _reserved.popleft().close()
        _reserved.append(name)
        return port


def quiet() -> None:
    """Let warnings be errors in ranks, too, except those that no user of this package can act on."""
    warnings.resetwarnings()
    warnings.simplefilter("error")
    for message in (
        "The '.*dataloader' does not have many workers",
        "Starting from v1.9.0, `tensorboardX`",
        "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
        "Sparse invariant checks are implicitly disabled",
        "The number of training batches",
        "You are using the `dataloader_iter` step flavor",
        "This process .* is multi-threaded, use of fork",
        "GPU available but not used",
    ):
        warnings.filterwarnings("ignore", message)


def _rank(end: Connection, variables: dict[str, str], function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    os.setpgid(0, 0)
    gc.freeze()  # so that objects that all ranks share are not collected, nor copied for that
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # from the test in which the server was started
        os.environ.pop(name, None)
    os.environ.update(variables)
    torch.set_num_threads(1)
    # A child of the server would start a server of its own for each rank's dataloader workers.
    multiprocessing.set_start_method("fork", force=True)
    quiet()
    stacks = f"{tempfile.gettempdir()}/stacks-of-rank-{os.getpid()}"
    faulthandler.register(signal.SIGUSR2, os.open(stacks, os.O_WRONLY | os.O_CREAT))
    end.send_bytes(b"started")
    end.recv_bytes()
    try:
        message = (function(*args, **kwargs), None, "")
    except BaseException as error:
        message = (None, error, traceback.format_exc())
    buffer = io.BytesIO()
    try:
        torch.save(message, buffer)
    except Exception:
        buffer = io.BytesIO()
        torch.save((None, RuntimeError(repr(message[1])), message[2]), buffer)
    end.send_bytes(buffer.getvalue())
    end.close()
    if torch.distributed.is_initialized():
        # Without this, the first rank that leaves would break the others' last collectives.
        with contextlib.suppress(Exception):
            torch.distributed.destroy_process_group()
