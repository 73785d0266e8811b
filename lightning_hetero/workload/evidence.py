"""How fast a rank is, and how far that may be noise.

A rank's time for the same work varies: other programs take its core, clocks change, batches differ. Such noise comes in
states that last for a while, so that many measurements in a row agree and yet say little. Statistics that take them for
independent are sure too soon, and shares follow the noise.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from lightning_hetero.workload.shares import Cost
from lightning_hetero.workload.timer import Lap


class Speed(NamedTuple):
    """A rank's present speed.

    Attributes:
        cost: seconds per batch and per sample.
        noise: how far that may be off by noise, as a fraction.
        since: seconds of steps that this rests on, since the latest change.
    """

    cost: Cost
    noise: float
    since: float


class Evidence:
    """What a rank's own steps tell of its speed.

    Steps are gathered into stretches that are long enough to compare. One lasting change of speed within the memory is
    told from noise: the rank's speed is that since the change. All other ups and downs are noise, and so large is the
    doubt about the speed, however many stretches agree at present.
    """

    #: Seconds that a stretch lasts at least: some turns of an operating system's scheduler, a period of CPU quotas.
    SECONDS = 0.1
    #: Stretches that are remembered.
    MEMORY = 128
    #: A state of the noise lasts for up to so many stretches, so that these together tell no more than one would that
    #: is independent. (On a machine with busy neighbours, states last a second and more.)
    STATE = 16
    #: A rank is never known better than this: a fraction of its time.
    LEAST_NOISE = 0.01
    #: A change of speed is larger than so many times the noise before and after it.
    CHANGE = 2.0

    def __init__(self) -> None:
        self._work = 0.0  # samples of a step, by which stretches are compared
        self._times: deque[float] = deque(maxlen=self.MEMORY)  # seconds for so much work
        self._seconds: deque[float] = deque(maxlen=self.MEMORY)  # that the stretches lasted
        self._open: list[Lap] = []

    def observe(self, lap: Lap, cost: Cost) -> None:
        """Take in a step.

        Args:
            lap: the step, as the stopwatch has measured it.
            cost: what is known of how the time depends on the samples: only the ratio ``a : k`` counts.
        """
        self._open.append(lap)
        work, wait = sum(lap.work for lap in self._open), sum(lap.wait for lap in self._open)
        if work + wait < self.SECONDS or work <= 0:
            return
        self._work = self._work or float(lap.samples)
        self._times.append(cost.seconds(self._work) * work / sum(cost.seconds(lap.samples) for lap in self._open))
        self._seconds.append(work + wait)
        self._open = []

    def speed(self, cost: Cost) -> Speed:
        """The present speed, as a cost with the ratio of the given one."""
        if len(self._times) < 2:
            return Speed(cost, math.inf, 0.0)
        times = list(self._times)
        cut = _change(times)
        if cut == len(times) - 1:  # a single stretch: a stall is no change
            cut = _change(times[:-1])
        if cut and abs(median(times[cut:]) / median(times[:cut]) - 1) <= self.CHANGE * _noise(times[:cut], times[cut:]):
            cut = 0
        now = times[cut:]
        noise = max(_noise(times[:cut], now) * (self.STATE / len(now)) ** 0.5, self.LEAST_NOISE)
        scale = median(now) / cost.seconds(self._work)
        since = sum(list(self._seconds)[cut:])
        return Speed(Cost(scale * cost.fixed, scale * cost.per_sample), noise, since)


def _noise(*parts: Sequence[float]) -> float:
    """How far stretches are off the median of their part, as a fraction: what nine in ten stay below."""
    off: list[float] = []
    for part in parts:
        middle = median(part) if part else 0.0
        off += [abs(seconds / middle - 1) for seconds in part]
    off.sort()
    return off[int(0.9 * (len(off) - 1))]


def _change(times: Sequence[float]) -> int:
    """Where the latter part begins if times are cut in two that differ most (least squares); 0 if they do not."""
    mean, left, best, cut = sum(times) / len(times), 0.0, 0.0, 0
    for n, seconds in enumerate(times[:-1], 1):
        left += seconds
        gain = (left - n * mean) ** 2 / (n * (len(times) - n))
        if gain > best:
            best, cut = gain, n
    return cut
