"""Whether a rank's times lie on a straight line, and on which convex curve if they do not."""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from lightning_hetero.workload.curve import Curve, curve_below


class Point(NamedTuple):
    """What is known of one batch size.

    Attributes:
        samples: the size.
        seconds: of a step, median.
        error: how far that may be off by noise, as a fraction.
        stretches: how many it rests on.
    """

    samples: int
    seconds: float
    error: float
    stretches: int


class Timed(NamedTuple):
    """Some steps of one size.

    Attributes:
        number: how many of these came before.
        seconds: of one step.
    """

    number: int
    seconds: float


class Far(NamedTuple):
    """Times that are far from the usual ones of their sizes, in a row and on one side.

    Attributes:
        first: number of the first one.
        longer: on which side.
        samples: size of the latest one.
    """

    first: int
    longer: bool
    samples: int


class Shape:
    """Remembers the times of each batch size that a rank has had.

    A straight line with ``a >= 0`` is taken for the truth until the times of the sizes differ from it by more than
    noise can explain. Only then is there a curve: the greatest convex one that is nowhere above the times. What was
    measured before a lasting change of speed is forgotten. A slow drift moves all sizes together.

    Args:
        stretch: seconds that steps last together, at least, before they count.
        state: so many stretches of one size tell no more than one would that is independent.
        change: a change of speed is larger than so many times the noise before and after it.
        least: a size's time is never known better than this, as a fraction.
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

    def __init__(self, stretch: float, state: int, change: float, least: float) -> None:
        self._stretch, self._state, self._change, self._least = stretch, state, change, least
        self._sizes: dict[int, deque[Timed]] = {}  # the size of the latest stretch last
        self._open: dict[int, tuple[int, float, float]] = {}  # steps, work, seconds: no stretch yet
        self._count = 0
        self._far: Far | None = None
        self._last = (0, 0.0)  # the latest step's size, and how far it was from the usual time: 0.0 if it was not
        self._curve: Curve | None = None
        self._stale = False  # whether the times have changed since the curve was drawn
        self._assumed: Curve | None = None  # a checkpoint's, until the first size has been measured

    def observe(self, samples: int, work: float, wait: float) -> None:
        """Take in a step of ``samples`` samples: ``work`` seconds of this rank's own work, and a wait for others."""
        if self._has_changed(samples, work):
            self._forget_before(self._count)
            self._open.clear()
        steps, own, whole = self._open.pop(samples, (0, 0.0, 0.0))
        steps, own, whole = steps + 1, own + work, whole + work + wait
        if whole >= self._stretch:
            self._add(samples, own / steps)
            return
        self._open[samples] = steps, own, whole
        if len(self._open) > self.SIZES:
            del self._open[next(iter(self._open))]

    def assume(self, curve: Curve) -> None:
        """Continue from a known curve, such as a checkpoint's, at the speed that is measured from now on."""
        self._assumed, self._stale = curve, True

    def curve(self) -> Curve | None:
        """The curve that the times lie on or above; None while a straight line explains them."""
        if self._stale:
            points = self.points()
            if self._assumed is not None and points:
                points = self._go_on_from(self._assumed, points[0])
            bent = len(points) > 1 and _off_a_line(points) > self.UNLIKELY
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

    def points(self) -> list[Point]:
        """What is known, in the order of the sizes."""
        noise = self._noise()
        return [
            Point(size, self._usual(size), max(noise * math.sqrt(self._state / len(times)), self._least), len(times))
            for size, times in sorted(self._sizes.items())
            if len(times) >= self.ENOUGH
        ]

    def _add(self, samples: int, seconds: float) -> None:
        self._stale = True
        times = self._sizes.pop(samples, None) or deque(maxlen=self.EACH)
        self._sizes[samples] = times
        if len(self._sizes) > self.SIZES:
            del self._sizes[next(iter(self._sizes))]
        now, drifts = Timed(self._count, seconds), len(times) == self.EACH
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
        if work < self._stretch / self.FEW or len(self._sizes.get(samples, ())) < self.ENOUGH:
            return False
        off = math.log(work / self._usual(samples))
        if abs(off) > 2 * self.FAR:
            own = noise_of([t.seconds for t in self._sizes[samples]])
            if abs(off) > self._change * max(own, self._noise(without=samples)):
                self._last = samples, off
        return before[0] == samples and before[1] * self._last[1] > 0

    def _usual(self, samples: int) -> float:
        return median(t.seconds for t in self._sizes[samples])

    def _noise(self, without: int = 0) -> float:
        counted = {n: times for n, times in self._sizes.items() if len(times) >= self.ENOUGH and n != without}
        known = [[t.seconds for t in times] for times in counted.values()]
        return noise_of(*known) if known else 0.0

    def _first_far(self, samples: int, now: Timed, noise: float) -> int | None:
        """The first of two or more far times in a row, if they are of several sizes."""
        off = math.log(now.seconds / self._usual(samples))
        far, self._far = self._far, None
        own = noise_of([t.seconds for t in self._sizes[samples]])
        if abs(off) <= max(self._change * noise, self._change * own, self.FAR):
            return None
        if far is None or far.longer != (off > 0):
            self._far = Far(now.number, off > 0, samples)
            return None
        self._far = far._replace(samples=samples)
        return far.first if far.samples != samples else None

    def _first_changed(self, times: deque[Timed], noise: float) -> int | None:
        """The first time after a lasting change of speed that shows in the times of one size."""
        seconds = [t.seconds for t in times]
        cut = cut_of(seconds)
        before, after = seconds[:cut], seconds[cut:]
        if min(len(before), len(after)) < self.ENOUGH:
            return None
        # A few values may agree by chance, and so may their parts if they are cut where that makes most of it.
        noise = max(noise_of(before, after) * (1 + 4 / len(seconds)), noise, self._least)
        return times[cut].number if abs(math.log(median(after) / median(before))) > self._change * noise else None

    def _forget_before(self, first: int) -> None:
        self._stale = True
        kept = {size: [t for t in times if t.number >= first] for size, times in self._sizes.items()}
        self._sizes = {size: deque(times, maxlen=self.EACH) for size, times in kept.items() if times}
        self._far = None

    def _move_others(self, samples: int, drift: float) -> None:
        for size, times in self._sizes.items():
            if size != samples:
                self._sizes[size] = deque((t._replace(seconds=drift * t.seconds) for t in times), maxlen=self.EACH)

    def _go_on_from(self, curve: Curve, first: Point) -> list[Point]:
        """Take what an assumed curve says of other sizes for measured, at the present speed."""
        self._assumed = None
        scaled, number = curve.times(first.seconds / curve.seconds(first.samples)), self._count - 1
        bends = [round(at) for at, _ in curve.bends]
        for size in (max(bends[0] // 2, 1), *bends, 2 * bends[-1]):
            if size not in self._sizes:
                times = [Timed(number, scaled.seconds(size))] * self.ENOUGH
                self._sizes = {size: deque(times, maxlen=self.EACH), **self._sizes}
        return self.points()


def _off_a_line(points: Sequence[Point]) -> float:
    """How far the points are off the best line with ``a >= 0`` and ``k >= 0``: squared deviations, in errors."""
    weights = [1 / (p.error * p.seconds) ** 2 for p in points]

    def mean(values: Sequence[float]) -> float:
        return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)

    n, t = [float(p.samples) for p in points], [p.seconds for p in points]
    n_mean, t_mean = mean(n), mean(t)
    k = mean([(x - n_mean) * (y - t_mean) for x, y in zip(n, t, strict=True)])
    k = max(k / mean([(x - n_mean) ** 2 for x in n]), 0.0)
    a = t_mean - k * n_mean
    if a < 0:
        a, k = 0.0, mean([x * y for x, y in zip(n, t, strict=True)]) / mean([x * x for x in n])
    return sum(w * (y - a - k * x) ** 2 for w, x, y in zip(weights, n, t, strict=True))


def noise_of(*parts: Sequence[float]) -> float:
    """How far times are off the median of their part, as a fraction: what nine in ten stay below."""
    off: list[float] = []
    for part in parts:
        middle = median(part) if part else 0.0
        off += [abs(seconds / middle - 1) for seconds in part]
    off.sort()
    return off[int(0.9 * (len(off) - 1))]


def cut_of(times: Sequence[float]) -> int:
    """Where the latter part begins if times are cut in two that differ most (least squares); 0 if they do not."""
    mean, left, best, cut = sum(times) / len(times), 0.0, 0.0, 0
    for n, seconds in enumerate(times[:-1], 1):
        left += seconds
        gain = (left - n * mean) ** 2 / (n * (len(times) - n))
        if gain > best:
            best, cut = gain, n
    return cut
