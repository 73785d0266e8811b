"""Whom a peer asks for an exchange, and when."""

import random
import time
from collections.abc import Sequence

ANY = -1.0  # round of those who exchange with whoever comes
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.1  # seconds until somebody is asked again
_SECOND_ASKS = 1.0  # seconds until the second of a pair asks by itself, or half a deadline


class Agenda:
    """One offer's questions: those who have asked in vain first, those who were missed lately last, or not at all.

    Pauses double: whoever has been asked in vain asks by itself as soon as it has something to offer.

    Args:
        me: this peer.
        limit: seconds within which a message must be answered.

    Attributes:
        turn: round of the offer.
        whom: peers to ask.
        awaits: whether it is worth waiting for somebody.
    """

    def __init__(self, me: int, limit: float) -> None:
        self._me, self._limit = me, limit
        self.turn, self.whom, self.awaits = ANY, list[int](), True
        self._wanted: dict[int, float] = {}  # peers that have asked in vain, with their round
        self._shunned: dict[int, float] = {}  # until when a peer that did not answer in time is rather not asked again
        self._pause, self._at = _FIRST_PAUSE, 0.0

    def begin(self, whom: Sequence[int], turn: float) -> None:
        """A new offer. Of a pair in a round, the second leaves the asking to the first, for a while.

        Who did not answer in time is not asked for some rounds, or each of them would take as long as that.
        """
        asked = whom if turn == ANY else [peer for peer in whom if not self._shuns(peer)]
        self.whom, self.turn, self._pause = list(asked), turn, _FIRST_PAUSE
        self.awaits = bool(asked) or not whom
        second = turn != ANY and self._me > max(whom, default=-1) and not self._wanting()
        self._at = time.monotonic() + (min(self._limit / 2, _SECOND_ASKS) if second else 0.0)

    def early(self) -> float:
        """Seconds until somebody should be asked."""
        return self._at - time.monotonic()

    def choose(self) -> int:
        """A peer to ask."""
        well = [peer for peer in self.whom if not self._shuns(peer)]
        peer = random.choice(self._wanting() or well or self.whom)
        self.met(peer)
        return peer

    def in_vain(self, peer: int, missed: bool, late: bool = False) -> None:
        """A peer that was asked did not want to, or was missed; maybe because it did not answer in time."""
        if late or (missed and self.turn == ANY):
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

    def heard(self, peer: int) -> None:
        """A peer has asked, in vain or not: it is awake."""
        self._shunned.pop(peer, None)

    def _shuns(self, peer: int) -> bool:
        return self._shunned.get(peer, 0.0) > time.monotonic()

    def _wanting(self) -> list[int]:
        return [peer for peer in self.whom if self._wanted.get(peer) == self.turn]
