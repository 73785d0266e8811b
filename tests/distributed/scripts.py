"""Runs Python scripts in processes that have imported Lightning already: a new interpreter needs seconds for that."""

import contextlib
import os
import runpy
import sys
import time
import warnings
from pathlib import Path

import psutil
from ranks import run

_LAUNCHER = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)  # fmt: skip


def run_script(script: Path, *arguments: str, folder: Path, ranks: int | None = None) -> list[tuple[int, str]]:
    """Exit status and output of a script, of each process. Fails if one leaves other processes behind.

    Args:
        script: its path.
        arguments: of its command line.
        folder: to work in.
        ranks: processes to start as torchrun would. By default it is one, as ``python script`` starts it: without any
            launcher's variables. Lightning may start other ranks from there.
    """
    results = run(_script, ranks or 1, script.absolute(), arguments, folder, ranks is not None, timeout=400)
    left = _left({group for *_, group in results})
    for process in left:
        process.kill()
    assert not left
    return [(status, printed) for status, printed, _ in results]


def _left(groups: set[int], patience: float = 30.0) -> list[psutil.Process]:
    """The processes of these groups that do not end by themselves."""
    deadline, found = time.monotonic() + patience, list(psutil.process_iter())
    while found and time.monotonic() < deadline:
        found = [process for process in found if _runs_in(groups, process)]
        time.sleep(0.1 * bool(found))
    return found


def _runs_in(groups: set[int], process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        return os.getpgid(process.pid) in groups and process.status() != psutil.STATUS_ZOMBIE
    return False


def _script(script: Path, arguments: tuple[str, ...], folder: Path, launched: bool) -> tuple[int, str, int]:
    printed = folder / f"printed-{os.environ['RANK']}.txt"
    if not launched:
        for name in _LAUNCHER:
            os.environ.pop(name, None)
    os.chdir(folder)
    _usual_warnings()
    sys.argv, sys.path[:0] = [str(script), *arguments], [str(script.parent)]
    with open(printed, "w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    status = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status, printed.read_text(), os.getpgrp()


def _usual_warnings() -> None:
    """Set Python's own filters of warnings."""
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
