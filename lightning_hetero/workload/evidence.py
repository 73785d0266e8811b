"""How fast a rank is, and how far that may be noise.

A rank's time for the same work varies: other programs take its core, clocks change, batches differ. Such noise comes in
states that last for a while, so that many measurements in a row agree and yet say little. Statistics that take them for
independent are sure too soon, and shares follow the noise.
"""

import math
from collections import deque
from statistics import median
from typing import NamedTuple

from lightning_hetero.workload.curve import Curve
from lightning_hetero.workload.shape import Shape, cut_of, noise_of
from lightning_hetero.workload.shares import Cost
from lightning_hetero.workload.timer import Lap


class Speed(NamedTuple):
    """A rank's present speed.

    Attributes:
        cost: seconds per batch and per sample.
        noise: how far that may be off by noise, as a fraction.
        since: seconds of steps since the latest change; infinite if none is known.
        bump: samples and seconds of a batch that takes longer than the curve says, because the times bend down.
    """

    cost: Cost | Curve
    noise: float
    since: float
    bump: tuple[float, float] = (0.0, 0.0)


class Stretch(NamedTuple):
    """Steps in a row, long enough together to be compared with others.

    Attributes:
        steps: how many.
        samples: of all of them.
        work: seconds that this rank has worked on them.
        seconds: that they took, with the wait for others.
    """

    steps: int
    samples: int
    work: float
    seconds: float

    def seconds_by(self, cost: Cost | Curve) -> float:
        """What its steps would have taken by ``cost``, had they been alike."""
        return self.steps * cost.seconds(self.samples / self.steps)


class Evidence:
    """What a rank's own steps tell of its speed.

    Steps are gathered into stretches that are long enough to compare. One lasting change of speed within the memory is
    told from noise: the rank's speed is that since the change. All other ups and downs are noise, and so large is the
    doubt about the speed, however many stretches agree at present. How time depends on the samples is a straight line
    unless the times of different batch sizes show a curve (:class:`~lightning_hetero.workload.shape.Shape`).
    """

    #: Seconds that a stretch lasts at least: some turns of an operating system's scheduler, a period of CPU quotas.
    SECONDS = 0.1
    #: Stretches that are remembered.
    MEMORY = 256
    #: A state of the noise lasts for up to so many stretches, so that these together tell no more than one would that
    #: is independent. (On a machine with busy neighbours, states last a second and more.)
    STATE = 32
    #: A rank is never known better than this: a fraction of its time.
    LEAST_NOISE = 0.01
    #: A change of speed is larger than so many times the noise before and after it.
    CHANGE = 2.0

    def __init__(self) -> None:
        self.shape = Shape(self.SECONDS, self.STATE, self.CHANGE, self.LEAST_NOISE)
        self._samples = 0.0  # of a step, to which all stretches are converted
        self._stretches: deque[Stretch] = deque(maxlen=self.MEMORY)
        self._times: deque[float] = deque(maxlen=self.MEMORY)  # seconds of such a step, as converted at that time
        self._open = Stretch(0, 0, 0.0, 0.0)

    def observe(self, lap: Lap, cost: Cost) -> None:
        """Take in a step.

        Args:
            lap: the step, as the stopwatch has measured it.
            cost: what is known of how the time depends on the samples: only the ratio ``a : k`` counts.
        """
        if lap.work > 0:
            self.shape.observe(lap.samples, lap.work, lap.wait)
        steps, samples, work, seconds = self._open
        self._open = Stretch(steps + 1, samples + lap.samples, work + lap.work, seconds + lap.work + lap.wait)
        if self._open.seconds < self.SECONDS or self._open.work <= 0:
            return
        self._samples = self._samples or float(lap.samples)
        self._stretches.append(self._open)
        self._times.append(self._converted(self._open, cost))
        self._open = Stretch(0, 0, 0.0, 0.0)

    def speed(self, cost: Cost | Curve) -> Speed:
        """The present speed.

        Args:
            cost: what is known of how the time depends on the samples, if that is a straight line.

        Returns:
            A cost of the given ratio ``a : k``, or a curve if the times show one.
        """
        if len(self._times) < 2:
            return Speed(cost, math.inf, math.inf)
        times, curve, bump = list(self._times), self.shape.curve(), (0.0, 0.0)
        if curve is not None:
            bump = self.shape.bump()
            cost, times = curve, [self._converted(stretch, curve) for stretch in self._stretches]
        cut = cut_of(times)
        if cut == len(times) - 1:  # a single stretch: a stall is no change
            cut = cut_of(times[:-1])
        before, after = times[:cut], times[cut:]
        if cut and abs(math.log(median(after) / median(before))) <= self.CHANGE * noise_of(before, after):
            cut = 0
        since = list(self._stretches)[cut:]
        # What is known of the ratio now is of the present speed: what was before the change keeps its own.
        now = [self._converted(stretch, cost) for stretch in since]
        noise = max(noise_of(times[:cut], now) * (self.STATE / len(now)) ** 0.5, self.LEAST_NOISE)
        scale = median(now) / cost.seconds(self._samples)
        seconds = sum(stretch.seconds for stretch in since) if cut else math.inf
        return Speed(cost.times(scale), noise, seconds, bump)

    def _converted(self, stretch: Stretch, cost: Cost | Curve) -> float:
        """Seconds of a step of the size by which stretches are compared."""
        return cost.seconds(self._samples) * stretch.work / stretch.seconds_by(cost)
