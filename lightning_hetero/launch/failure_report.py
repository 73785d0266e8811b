"""Report of a failure on the terminal: the traceback of the rank that failed first, and a line for each other one."""

import io
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, suppress
from types import TracebackType

import torch.distributed as dist

from lightning_hetero.comm import failures
from lightning_hetero.comm.waits import is_of_user
from lightning_hetero.errors import CommunicationError, HeteroError, MembershipLostError
from lightning_hetero.launch.environment import hostname

_PATIENCE = 5.0  # seconds for which a line waits for the traceback that explains it
_LAST = 6  # frames of libraries that are shown, from where the error was raised
_MARK = "_lightning_hetero_rank"  # the attribute of an error with the rank that has raised it, as number and in words


def report_if_uncaught(error: BaseException, observe: Callable[[], None] | None = None) -> None:
    """Let an error be printed as one part of the job's report, if nothing catches it.

    What others have put into ``sys.excepthook`` is called all the same; what it prints is left out.

    Args:
        error: of this rank, in a fit, validation, test or prediction.
        observe: says how other processes of this machine have ended, if this process has started some.
    """
    global _observe
    if not failures.watched() or dist.get_world_size() == 1:
        return
    with suppress(AttributeError, TypeError):  # of a class that does not let it
        setattr(error, _MARK, (failures.number(dist.get_rank()), f"{failures.this_rank()} on {hostname()}"))
    _observe, before = observe, sys.excepthook
    if getattr(before, "__module__", "") == __name__:
        return

    def hook(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if (mark := getattr(raised, _MARK, None)) is None:
            before(kind, raised, trace)
            return
        with redirect_stderr(io.StringIO()):
            before(kind, raised, trace)
        sys.stderr.write(_report(raised, *mark))
        sys.stderr.flush()
        failures.announce("told", "")

    sys.excepthook = hook


_observe: Callable[[], None] | None = None


def _report(error: BaseException, me: int, who: str) -> str:
    """This rank's part of the report, once that of the rank that failed first is on the terminal."""
    known = failures.errors()
    if getattr(error, "on_every_rank", False):
        first = failures.number(min(getattr(error, "of_ranks", ()), default=0))
        if first != me:
            failures.told(first, _PATIENCE)
            return f"lightning_hetero: {who} ended with the same error as rank {first}.\n"
    elif isinstance(error, CommunicationError) or failures.is_communication_error(error):
        cause = failures.first_failure(0.0)
        if cause is not None and not isinstance(error, MembershipLostError):
            if _observe is not None:
                _observe()
            first = cause.rank if cause.kind == "failed" else 0  # which knows how its own processes have ended
            if first != me:
                failures.told(first, _PATIENCE)
            return f"lightning_hetero: {who} ended because {cause}.\n"
    elif known and known[0].rank != me:
        failures.told(known[0].rank, _PATIENCE)
        if known[0].how in [one.how for one in known if one.rank == me]:
            return f"lightning_hetero: {who} ended with the same error as rank {known[0].rank}.\n"
        return f"lightning_hetero: {who} failed, too, with {_short(error)}. Its traceback: {_written(error, me)}\n"
    _tell_torchrun(error, who)
    text, whole = _relevant(error)
    left = (
        "" if whole else f"Frames of Lightning, PyTorch and lightning_hetero are left out; all: {_written(error, me)}\n"
    )
    return f"lightning_hetero: {who} failed:\n{text}{left}"


def _short(error: BaseException) -> str:
    """An error in a line, with its place in the user's program."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_of_user(frame):
            place = f" ({os.path.basename(frame.f_code.co_filename)}:{line})"
    return traceback.format_exception_only(error)[-1].strip().split("\n")[0] + place


def _relevant(error: BaseException) -> tuple[str, bool]:
    """The traceback of an error without the frames between those of the user's program, and whether it is whole.

    Frames of libraries stay where the error was raised in one that the user's program has called, unless the error says
    all by itself.
    """
    report, whole = traceback.TracebackException.from_exception(error), True
    for one, its in _chain(report, error):
        users = [is_of_user(frame) for frame, _ in traceback.walk_tb(its.__traceback__)]
        last = max((number for number, user in enumerate(users) if user), default=-1)
        begin = len(users) if isinstance(its, HeteroError) else max(last + 1, len(users) - _LAST)
        shown = [user or number >= begin for number, user in enumerate(users)]
        one.stack = traceback.StackSummary.from_list(
            [frame for frame, show in zip(one.stack, shown, strict=True) if show]
        )
        whole = whole and all(shown)
    return "".join(report.format()), whole


def _chain(
    report: traceback.TracebackException, error: BaseException
) -> Iterator[tuple[traceback.TracebackException, BaseException]]:
    """An error and those that it came from, each with its part of a report."""
    yield report, error
    parts = [(report.__cause__, error.__cause__), (report.__context__, error.__context__)]
    parts += zip(getattr(report, "exceptions", None) or (), getattr(error, "exceptions", ()), strict=False)
    for one, its in parts:
        if one is not None and its is not None:
            yield from _chain(one, its)


def _written(error: BaseException, rank: int) -> str:
    """The file to which the whole traceback was written; or why it was not."""
    try:
        number, path = tempfile.mkstemp(prefix=f"lightning_hetero_rank{rank}_", suffix=".txt")
        with open(number, "w") as file:
            file.writelines(traceback.format_exception(error))
    except OSError as problem:
        return f"not written ({problem})"
    return path


def _tell_torchrun(error: BaseException, who: str) -> None:
    """Write the error for torchrun's own report, unless the user's program has."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not os.path.exists(path):
        message = f"{_short(error)}: the traceback of {who} is above"
        with suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}, file)
