"""Whom a peer asks for an exchange, and when."""

import random
import time
from collections.abc import Container, Sequence

ANY = -1.0  # round of those who exchange with whoever comes
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.1  # seconds until somebody is asked again
_SECOND_ASKS = 1.0  # seconds until the second of a pair asks by itself, or half a deadline


class Agenda:
    """One offer's questions: to peers that are there, and first to those who have asked in vain.

    Pauses double: whoever has been asked in vain asks by itself as soon as it has something to offer.

    Args:
        me: this peer.
        limit: seconds within which a message must be answered.
        there: peers that are.

    Attributes:
        turn: round of the offer.
        whom: peers of the offer, there or not.
    """

    def __init__(self, me: int, limit: float, there: Container[int]) -> None:
        self._me, self._limit, self._there = me, limit, there
        self.turn, self.whom = ANY, list[int]()
        self._wanted: dict[int, float] = {}  # peers that have asked in vain, with their round
        self._pause, self._at = _FIRST_PAUSE, 0.0

    def begin(self, whom: Sequence[int], turn: float) -> None:
        """A new offer. Of a pair in a round, the second leaves the asking to the first, for a while."""
        self.whom, self.turn, self._pause = list(whom), turn, _FIRST_PAUSE
        second = turn != ANY and self._me > max(whom, default=-1) and not self._wanting()
        self._at = time.monotonic() + (min(self._limit / 2, _SECOND_ASKS) if second else 0.0)

    @property
    def asked(self) -> list[int]:
        """The peers of the offer that are there."""
        return [peer for peer in self.whom if peer in self._there]

    @property
    def awaits(self) -> bool:
        """Whether it is worth waiting for somebody."""
        return not self.whom or bool(self.asked)

    def early(self) -> float:
        """Seconds until somebody should be asked."""
        return self._at - time.monotonic()

    def choose(self) -> int | None:
        """A peer to ask, if one is there."""
        if not (asked := self._wanting() or self.asked):
            return None
        peer = random.choice(asked)
        self.met(peer)
        return peer

    def in_vain(self, missed: bool) -> None:
        """The peer that was asked did not want to, or was missed."""
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
