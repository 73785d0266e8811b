"""Which exchanges have counted, for peers that are in doubt about one."""

import threading


class Ledger:
    """Remembers, for each peer, the latest of its exchanges that has counted here.

    Peers number the exchanges that they ask for. If the last message of one is lost, the peer asks whether it has
    counted. If the answer is no, the exchange never counts afterwards.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted: dict[int, float] = {}
        self._void: dict[int, float] = {}

    def count(self, peer: int, number: float) -> bool:
        """Count an exchange, unless the peer was told that it has not counted. Returns whether it counts."""
        with self._lock:
            if number <= self._void.get(peer, -1.0):
                return False
            self._counted[peer] = number
            return True

    def settle(self, peer: int, number: float) -> bool:
        """Whether an exchange has counted. If not, it never will."""
        with self._lock:
            if number <= self._counted.get(peer, -1.0):
                return True
            self._void[peer] = number
            return False
