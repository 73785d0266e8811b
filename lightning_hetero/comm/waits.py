"""Watchdog of long waits: the collectives in which threads wait, and the lines of the user's program that led there."""

import functools
import inspect
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_hetero.comm.threads import THREADS, abort_sockets, close_at_exit

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


class ThreadPlace(NamedTuple):
    """Place of a thread in the user's program.

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


def never() -> bool:
    """Whether a thread still works that only waits."""
    return False


@contextmanager
def waiting(what: str, busy: Callable[[], bool] = never) -> Iterator[None]:
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
    """The times at which the threads that wait began to, by ``time.monotonic()``."""
    return [first.since for mine in list(_waits.values()) for first in mine[:1]]  # each may end meanwhile


def here() -> tuple[str, str]:
    """The wait of this thread, and the call that has led to it; empty where unknown."""
    mine = _waits.get(threading.get_ident())
    return mine[-1].what if mine else "", _call(sys._getframe(1))


def describe_batch_by(batch: Callable[[], str]) -> None:
    """Let a function say which batch is processed; empty: none is."""
    global _batch
    _batch = batch


def place(thread: int) -> ThreadPlace:
    """The place of a thread of this process.

    Args:
        thread: its identifier.
    """
    mine, frame = list(_waits.get(thread, ())), sys._current_frames().get(thread)
    if frame is None:
        return ThreadPlace(None, "has ended")
    call = _call(frame) or "its program"
    if mine and not mine[-1].busy():
        return ThreadPlace((mine[-1].what, mine[-1].since), f"waits in {call} to {mine[-1].what}", _batch())
    if not mine and frame.f_globals.get("__name__", "").startswith("torch.distributed"):  # a collective of the user's
        return ThreadPlace((id(frame), frame.f_lasti), f"waits in {call}", _batch())
    return ThreadPlace(None, f"is in {call}", _batch())


def _call(frame: FrameType | None) -> str:
    """The call of the user's program in which a frame is: what it has called, file and line; empty: there is none."""
    called = ""
    while frame is not None:
        code = frame.f_code
        if is_of_user(frame):
            return f"{called or code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
        if not code.co_name.startswith(("_", "<")) and "wrapper" not in code.co_name:
            called = code.co_name
        frame = frame.f_back
    return ""


def is_of_user(frame: FrameType) -> bool:
    """Whether a frame is of the user's program, or of a package that it uses beside PyTorch and Lightning."""
    return frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES


def caller() -> str:
    """The library's function that has called the function which asks; empty: a function of the user's."""
    frame = sys._getframe(2)
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return frame.f_code.co_name if package in _LIBRARIES else ""


LONG = 30.0  # seconds of a wait after which the user is told, and told again
_ANSWER = 2.0  # seconds in which a rank says where it is
_MOMENT = 0.3  # seconds in which Python handles a signal by itself, unless it waits outside of Python
_PATIENCE = 10.0  # seconds from SIGTERM to the end of a wait in which ranks are in different places
_TRANSFER = 60.0  # the same, if all of them wait in one place: they may be sending
_SHOWN = 8  # ranks of one place, and places, that a notice names
_ANSWERS_NOT = ThreadPlace(None, "does not answer")


class WaitWatchdog:
    """Watches for long waits of the thread that has made it, on a thread of its own.

    Args:
        rank: this process.
        ranks: all, by the numbers by which users know them.
        seconds: in which a wait ends with an error.

    Attributes:
        ranks: those that remain.
        stopped: which signal has ended a wait, in a sentence; empty: none has.
    """

    def __init__(self, rank: int, ranks: Sequence[int], seconds: float) -> None:
        self._rank, self.ranks = rank, ranks
        self._long = min(LONG, seconds / 3)
        self._watched = threading.get_ident()
        self._wait: object = None  # in which the watched thread is
        self._began = 0.0  # when it was first seen in it
        self._asked = 0.0  # when a rank has last asked where all are
        self._places: dict[int, ThreadPlace] = {}  # of the other ranks, as they have answered
        self._asking = threading.Lock()
        self._notice, self._noticed = "", 0.0
        self._signal: tuple[int, object, float] | None = None  # its number, the wait in which it has come, and when
        self.stopped = ""
        self._tell: Callable[..., None] = lambda **_: None
        self._signals: socket.socket | None = None  # numbers of signals come from here
        self._writes: socket.socket | None = None
        self._closed = False

    def begin(self, tell: Callable[..., None]) -> None:
        """Begin to watch.

        Args:
            tell: sends a message to other ranks; see :meth:`~lightning_hetero.comm.membership.Membership.tell`.
        """
        self._tell = tell
        self._signals, self._writes = socket.socketpair()
        self._writes.setblocking(False)
        with suppress(ValueError):  # only the main thread can
            former = signal.set_wakeup_fd(self._writes.fileno(), warn_on_full_buffer=False)
            if former != -1:
                signal.set_wakeup_fd(former)
        close_at_exit(self)
        threading.Thread(target=self._run, args=(self._signals,), name="hetero-waits", daemon=True).start()

    def close(self) -> None:
        """End; idempotent."""
        self.leave_signals()
        self._closed = True
        if self._signals is not None:
            with suppress(OSError):  # it is closed already
                self._signals.shutdown(socket.SHUT_RDWR)

    def leave_signals(self) -> None:
        """Hear of signals no more: this watch ends, or this is a child process, which has signals of its own."""
        if self._writes is None:
            return
        try:
            former = signal.set_wakeup_fd(-1)
        except ValueError:  # not the main thread: signals go there on, and it must not become another file's number
            self._writes.detach()
        else:
            if former not in (-1, self._writes.fileno()):
                signal.set_wakeup_fd(former)
            self._writes.close()
        self._writes = None

    def places(self, since: float | None = None) -> str:
        """Places of all ranks when the last notice was given; empty: there is none since then, or of late."""
        since = time.monotonic() - 1.5 * self._long if since is None else since
        return self._notice if self._noticed >= since else ""

    def waiting(self) -> set[int]:
        """The other ranks that wait for others now; on any thread."""
        return {rank for rank, place in self._everyone().items() if rank != self._rank and place.wait is not None}

    # -- messages ----------------------------------------------------------------------------------

    def heard(self, message: Mapping) -> None:
        """Another rank asks where this one is, or answers, or gives a notice."""
        rank = message["by"]
        if message["about"] == "ask":
            self._asked = time.monotonic()
            wait, text, batch = place(self._watched)
            self._tell(to=rank, about="place", place=(wait is not None, text[:300], batch[:100]))
        elif message["about"] == "place":
            waiting, *rest = message["place"]
            self._places[rank] = ThreadPlace(waiting or None, *rest)
        else:
            self._notice, self._noticed = message["text"], time.monotonic()

    def _everyone(self) -> dict[int, ThreadPlace]:
        """Places of all ranks."""
        with self._asking:
            self._places = {}
            self._asked = began = time.monotonic()
            self._tell(about="ask")
            while len(self._places) < len(self.ranks) - 1 and time.monotonic() < began + _ANSWER and not self._closed:
                time.sleep(0.02)
            answers = {self._rank: place(self._watched), **self._places}
        return {rank: answers.get(rank, _ANSWERS_NOT) for rank in self.ranks}

    # -- the thread --------------------------------------------------------------------------------

    def _run(self, signals: socket.socket) -> None:
        with signals:
            while not self._closed:
                signals.settimeout(self._long / 10 if self._signal is None else _MOMENT)
                numbers = b""
                with suppress(OSError):
                    numbers = signals.recv(64)
                if self._closed:
                    return
                wait, now = place(self._watched).wait, time.monotonic()
                if wait is None or wait != self._wait:
                    self._wait, self._began = wait, now
                for signum in numbers:
                    if signum in (signal.SIGINT, signal.SIGTERM) and wait is not None:
                        self._signal = signum, wait, now
                if self._signal is not None:
                    self._handle(*self._signal)
                elif wait is not None and now - max(self._began, self._asked) >= self._long:
                    self._say(now - self._began)

    def _say(self, seconds: float) -> None:
        everyone = self._everyone()
        self._notice, self._noticed = self._in_words(everyone), time.monotonic()
        with suppress(OSError, ValueError):  # nobody reads
            text = f"lightning_hetero: rank {self._rank} has waited {seconds:.0f} s. {self._notice}"
            print(text, file=sys.stderr, flush=True)
        self._tell(about="notice", text=self._notice)

    def _in_words(self, everyone: Mapping[int, ThreadPlace]) -> str:
        at: dict[str, list[int]] = {}
        for rank, (_, text, batch) in everyone.items():
            at.setdefault(text + (batch and f" ({batch})"), []).append(rank)
        places = [_said(ranks, text) for text, ranks in list(at.items())[:_SHOWN]]
        more = [f"{len(at) - _SHOWN} more places"] if len(at) > _SHOWN else []
        different = len({place.text for place in everyone.values() if place.wait is not None}) > 1
        return ", ".join(places + more) + (": was it called on one rank only?" if different else ".")

    def _handle(self, signum: int, wait: object, since: float) -> None:
        """End the wait in which a signal has come: Python handles signals only after it."""
        waited = time.monotonic() - since
        if wait != place(self._watched).wait:
            self._signal = None
        elif signum == signal.SIGINT:
            if waited >= _MOMENT:
                self._end(f"Ctrl-C (SIGINT) has ended the wait; {place(self._watched).text}.")
        elif waited >= _PATIENCE and time.monotonic() - self._asked >= _ANSWER:
            everyone = self._everyone()
            works = any(place.wait is None and place != _ANSWERS_NOT for place in everyone.values())
            if not works and (len({place.text for place in everyone.values()}) > 1 or waited >= _TRANSFER):
                self._end(
                    f"SIGTERM came, and after {waited:.0f} s all ranks still waited for each other, so that they could "
                    f"not stop together and save. {self._in_words(everyone)}"
                )

    def _end(self, why: str) -> None:
        self._signal, self.stopped = None, why
        abort_sockets()


def _said(ranks: list[int], text: str) -> str:
    verb, _, rest = text.partition(" ")
    if len(ranks) == 1:
        return f"rank {ranks[0]} {text}"
    numbers = ", ".join(map(str, ranks[:_SHOWN])) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
    return f"ranks {numbers} { {'waits': 'wait', 'is': 'are', 'does': 'do', 'has': 'have'}[verb] } {rest}"


#: Given the name of a collective and its group, ``None`` for all ranks, returns a block in which it is called.
Notice = Callable[[str, dist.ProcessGroup | None], AbstractContextManager[Any]]

_COLLECTIVES = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "reduce"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
)

_noticing: list[tuple[int, Notice]] = []  # the blocks that are open, each with its thread


@contextmanager
def observe_collectives(notice: Notice) -> Iterator[None]:
    """Notice the collectives that are called in this block, by its thread or by a backward pass.

    Seen are those that are called as ``torch.distributed.all_reduce(...)``, as SyncBatchNorm, torchmetrics and
    ``torch.distributed.nn`` do; not those of a name imported before, nor in compiled code.

    Args:
        notice: is asked for each. Of nested blocks, the innermost one's is.
    """
    _noticing.append((threading.get_ident(), notice))
    names, former = vars(dist), {}
    if len(_noticing) == 1:
        former = {name: names[name] for name in _PLACES}
        names.update({name: _observed(name, function) for name, function in former.items()})
    try:
        yield
    finally:
        _noticing.pop()
        for name, function in former.items():
            if names[name] is _observed(name, function):  # nobody has put another one there meanwhile
                names[name] = function


def is_world(group: dist.ProcessGroup | None) -> bool:
    """Whether a group is that of all ranks, as which ``None`` counts."""
    return group is None or group is dist.group.WORLD


#: Of each collective, the place of its group among its arguments.
_PLACES = {
    name: list(inspect.signature(vars(dist)[name]).parameters).index("group")
    for name in _COLLECTIVES
    if name in vars(dist)
}


@functools.lru_cache(maxsize=256)
def _observed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    place = _PLACES[name]

    @functools.wraps(function)
    def noticed(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not (innermost := _noticing[-1:]):  # it may end meanwhile
            return function(*args, **kwargs)
        [(thread, notice)] = innermost
        here = threading.current_thread()
        # Autograd's threads are not Python's own.
        if here.ident != thread and not (isinstance(here, threading._DummyThread) and THREADS not in here.name):
            return function(*args, **kwargs)
        group = kwargs.get("group", args[place] if len(args) > place else None)
        with notice(name, group):
            return function(*args, **kwargs)

    return noticed
