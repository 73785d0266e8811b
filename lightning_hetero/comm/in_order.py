"""A thread that does what it is given in the order of the calls, and futures for the outcomes."""

import queue
from typing import Any

from torch.futures import Future


def serve(work: "queue.SimpleQueue[Any]") -> None:
    """Call what comes, one after the other, until ``None`` comes; for a thread."""
    while (task := work.get()) is not None:
        task()
        del task


def value_or_error(done: Future[Any]) -> Any:
    """The value of a future, or the error that it holds: one with an error of Python's own is a mere value to DDP."""
    value = done.value()
    if isinstance(value, BaseException):
        raise value
    return value
