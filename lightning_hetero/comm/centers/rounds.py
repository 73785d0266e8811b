"""Rounds of a center: when a round closes, whose push-pulls move the center together."""

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple


class Quorum(NamedTuple):
    """Condition on which a round closes.

    Attributes:
        arrivals: push-pulls that a round waits for.
        patience: how much longer it waits for the others, as a part of the time that rounds take to come to a quorum.
    """

    arrivals: int
    patience: float


class RoundClock:
    """Clock of a part's rounds: says when the open one closes.

    A round closes as soon as all replicas have come to it, or its patience ends. Not thread-safe.

    Args:
        quorum: condition on which rounds close.
        replicas: number of replicas that come.
        clock: returns seconds; for tests.
    """

    def __init__(self, quorum: Quorum, replicas: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._quorum, self._replicas, self._clock = quorum, replicas, clock
        self._took = deque[float](maxlen=16)  # seconds that the latest rounds took to come to a quorum
        self.begin()

    def begin(self) -> None:
        """A round opens."""
        self._began = self._clock()
        self._closes: float | None = None  # when its patience ends

    def seconds_left(self, arrivals: int) -> float | None:
        """Seconds until the round closes, at least 0; ``None``: it waits for a quorum.

        Args:
            arrivals: push-pulls of this round so far.
        """
        if arrivals < min(self._quorum.arrivals, self._replicas):
            return None
        now = self._clock()
        if self._closes is None:
            self._took.append(now - self._began)
            self._closes = now + self._quorum.patience * median(self._took)
        return 0.0 if arrivals >= self._replicas else max(self._closes - now, 0.0)
