"""Exit of a process that holds groups of GPUs (NCCL), after a rank has failed.

NCCL does not notice that a rank has died: what waits for it on a GPU waits until the group's timeout, and PyTorch then
aborts the process without a traceback. Nor can such a group be destroyed: that waits for what is pending in it. So a
process that holds one, and hears of a failure in a fit, says what has failed, and leaves.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

#: Seconds from the news of another rank's failure until this process leaves. Within them it may get an error by itself.
GRACE = 10.0
#: Seconds that a process with an error of its own has for what callbacks save then.
MESSAGE_SECONDS = 60.0

_state_lock = threading.Lock()
_holds = False  # whether there has been a group of devices in this process
_fit: object | None = None  # the fit that runs
#: When this process leaves, by the monotonic clock, and says why; nothing: it need not.
_exit_plan: tuple[float, Callable[[], str | None]] | None = None
_any_failed = False  # whether there was a failure, here or elsewhere: groups are not destroyed any more
_status: int | None = None  # of this process, once an error has come to its top


def holds_devices() -> None:
    """There is a process group of devices in this process now."""
    global _holds
    if not _holds:
        _holds, before = True, sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
            global _any_failed, _status
            _any_failed, _status = True, 130 if issubclass(kind, KeyboardInterrupt) else 1
            return before(kind, error, trace)

        sys.excepthook = hook


def begin_fit() -> None:
    """A fit begins, in which this process may have to leave."""
    global _fit, _exit_plan
    with _state_lock:
        _fit, _exit_plan = object(), None


def end_fit() -> None:
    """A fit has ended, or has been left. Idempotent."""
    global _fit, _exit_plan
    with _state_lock:
        _fit = _exit_plan = None


def another_failed(why: Callable[[], object | None]) -> None:
    """Another rank has failed, or its process has ended.

    Args:
        why: says in words what has failed, when it is asked; ``None``: nothing that concerns the fit.
    """

    def says() -> str | None:
        if (failure := why()) is None:
            return None
        return (
            f"CommunicationError: {failure}. This process holds process groups of devices (NCCL), which cannot be "
            "left while they wait for a lost rank, so it ends here. Start again from the last checkpoint."
        )

    _leave(GRACE, says)


def this_one_failed(error: BaseException) -> None:
    """This rank ends with an error; what it does on its way out may wait for others forever."""
    global _any_failed
    _any_failed = True
    text = "".join(traceback.format_exception(error))
    _leave(
        MESSAGE_SECONDS,
        lambda: f"{text}This process holds process groups of devices (NCCL), and could not end by itself.",
    )


def may_destroy_groups() -> bool:
    """Whether process groups of devices can be destroyed: not after a failure."""
    return not _any_failed


def leave_at_exit() -> None:
    """At the end of a process: leave without the destructors of groups, if an error ends it."""
    if _holds and _status is not None:
        _exit(_status)


def _leave(seconds: float, says: Callable[[], str | None]) -> None:
    global _exit_plan, _any_failed
    if not _holds:
        return
    with _state_lock:
        if _fit is None:
            return
        _any_failed = True
        runs, fit = _exit_plan is not None, _fit
        if not runs or seconds > GRACE:  # an error of this rank's own is the better one
            _exit_plan = time.monotonic() + seconds, says
    if not runs:
        threading.Thread(target=_wait_and_leave, args=(fit,), name="leave-devices", daemon=True).start()


def _wait_and_leave(fit: object) -> None:
    while True:
        with _state_lock:
            if fit is not _fit or _exit_plan is None:
                return
            at, says = _exit_plan
        if time.monotonic() >= at and (text := says()) is not None:  # not under the lock: it asks who tells of failures
            print(text, file=sys.stderr)
            _exit(1)
        time.sleep(0.1)


def _exit(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(status)
