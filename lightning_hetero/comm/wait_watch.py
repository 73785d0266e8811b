"""Says where all ranks are when one waits for long, and lets signals end a wait."""

import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from lightning_hetero.comm import waits
from lightning_hetero.comm.leaving import close_at_exit, cut
from lightning_hetero.comm.waits import Place

LONG = 30.0  # seconds of a wait after which the user is told, and told again
_ANSWER = 2.0  # seconds in which a rank says where it is
_MOMENT = 0.3  # seconds in which Python handles a signal by itself, unless it waits outside of Python
_PATIENCE = 10.0  # seconds from SIGTERM to the end of a wait in which ranks are in different places
_TRANSFER = 60.0  # the same, if all of them wait in one place: they may be sending
_SHOWN = 8  # ranks of one place, and places, that a notice names
_ANSWERS_NOT = Place(None, "does not answer")


class WaitWatch:
    """Watches for long waits of the thread that has made it, on a thread of its own.

    Args:
        rank: this process.
        world: number of ranks.
        number: gives the number by which users know a rank.
        seconds: in which a wait ends with an error.

    Attributes:
        stopped: which signal has ended a wait, in a sentence; empty: none has.
    """

    def __init__(self, rank: int, world: int, number: Callable[[int], int], seconds: float) -> None:
        self._rank, self._world, self._number = rank, world, number
        self._long = min(LONG, seconds / 3)
        self._watched = threading.get_ident()
        self._wait: object = None  # in which the watched thread is
        self._began = 0.0  # when it was first seen in it
        self._asked = 0.0  # when a rank has last asked where all are
        self._places: dict[int, Place] = {}  # of the other ranks, as they have answered
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
            tell: sends a message to other ranks; see :meth:`~lightning_hetero.comm.failure_watch.Failures.tell`.
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
        """Where all ranks were when the last notice was given; empty: there is none since then, or of late."""
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
            wait, text, batch = waits.place(self._watched)
            self._tell(to=rank, about="place", place=(wait is not None, text[:300], batch[:100]))
        elif message["about"] == "place":
            waiting, *rest = message["place"]
            self._places[rank] = Place(waiting or None, *rest)
        else:
            self._notice, self._noticed = message["text"], time.monotonic()

    def _everyone(self) -> dict[int, Place]:
        """Where all ranks are."""
        with self._asking:
            self._places = {}
            self._asked = began = time.monotonic()
            self._tell(about="ask")
            while len(self._places) < self._world - 1 and time.monotonic() < began + _ANSWER and not self._closed:
                time.sleep(0.02)
            answers = {self._rank: waits.place(self._watched), **self._places}
        return {rank: answers.get(rank, _ANSWERS_NOT) for rank in range(self._world)}

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
                wait, now = waits.place(self._watched).wait, time.monotonic()
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
            me = self._number(self._rank)
            print(
                f"lightning_hetero: rank {me} has waited {seconds:.0f} s. {self._notice}", file=sys.stderr, flush=True
            )
        self._tell(about="notice", text=self._notice)

    def _in_words(self, everyone: Mapping[int, Place]) -> str:
        at: dict[str, list[int]] = {}
        for rank, (_, text, batch) in everyone.items():
            at.setdefault(text + (batch and f" ({batch})"), []).append(self._number(rank))
        places = [_said(ranks, text) for text, ranks in list(at.items())[:_SHOWN]]
        more = [f"{len(at) - _SHOWN} more places"] if len(at) > _SHOWN else []
        different = len({place.text for place in everyone.values() if place.wait is not None}) > 1
        return ", ".join(places + more) + (": was it called on one rank only?" if different else ".")

    def _handle(self, signum: int, wait: object, since: float) -> None:
        """End the wait in which a signal has come: Python handles signals only after it."""
        waited = time.monotonic() - since
        if wait != waits.place(self._watched).wait:
            self._signal = None
        elif signum == signal.SIGINT:
            if waited >= _MOMENT:
                self._end(f"Ctrl-C (SIGINT) has ended the wait; {waits.place(self._watched).text}.")
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
        cut()


def _said(ranks: list[int], text: str) -> str:
    verb, _, rest = text.partition(" ")
    if len(ranks) == 1:
        return f"rank {ranks[0]} {text}"
    numbers = ", ".join(map(str, ranks[:_SHOWN])) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
    return f"ranks {numbers} { {'waits': 'wait', 'is': 'are', 'does': 'do', 'has': 'have'}[verb] } {rest}"
