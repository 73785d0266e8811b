"""Threads of this package, which must be over when the process ends."""

import ast
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import lightning_hetero
from lightning_hetero.comm.threads import abort_too, exclude_from_abort

PACKAGE = Path(lightning_hetero.__file__).parent
#: They only look at clocks and at Python's threads, which they wake up, or they end the process.
HARMLESS = {"failure-news", "leave-devices"}


def names() -> dict[str, str]:
    """The name of each thread, as the source has it, with its file."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "threading.Thread":
                name = next((word.value for word in node.keywords if word.arg == "name"), None)
                found[f"{file.relative_to(PACKAGE)}:{node.lineno}"] = ast.unparse(name) if name else ""
    return found


def test_the_process_waits_for_all_threads_that_may_be_within_gloo_or_a_store() -> None:
    """A thread that is in C++ when the interpreter ends aborts the process: "terminate called ..."."""
    threads = names()
    assert len(threads) > 10
    others = {
        place: name
        for place, name in threads.items()
        if not name.strip("f'\"").startswith(("hetero-", "{THREADS}")) and ast.literal_eval(name) not in HARMLESS
    }
    assert others == {}


@pytest.mark.parametrize("register", [abort_too, exclude_from_abort])
def test_a_child_process_does_not_keep_a_socket_open(register: Callable[[socket.socket], None]) -> None:
    ours, theirs = socket.socketpair()
    register(ours)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60.0,), daemon=True)
    child.start()
    os.close(ours.detach())  # as the kernel closes it where this process is killed
    theirs.settimeout(20.0)
    assert theirs.recv(1) == b""
    theirs.close()
    child.kill()
    child.join()
