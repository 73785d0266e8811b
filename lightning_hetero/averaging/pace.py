"""How long an exchange takes, in steps."""

import math
import time
from collections import deque
from statistics import median


class Pace:
    """Times the steps between exchanges, and the exchanges.

    Attributes:
        lasted: the latest exchange's duration, in steps; NaN before the first.
    """

    def __init__(self) -> None:
        self.lasted = math.nan
        self._steps: deque[float] = deque(maxlen=16)  # seconds; the median leaves out validation and the like
        self._resumed = math.nan

    def pause(self) -> None:
        """A step has been taken."""
        seconds = time.perf_counter() - self._resumed
        if math.isfinite(seconds):
            self._steps.append(seconds)

    def resume(self) -> None:
        """The next step may begin."""
        self._resumed = time.perf_counter()

    def exchanged(self, seconds: float) -> None:
        """An exchange took so long."""
        if self._steps:
            self.lasted = seconds / median(self._steps)
