"""What has counted, so that who is in doubt about an exchange can find out."""

import threading


class Ledger:
    """Of each peer, the latest of its exchanges with this one that has counted here.

    Peers number the exchanges for which they ask. If the last word of one is lost, they ask again whether it has
    counted; once they have been told that it has not, it never will.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted: dict[int, float] = {}
        self._void: dict[int, float] = {}

    def count(self, peer: int, number: float) -> bool:
        """Let an exchange count, unless the peer has been told that it does not."""
        with self._lock:
            if number <= self._void.get(peer, -1.0):
                return False
            self._counted[peer] = number
            return True

    def settle(self, peer: int, number: float) -> bool:
        """Whether an exchange has counted; if not, it never will."""
        with self._lock:
            if number <= self._counted.get(peer, -1.0):
                return True
            self._void[peer] = number
            return False
