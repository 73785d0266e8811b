"""Whom a peer asks for an exchange, and when."""

import random
import time
from collections.abc import Sequence

ANY = -1.0  # round of those who exchange with whoever comes
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.1  # seconds until somebody is asked again
_SECOND_ASKS = 1.0  # seconds until the second of a pair asks by itself, or half a deadline


class Agenda:
    """One offer's questions: those who have asked in vain first, those who were missed lately last.

    Pauses double: whoever has been asked in vain asks by itself as soon as it has something to offer.

    Args:
        me: this peer.
        limit: seconds within which a message must be answered.

    Attributes:
        turn: round of the offer.
        whom: peers to ask.
    """

    def __init__(self, me: int, limit: float) -> None:
        self._me, self._limit = me, limit
        self.turn, self.whom = ANY, list[int]()
        self._wanted: dict[int, float] = {}  # peers that have asked in vain, with their round
        self._shunned: dict[int, float] = {}  # until when a peer that was missed is rather not asked again
        self._pause, self._at = _FIRST_PAUSE, 0.0

    def begin(self, whom: Sequence[int], turn: float) -> None:
        """A new offer. Of a pair in a round, the second leaves the asking to the first, for a while."""
        self.whom, self.turn, self._pause = list(whom), turn, _FIRST_PAUSE
        second = turn != ANY and self._me > max(whom, default=-1) and not self._wanting()
        self._at = time.monotonic() + (min(self._limit / 2, _SECOND_ASKS) if second else 0.0)

    def early(self) -> float:
        """Seconds until somebody should be asked."""
        return self._at - time.monotonic()

    def choose(self) -> int:
        """A peer to ask."""
        now = time.monotonic()
        well = [peer for peer in self.whom if self._shunned.get(peer, 0.0) <= now]
        peer = random.choice(self._wanting() or well or self.whom)
        self.met(peer)
        return peer

    def in_vain(self, peer: int, missed: bool) -> None:
        """A peer that was asked did not want to, or was missed."""
        if missed:
            self._shunned[peer] = time.monotonic() + 4 * self._limit
        if not self._wanting():
            self._pause = _LONGEST_PAUSE if missed else min(2 * self._pause, _LONGEST_PAUSE)
            self._at = max(self._at, time.monotonic() + random.uniform(0.5, 1.0) * self._pause)

    def wants(self, peer: int, turn: float) -> None:
        """A peer has asked in vain."""
        self._wanted[peer] = turn

    def met(self, peer: int) -> None:
        """A peer that may have asked in vain does so no longer."""
        self._wanted.pop(peer, None)

    def _wanting(self) -> list[int]:
        return [peer for peer in self.whom if self._wanted.get(peer) == self.turn]
