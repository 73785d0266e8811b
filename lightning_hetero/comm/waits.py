"""The collectives that the threads of this process wait in, and the lines of the user's program that have led there."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

#: Packages whose frames are passed over on the way to the user's program.
_LIBRARIES = frozenset(
    {"torch", "lightning", "lightning_fabric", "lightning_hetero", "lightning_utilities", "pytorch_lightning"}
    | {"torchmetrics"}
    | sys.stdlib_module_names - {"__main__"}
)


class Wait(NamedTuple):
    """A block in which a thread waits for other ranks.

    Attributes:
        what: completes "rank 1 waits to ...".
        since: when it began, by ``time.monotonic()``.
        busy: whether the thread still works on its own in the block, if it may.
    """

    what: str
    since: float
    busy: Callable[[], bool]


class Place(NamedTuple):
    """Where a thread is.

    Attributes:
        wait: names the wait; equal as long as the thread stays in it. ``None``: it does not wait.
        text: completes "rank 1 ...".
        batch: that is processed, in words; empty: none.
    """

    wait: object
    text: str
    batch: str = ""


_waits: dict[int, list[Wait]] = {}  # of each thread, the innermost last
_batch: Callable[[], str] = str  # which batch is processed, in words


def _never() -> bool:
    return False


@contextmanager
def waiting(what: str, busy: Callable[[], bool] = _never) -> Iterator[None]:
    """In this block the thread waits for other ranks.

    Args:
        what: completes "rank 1 waits to ...".
        busy: whether the thread still works on its own in the block; called on other threads.
    """
    me = threading.get_ident()
    mine = _waits.setdefault(me, [])
    mine.append(Wait(what, time.monotonic(), busy))
    try:
        yield
    finally:
        mine.pop()
        if not mine:
            del _waits[me]


def since() -> list[float]:
    """When the threads that wait began to, by ``time.monotonic()``."""
    return [mine[0].since for mine in list(_waits.values()) if mine]


def here() -> tuple[str, str]:
    """What this thread waits to do, and the call that has led to it; empty where unknown."""
    mine = _waits.get(threading.get_ident())
    return mine[-1].what if mine else "", _call(sys._getframe(1))


def describe_batch_by(batch: Callable[[], str]) -> None:
    """Let a function say which batch is processed; empty: none is."""
    global _batch
    _batch = batch


def place(thread: int) -> Place:
    """Where a thread of this process is.

    Args:
        thread: its identifier.
    """
    mine, frame = list(_waits.get(thread, ())), sys._current_frames().get(thread)
    if frame is None:
        return Place(None, "has ended")
    call = _call(frame) or "its program"
    if mine and not mine[-1].busy():
        return Place((mine[-1].what, mine[-1].since), f"waits in {call} to {mine[-1].what}", _batch())
    if not mine and frame.f_globals.get("__name__", "").startswith("torch.distributed"):  # a collective of the user's
        return Place((id(frame), frame.f_lasti), f"waits in {call}", _batch())
    return Place(None, f"is in {call}", _batch())


def _call(frame: FrameType | None) -> str:
    """The call of the user's program in which a frame is: what it has called, file and line; empty: there is none."""
    called = ""
    while frame is not None:
        code = frame.f_code
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            return f"{called or code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
        if not code.co_name.startswith(("_", "<")) and "wrapper" not in code.co_name:
            called = code.co_name
        frame = frame.f_back
    return ""


def caller() -> str:
    """The library's function that has called the function which asks; empty: a function of the user's."""
    frame = sys._getframe(2)
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return frame.f_code.co_name if package in _LIBRARIES else ""
