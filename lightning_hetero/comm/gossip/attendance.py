"""Which peers can be reached: they have neither ended nor fallen silent."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

_DYING = (0.01, 0.05, 0.2, 0.5, 1.0)  # seconds between knocks: a dying process may still accept a connection
_AWAY = 4  # deadlines for which a peer that is late again and again is not asked


class Attendance:
    """Keeps track of which peers can be reached.

    A peer has *ended* once its port refuses a connection. This is known at once, and for good. A peer is *silent* from
    the moment when it did not answer in time until it sends something itself, or answers a knock: a background thread
    knocks again and again. So a frozen peer costs one deadline, however long it stays frozen. A peer that is late twice
    without a successful exchange in between does answer knocks, but is too slow. It is not asked for four deadlines.

    Args:
        knock: connects to a peer and waits for its greeting. Raises an ``OSError`` if none comes within the deadline.
        deadline: seconds within which a peer must answer.
        changed: called when the answer for a peer has changed.
    """

    def __init__(self, knock: Callable[[int], None], deadline: float, changed: Callable[[], None]) -> None:
        self._knock, self._deadline, self._changed = knock, deadline, changed
        self._lock = threading.Lock()
        self._ended: set[int] = set()
        self._silent: dict[int, threading.Event] = {}  # set to stop the thread that knocks
        self._slow: set[int] = set()  # late since the latest successful exchange with them

    def __contains__(self, peer: object) -> bool:
        with self._lock:
            return peer not in self._ended and peer not in self._silent

    def has_ended(self, peer: int) -> bool:
        """Whether a peer's port has refused a connection."""
        with self._lock:
            return peer in self._ended

    def ended(self, peer: int) -> None:
        """A peer's port has refused a connection."""
        with self._lock:
            self._ended.add(peer)
        self._stop_knocking(peer)
        self._changed()

    def late(self, peer: int) -> None:
        """A peer did not answer in time."""
        with self._lock:
            if peer in self._ended or peer in self._silent:
                return
            pause = _AWAY * self._deadline if peer in self._slow else 0.0
            self._slow.add(peer)
            over = self._silent[peer] = threading.Event()
        threading.Thread(
            target=self._knock_until, args=(peer, over, pause), name="hetero-gossip-knocker", daemon=True
        ).start()
        self._changed()

    def heard(self, peer: int) -> None:
        """A peer has sent something."""
        if self._stop_knocking(peer):
            self._changed()

    def met(self, peer: int) -> None:
        """An exchange with a peer has succeeded."""
        with self._lock:
            self._slow.discard(peer)

    def doubt(self, peer: int) -> None:
        """A peer has closed its connection: find out whether it has ended. Blocks."""
        for pause in _DYING:
            with suppress(OSError):
                return self._knock(peer)
            if self.has_ended(peer):
                return
            time.sleep(pause)

    def close(self) -> None:
        """Knock no more; idempotent."""
        with self._lock:
            for over in self._silent.values():
                over.set()

    def _stop_knocking(self, peer: int) -> bool:
        with self._lock:
            over = self._silent.pop(peer, None)
        if over is not None:
            over.set()
        return over is not None

    def _knock_until(self, peer: int, over: threading.Event, pause: float) -> None:
        while not over.wait(pause):
            pause = self._deadline
            try:
                self._knock(peer)
            except OSError:
                continue
            return self.heard(peer)
