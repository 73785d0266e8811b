"""Chooses which peer to ask for an exchange, and when."""

import random
import time
from collections.abc import Container, Sequence

ANY = -1.0  # round of an offer that any peer may take, whatever its own round
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.1  # seconds between two questions
_SECOND_ASKS = 1.0  # seconds until the second of a pair asks by itself; at most half a deadline


class PeerSelector:
    """Chooses peers for one offer at a time: those that asked this peer without success first, then any at random.

    After each refusal it waits longer before it asks again (backoff). Little is lost by that: a peer that refused asks
    by itself as soon as it has something to offer.

    Args:
        me: this peer.
        limit: seconds within which a message must be answered.
        there: peers that can be reached.

    Attributes:
        round_number: of the offer.
        candidates: peers of the offer, including those that cannot be reached.
    """

    def __init__(self, me: int, limit: float, there: Container[int]) -> None:
        self._me, self._limit, self._there = me, limit, there
        self.round_number, self.candidates = ANY, list[int]()
        self._wanted: dict[int, float] = {}  # peers that asked without success, with their round
        self._pause, self._at = _FIRST_PAUSE, 0.0

    def begin(self, candidates: Sequence[int], round_number: float) -> None:
        """Begin a new offer. In a round, the second peer of a pair first waits for the question of the first."""
        self.candidates, self.round_number, self._pause = list(candidates), round_number, _FIRST_PAUSE
        second = round_number != ANY and self._me > max(candidates, default=-1) and not self._wanting()
        self._at = time.monotonic() + (min(self._limit / 2, _SECOND_ASKS) if second else 0.0)

    @property
    def asked(self) -> list[int]:
        """The peers of the offer that can be reached."""
        return [peer for peer in self.candidates if peer in self._there]

    @property
    def awaits(self) -> bool:
        """Whether the offer can still be taken: some of its peers can be reached, or any peer may take it."""
        return not self.candidates or bool(self.asked)

    def early(self) -> float:
        """Seconds until the next question is due."""
        return self._at - time.monotonic()

    def choose(self) -> int | None:
        """A peer to ask now; ``None``: no peer can be reached."""
        if not (asked := self._wanting() or self.asked):
            return None
        peer = random.choice(asked)
        self.met(peer)
        return peer

    def back_off(self, missed: bool) -> None:
        """Wait longer before the next question.

        Args:
            missed: whether the exchange failed; otherwise the peer refused it.
        """
        if not self._wanting():
            self._pause = _LONGEST_PAUSE if missed else min(2 * self._pause, _LONGEST_PAUSE)
            self._at = max(self._at, time.monotonic() + random.uniform(0.5, 1.0) * self._pause)

    def wants(self, peer: int, round_number: float) -> None:
        """Remember that a peer asked for a round without success."""
        self._wanted[peer] = round_number

    def met(self, peer: int) -> None:
        """Forget that a peer asked without success."""
        self._wanted.pop(peer, None)

    def _wanting(self) -> list[int]:
        return [peer for peer in self.candidates if self._wanted.get(peer) == self.round_number]
