"""Cost model: seconds of a batch on this rank by its number of samples, learned from measured steps.

Where it is known what samples cost, a part of a batch counts by its cost, in that of a mean sample, instead.

A rank's time for the same work varies: other programs take its core, clocks change, batches differ. Such noise comes in
states that last for a while, so that many measurements in a row agree and yet say little. Statistics that take them for
independent are sure too soon, and shares follow the noise.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.batching.shares import Cost, curve_below
from lightning_hetero.batching.timer import StepTiming

Floats = NDArray[np.float64]

#: Seconds that steps last together before they are compared, as a stretch: some turns of an operating system's
#: scheduler, a period of CPU quotas.
STRETCH = 0.1
#: A state of the noise lasts for up to so many stretches, so that these together tell no more than one would that is
#: independent. (On a machine with busy neighbours, states last a second and more.)
STATE = 32
#: A rank is never known better than this: a fraction of its time.
LEAST_NOISE = 0.01
#: A change of speed is larger than so many times the noise before and after it.
CHANGE = 2.0


class CostModel:
    """Affine fit ``t(n) = a + k * n`` of one rank's seconds per batch, by a Kalman filter on ``x = (a, k)``.

    * A device drifts as a whole (clocks, co-tenants): old knowledge fades only in the direction ``x`` itself, the
      scale, which every measurement shows. The ratio ``a : k`` shows only when ``n`` varies, and is kept until then.
    * A lasting change of speed is told from a hiccup: one far measurement is left out, the second on the same side
      rescales the model at once and lets it learn the ratio again. Several surprises on the same side, none of them
      far, make the model doubt itself, so that it follows the next ones.

    Attributes:
        noise: relative noise of one measurement, re-estimated with each.
        count: measurements so far, those of the warm-up included.
    """

    #: First measurements to leave out (lazy initialisation, bucket rebuilding).
    WARM_UP = 2
    #: Relative change of the device's speed that is expected per measurement.
    DRIFT = 0.01
    #: A measurement this many deviations off is far, provided that it is also ``JUMP`` off relatively.
    FAR = 4.0
    JUMP = 0.2
    #: Seconds of a measurement that counts unless it is the first: what the second step sets up takes milliseconds.
    LONG = 0.05
    #: Surprises, in deviations, are averaged over about three measurements; beyond this the model doubts itself.
    DOUBT = 1.3

    def __init__(self) -> None:
        self.noise, self.count = 0.05, 0
        self._samples = 1.0  # of the last measurement
        self._a = self._k = 0.0  # seconds, seconds per sample
        self._p = (0.0, 0.0, 0.0)  # covariance of (a, k): p_aa, p_ak, p_kk, in s^2
        self._bias = 0.0  # running mean of surprises, in deviations
        self._far = 0.0  # ratio measured : predicted of the far measurement before this one, 0 if none

    @property
    def warm(self) -> bool:
        """Whether the latest measurement was beyond the warm-up."""
        return self.count > self.WARM_UP

    @property
    def ready(self) -> bool:
        """Whether there is anything to go by, which takes two measurements beyond the warm-up."""
        return self.count >= self.WARM_UP + 2

    @property
    def cost(self) -> Cost:
        """The fit, in seconds and seconds per sample; exact at the last ``n``, with ``a >= 0`` and ``k > 0``."""
        seconds = max(self.predict(self._samples), 1e-9)
        fixed = min(max(self._a, 0.0), 0.999 * seconds)
        return Cost(fixed, (seconds - fixed) / self._samples)

    def predict(self, samples: float) -> float:
        """Expected seconds for ``samples`` samples."""
        return self._a + self._k * samples

    def error(self, samples: float) -> float:
        """Relative standard error of :meth:`predict`; infinite before the model is ready."""
        if not self.ready:
            return math.inf
        return math.sqrt(self._variance(samples)) / max(self.predict(samples), 1e-12)

    def observe(self, samples: float, seconds: float) -> None:
        """Take in one measured batch of ``samples > 0`` samples that took ``seconds`` of this rank's own time."""
        if not (samples > 0 and math.isfinite(seconds) and seconds > 0):
            return
        self.count += 1
        if self.count > 1 and seconds >= self.LONG:
            self.count = max(self.count, self.WARM_UP + 1)
        self._samples = samples
        if self.count <= self.WARM_UP:
            return
        if self.count == self.WARM_UP + 1:
            self._start(samples, seconds)
            return
        self._widen(1, scale=self.DRIFT, ratio=0.0)  # old knowledge fades
        predicted = self.predict(samples)
        if predicted <= 0:  # extrapolated to where no line through the past makes sense
            self._start(samples, seconds)
            return
        surprise = seconds - predicted
        spread = math.sqrt(self._variance(samples) + (self.noise * predicted) ** 2)
        if abs(surprise) > max(self.FAR * spread, self.JUMP * predicted):
            ratio = seconds / predicted
            if self._far and (self._far > 1) == (ratio > 1):
                self._jump(samples, math.sqrt(self._far * ratio))
                self._far = 0.0
            else:
                self._far = ratio
            return
        self._far = 0.0
        self._bias = 0.7 * self._bias + 0.3 * surprise / spread
        if abs(self._bias) > self.DOUBT:
            self._widen(samples, scale=2 * self.noise, ratio=0.2)
            self._bias = 0.0
        self._learn_noise(surprise / predicted, spread / predicted)
        self._correct(samples, surprise)

    def assume(self, cost: Cost, samples: int) -> None:
        """Continue from a known fit, such as a checkpoint's: trusted, but to be confirmed."""
        self.count, self._samples = self.WARM_UP + 2, samples
        self._a, self._k, _ = cost
        self._p, self._far = (0.0, 0.0, 0.0), 0.0
        self._widen(samples, scale=self.noise, ratio=0.05)

    def _start(self, samples: float, seconds: float) -> None:
        # One point fixes the scale only. Guess a fifth of it to be fixed cost, and admit that this is a guess.
        self._a, self._k = 0.2 * seconds, 0.8 * seconds / samples
        self._p = (0.0, 0.0, 0.0)
        self._widen(samples, scale=self.noise, ratio=0.3)

    def _widen(self, samples: float, scale: float, ratio: float) -> None:
        """Add uncertainty about the scale (along x) and about a : k at constant time for ``samples``."""
        seconds = self.predict(samples)
        for weight, (da, dk) in ((scale, (self._a, self._k)), (ratio, (seconds, -seconds / samples))):
            p_aa, p_ak, p_kk = self._p
            w = weight**2
            self._p = (p_aa + w * da * da, p_ak + w * da * dk, p_kk + w * dk * dk)

    def _variance(self, samples: float) -> float:
        p_aa, p_ak, p_kk = self._p
        return max(p_aa + 2 * samples * p_ak + samples**2 * p_kk, 0.0)  # below 0 only by rounding

    def _jump(self, samples: float, ratio: float) -> None:
        self._a, self._k = ratio * self._a, ratio * self._k
        p_aa, p_ak, p_kk = self._p
        self._p = (ratio**2 * p_aa, ratio**2 * p_ak, ratio**2 * p_kk)
        self._widen(samples, scale=self.noise, ratio=0.3)

    def _learn_noise(self, surprise: float, spread: float) -> None:
        explained = spread**2 - self.noise**2  # the part of the surprise that is the model's own uncertainty
        seen = min(max(surprise**2 - explained, 0.0), (3 * self.noise) ** 2)
        self.noise = max(math.sqrt(0.9 * self.noise**2 + 0.1 * seen), LEAST_NOISE)

    def _correct(self, samples: float, surprise: float) -> None:
        p_aa, p_ak, p_kk = self._p
        to_a, to_k = p_aa + samples * p_ak, p_ak + samples * p_kk  # P h, with h = (1, samples)
        total = to_a + samples * to_k + (self.noise * self.predict(samples)) ** 2
        self._a += to_a / total * surprise
        self._k += to_k / total * surprise
        self._p = (p_aa - to_a * to_a / total, p_ak - to_a * to_k / total, p_kk - to_k * to_k / total)


class CostEvidence:
    """Evidence on costs: how far a rank's times are from what they explain, and from what numbers of samples do.

    Where batches are dealt by cost, a rank's parts cost nearly the same and their numbers of samples differ. If costs
    are right, so do times not; if they are not, times follow the numbers.
    """

    #: Steps that are compared with each other, so that a change of speed matters to few; how many such groups are
    #: remembered, and from which on they tell something.
    GROUP, MEMORY, ENOUGH = 16, 8, 2
    #: The part of a group that is left out, as steps in which the rank was disturbed.
    STALLED = 0.15

    def __init__(self) -> None:
        self._steps: list[tuple[float, float, float]] = []  # of the running group
        self._off: deque[tuple[float, float]] = deque(maxlen=self.MEMORY)  # of each group, by cost and by samples

    def observe(self, cost: float, samples: float, seconds: float) -> None:
        """Take in a step."""
        if seconds > 0:
            self._steps.append((cost, samples, seconds))
        if len(self._steps) == self.GROUP:
            costs, numbers, times = np.asarray(self._steps).T
            self._off.append((_residual(costs, times), _residual(numbers, times)))
            self._steps.clear()

    def off(self) -> tuple[float, float]:
        """Deviations by cost, and by samples, as fractions of a step's time; zeros while too little is known."""
        if len(self._off) < self.ENOUGH:
            return 0.0, 0.0
        by_cost, by_samples = zip(*self._off, strict=True)
        return median(by_cost), median(by_samples)


class SizeTiming(NamedTuple):
    """Measured time of one batch size.

    Attributes:
        samples: the size.
        seconds: of a step, median.
        error: how far that may be off by noise, as a fraction.
        stretches: how many it rests on.
    """

    samples: float
    seconds: float
    error: float
    stretches: int


class TimedSteps(NamedTuple):
    """Steps of one size, and their time.

    Attributes:
        number: how many of these came before.
        seconds: of one step.
    """

    number: int
    seconds: float


class OutlierRun(NamedTuple):
    """Run of times that are far from the usual ones of their sizes, on one side.

    Attributes:
        first: number of the first one.
        longer: on which side.
        samples: size of the latest one.
    """

    first: int
    longer: bool
    samples: float


class CurveEstimator:
    """Estimator of a cost curve, from the times of each batch size that a rank has had.

    A straight line with ``a >= 0`` is taken for the truth until the times of the sizes differ from it by more than
    noise can explain. Only then is there a curve: the greatest convex one that is nowhere above the times. What was
    measured before a lasting change of speed is forgotten. A slow drift moves all sizes together.
    """

    #: Sizes that are remembered, and stretches of each.
    SIZES, EACH = 32, 32
    #: Stretches from which on a size counts: one alone may be a stall.
    ENOUGH = 2
    #: How unlikely the line must be: squared deviations, in errors, added up over the sizes.
    UNLIKELY = 6.0
    #: Times of two sizes that are so far from the usual ones, one after the other, are a change of speed.
    FAR = 0.1
    #: Steps are long if so many or fewer make a stretch: then two in a row tell of a change as well as two stretches.
    FEW = 8
    #: A bump is so high above the curve, as a fraction, and shows in so many stretches of each size.
    BUMP, SURE = 0.05, 4

    def __init__(self) -> None:
        self._sizes: dict[int, deque[TimedSteps]] = {}  # the size of the latest stretch last
        self._open: dict[int, tuple[int, float, float]] = {}  # steps, work, seconds: no stretch yet
        self._count = 0
        self._far: OutlierRun | None = None
        self._last = (0, 0.0)  # the latest step's size, and how far it was from the usual time: 0.0 if it was not
        self._curve: Cost | None = None
        self._stale = False  # whether the times have changed since the curve was drawn
        self._assumed: Cost | None = None  # a checkpoint's, until the first size has been measured

    def observe(self, samples: int, work: float, wait: float) -> None:
        """Take in a step of ``samples`` samples: ``work`` seconds of this rank's own work, and a wait for others."""
        if self._has_changed(samples, work):
            self._forget_before(self._count)
            self._open.clear()
        steps, own, whole = self._open.pop(samples, (0, 0.0, 0.0))
        steps, own, whole = steps + 1, own + work, whole + work + wait
        if whole >= STRETCH:
            self._add(samples, own / steps)
            return
        self._open[samples] = steps, own, whole
        if len(self._open) > self.SIZES:
            del self._open[next(iter(self._open))]

    def assume(self, curve: Cost) -> None:
        """Continue from a known curve, such as a checkpoint's, at the speed that is measured from now on."""
        self._assumed, self._stale = curve, True

    def curve(self) -> Cost | None:
        """The curve that the times lie on or above; None while a straight line explains them."""
        if self._stale:
            points = self.points()
            if self._assumed is not None and points:
                points = self._go_on_from(self._assumed, points[0])
            bent = len(points) > 1 and _line_residual(points) > self.UNLIKELY
            self._curve = curve_below([(p.samples, p.seconds) for p in points]) if bent else None
            self._stale = False
        return self._curve

    def bump(self) -> tuple[float, float]:
        """Samples and seconds of the size that is farthest above a convex curve, beyond noise; zeros if none is."""
        sure = [p for p in self.points() if p.stretches >= self.SURE]
        if len(sure) < 3:
            return 0.0, 0.0
        curve = curve_below([(p.samples, p.seconds) for p in sure])
        high, _, point = max((p.seconds / curve.seconds(p.samples) - 1, p.samples, p) for p in sure)
        return (point.samples, point.seconds) if high > max(self.BUMP, 3 * point.error) else (0.0, 0.0)

    def points(self) -> list[SizeTiming]:
        """Measured times, in the order of the sizes."""
        noise = self._noise()
        return [
            SizeTiming(size, self._usual(size), max(noise * math.sqrt(STATE / len(times)), LEAST_NOISE), len(times))
            for size, times in sorted(self._sizes.items())
            if len(times) >= self.ENOUGH
        ]

    def _add(self, samples: int, seconds: float) -> None:
        self._stale = True
        times = self._sizes.pop(samples, None) or deque(maxlen=self.EACH)
        self._sizes[samples] = times
        if len(self._sizes) > self.SIZES:
            del self._sizes[next(iter(self._sizes))]
        now, drifts = TimedSteps(self._count, seconds), len(times) == self.EACH
        before = self._usual(samples) if times else seconds
        noise, self._count = self._noise(without=samples), self._count + 1
        first = self._first_far(samples, now, noise) if len(times) >= self.ENOUGH else None
        times.append(now)
        if first is None:
            first = self._first_changed(times, noise)
        if first is not None:
            self._forget_before(first)
        elif drifts:
            self._move_others(samples, self._usual(samples) / before)

    def _has_changed(self, samples: int, work: float) -> bool:
        """Whether two steps of one size in a row, not too short, were far from the usual time on the same side."""
        before, self._last = self._last, (samples, 0.0)
        if work < STRETCH / self.FEW or len(self._sizes.get(samples, ())) < self.ENOUGH:
            return False
        off = math.log(work / self._usual(samples))
        if abs(off) > 2 * self.FAR:
            own = relative_noise([t.seconds for t in self._sizes[samples]])
            if abs(off) > CHANGE * max(own, self._noise(without=samples)):
                self._last = samples, off
        return before[0] == samples and before[1] * self._last[1] > 0

    def _usual(self, samples: int) -> float:
        return median(t.seconds for t in self._sizes[samples])

    def _noise(self, without: int = 0) -> float:
        counted = {n: times for n, times in self._sizes.items() if len(times) >= self.ENOUGH and n != without}
        known = [[t.seconds for t in times] for times in counted.values()]
        return relative_noise(*known) if known else 0.0

    def _first_far(self, samples: int, now: TimedSteps, noise: float) -> int | None:
        """The first of two or more far times in a row, if they are of several sizes."""
        off = math.log(now.seconds / self._usual(samples))
        far, self._far = self._far, None
        own = relative_noise([t.seconds for t in self._sizes[samples]])
        if abs(off) <= max(CHANGE * noise, CHANGE * own, self.FAR):
            return None
        if far is None or far.longer != (off > 0):
            self._far = OutlierRun(now.number, off > 0, samples)
            return None
        self._far = far._replace(samples=samples)
        return far.first if far.samples != samples else None

    def _first_changed(self, times: deque[TimedSteps], noise: float) -> int | None:
        """The first time after a lasting change of speed that shows in the times of one size."""
        seconds = [t.seconds for t in times]
        cut = change_point(seconds)
        before, after = seconds[:cut], seconds[cut:]
        if min(len(before), len(after)) < self.ENOUGH:
            return None
        # A few values may agree by chance, and so may their parts if they are cut where that makes most of it.
        noise = max(relative_noise(before, after) * (1 + 4 / len(seconds)), noise, LEAST_NOISE)
        return times[cut].number if abs(math.log(median(after) / median(before))) > CHANGE * noise else None

    def _forget_before(self, first: int) -> None:
        self._stale = True
        kept = {size: [t for t in times if t.number >= first] for size, times in self._sizes.items()}
        self._sizes = {size: deque(times, maxlen=self.EACH) for size, times in kept.items() if times}
        self._far = None

    def _move_others(self, samples: int, drift: float) -> None:
        for size, times in self._sizes.items():
            if size != samples:
                self._sizes[size] = deque((t._replace(seconds=drift * t.seconds) for t in times), maxlen=self.EACH)

    def _go_on_from(self, curve: Cost, first: SizeTiming) -> list[SizeTiming]:
        """Take what an assumed curve says of other sizes for measured, at the present speed."""
        self._assumed = None
        scaled, number = curve.times(first.seconds / curve.seconds(first.samples)), self._count - 1
        bends = [round(at) for at, _ in curve.bends]
        for size in (max(bends[0] // 2, 1), *bends, 2 * bends[-1]):
            if size not in self._sizes:
                times = [TimedSteps(number, scaled.seconds(size))] * self.ENOUGH
                self._sizes = {size: deque(times, maxlen=self.EACH), **self._sizes}
        return self.points()


def _off_best_line(size: Floats, seconds: Floats, weights: Floats) -> Floats:
    """Deviations of times from the best line ``a + k * size`` with ``a >= 0`` and ``k >= 0``."""

    def mean(values: Floats) -> float:
        return float((weights * values).sum() / weights.sum())

    x, t = mean(size), mean(seconds)
    spread = mean((size - x) ** 2)
    k = max(mean((size - x) * (seconds - t)) / spread, 0.0) if spread > 0 else 0.0
    a = t - k * x
    if a < 0:
        a, k = 0.0, mean(size * seconds) / mean(size**2)
    return seconds - a - k * size


def _residual(size: Floats, seconds: Floats) -> float:
    """Relative RMS of times off the best line, without those that are farthest off."""
    off = np.abs(_off_best_line(size, seconds, np.ones(len(size))))
    kept = (off <= np.quantile(off, 1 - CostEvidence.STALLED)).astype(float)
    off = _off_best_line(size, seconds, kept)
    return float(np.sqrt(np.average(off**2, weights=kept)) / np.average(seconds, weights=kept))


def _line_residual(points: Sequence[SizeTiming]) -> float:
    """Residual of the points off the best line: squared deviations, in errors."""
    size, seconds, error, _ = np.asarray(points, float).T
    weights = 1 / (error * seconds) ** 2
    return float((weights * _off_best_line(size, seconds, weights) ** 2).sum())


def relative_noise(*parts: Sequence[float]) -> float:
    """Deviation of times from the median of their part, as a fraction: nine in ten stay below."""
    off: list[float] = []
    for part in parts:
        middle = median(part) if part else 0.0
        off += [abs(seconds / middle - 1) for seconds in part]
    off.sort()
    return off[int(0.9 * (len(off) - 1))]


def change_point(times: Sequence[float]) -> int:
    """Index at which times are cut in two parts that differ most (least squares); 0 if they do not."""
    mean, left, best, cut = sum(times) / len(times), 0.0, 0.0, 0
    for n, seconds in enumerate(times[:-1], 1):
        left += seconds
        gain = (left - n * mean) ** 2 / (n * (len(times) - n))
        if gain > best:
            best, cut = gain, n
    return cut


class MeasuredSpeed(NamedTuple):
    """Present speed of a rank.

    Attributes:
        cost: seconds per batch and per sample.
        noise: how far that may be off by noise, as a fraction.
        since: seconds of steps since the latest change; infinite if none is known.
        bump: samples and seconds of a batch that takes longer than the curve says, because the times bend down.
    """

    cost: Cost
    noise: float
    since: float
    bump: tuple[float, float] = (0.0, 0.0)


class StepRun(NamedTuple):
    """Steps in a row, long enough together to be compared with others.

    Attributes:
        steps: how many; passes, where a step has several.
        samples: of all of them.
        work: seconds that this rank has worked on them.
        seconds: that they took, with the wait for others.
    """

    steps: int
    samples: float
    work: float
    seconds: float

    def seconds_by(self, cost: Cost) -> float:
        """Seconds that its steps would have taken by ``cost``, had they been alike."""
        return self.steps * cost.seconds(self.samples / self.steps)


class SpeedEstimator:
    """Estimator of a rank's speed, from its own steps.

    Steps are gathered into stretches that are long enough to compare. One lasting change of speed within the memory is
    told from noise: the rank's speed is that since the change. All other ups and downs are noise, and so large is the
    doubt about the speed, however many stretches agree at present. How time depends on the samples is a straight line
    unless the times of different batch sizes show a curve (:class:`~lightning_hetero.batching.cost.CurveEstimator`).
    """

    #: Stretches that are remembered.
    MEMORY = 256
    #: By a single stretch a rank is not known better than this.
    SINGLE = 0.5
    #: Smaller changes of speed are drift, of which few stretches tell little.
    LEAST_CHANGE = 0.1

    def __init__(self) -> None:
        self.shape = CurveEstimator()
        self._samples = 0.0  # of a step, to which all stretches are converted
        self._stretches: deque[StepRun] = deque(maxlen=self.MEMORY)
        self._times: deque[float] = deque(maxlen=self.MEMORY)  # seconds of such a step, as converted at that time
        self._open = StepRun(0, 0, 0.0, 0.0)

    def observe(self, timing: StepTiming, cost: Cost) -> None:
        """Take in a step.

        Args:
            timing: the step, as the timer has measured it.
            cost: what is known of how the time depends on the samples: only the ratio ``a : k`` counts.
        """
        one = timing.of_a_pass()
        # Costs hardly ever recur, so that they show no curve; nor do passes of different sizes.
        if timing.work > 0 and not timing.cost and one.samples == int(one.samples):
            self.shape.observe(int(one.samples), one.work, one.wait)
        steps, samples, work, seconds = self._open
        self._open = StepRun(
            steps + timing.passes, samples + timing.samples, work + timing.work, seconds + timing.work + timing.wait
        )
        if self._open.seconds < STRETCH or self._open.work <= 0:
            return
        self._samples = self._samples or float(one.samples)
        self._stretches.append(self._open)
        self._times.append(self._converted(self._open, cost))
        self._open = StepRun(0, 0, 0.0, 0.0)

    def speed(self, cost: Cost) -> MeasuredSpeed:
        """The present speed.

        Args:
            cost: what is known of how the time depends on the samples, if that is a straight line.

        Returns:
            A cost of the given ratio ``a : k``, or a curve if the times show one.
        """
        if not self._times:
            return MeasuredSpeed(cost, math.inf, math.inf)
        times, curve, bump = list(self._times), self.shape.curve(), (0.0, 0.0)
        if curve is not None:
            bump = self.shape.bump()
            cost, times = curve, [self._converted(stretch, curve) for stretch in self._stretches]
        cut = change_point(times)
        if len(times) > 1 and cut == len(times) - 1:  # a single stretch: a stall is no change
            cut = change_point(times[:-1])
        before, after = times[:cut], times[cut:]
        if cut:
            change, noise = abs(math.log(median(after) / median(before))), relative_noise(before, after)
            cut = cut if change > max(CHANGE * noise, self.LEAST_CHANGE) else 0
        since = list(self._stretches)[cut:]
        # What is known of the ratio now is of the present speed: what was before the change keeps its own.
        now = [self._converted(stretch, cost) for stretch in since]
        least = LEAST_NOISE if len(times) > 1 else self.SINGLE
        noise = max(relative_noise(times[:cut], now) * (STATE / len(now)) ** 0.5, least)
        scale = median(now) / cost.seconds(self._samples)
        seconds = sum(stretch.seconds for stretch in since) if cut else math.inf
        return MeasuredSpeed(cost.times(scale), noise, seconds, bump)

    def _converted(self, stretch: StepRun, cost: Cost) -> float:
        """Seconds of a step of the size by which stretches are compared."""
        return cost.seconds(self._samples) * stretch.work / stretch.seconds_by(cost)
