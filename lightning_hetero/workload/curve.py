"""A convex cost of a batch: a device that is flat until it is full, or that gets slower as its memory fills up."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

#: Bends that a curve has at most, so that a report has a fixed size.
MOST_BENDS = 6
#: The part of a batch's time that is taken for its fixed cost where nothing says how large that is.
GUESSED_FIXED = 0.2
#: More samples never take less time. The least slope, as a fraction of a batch's time per sample.
LEAST_SLOPE = 1e-6


class Curve(NamedTuple):
    """Convex, piecewise-linear cost of one rank's part of a batch.

    Attributes:
        fixed: ``a``, seconds per batch whatever its size.
        per_sample: ``k > 0``, seconds per sample up to the first bend.
        bends: pairs ``(samples, more)`` with ``more > 0``: each further sample takes ``more`` seconds longer than
            before. Adding up only increases keeps the curve convex.
    """

    fixed: float
    per_sample: float
    bends: tuple[tuple[float, float], ...]

    def seconds(self, samples: float) -> float:
        """Predicted seconds for ``samples`` samples."""
        extra = sum(more * (samples - at) for at, more in self.bends if samples > at)
        return self.fixed + self.per_sample * samples + extra

    def samples(self, deadline: float) -> float:
        """How many samples are done by a deadline in seconds, with fractions; below 0 if it is before ``a``."""
        fixed, per_sample = self.fixed, self.per_sample
        for at, more in self.bends:
            if deadline <= fixed + per_sample * at:
                break
            fixed, per_sample = fixed - more * at, per_sample + more
        return (deadline - fixed) / per_sample

    def times(self, factor: float) -> "Curve":
        """The cost of a device that takes ``factor`` times as long."""
        bends = tuple((at, factor * more) for at, more in self.bends)
        return Curve(factor * self.fixed, factor * self.per_sample, bends)

    def in_units(self, width: int) -> "Curve":
        """The same cost for samples that are counted in units of ``width``."""
        bends = tuple((at / width, more * width) for at, more in self.bends)
        return Curve(self.fixed, self.per_sample * width, bends)

    def is_valid(self) -> bool:
        """Whether time is finite, increases with the samples, and bends only upwards."""
        numbers = (self.fixed, self.per_sample, *(x for bend in self.bends for x in bend))
        places = [at for at, _ in self.bends]
        upwards = places == sorted(places) and all(more >= 0 for _, more in self.bends)
        return all(map(math.isfinite, numbers)) and self.per_sample > 0 and upwards


def curve_below(points: Sequence[tuple[float, float]]) -> Curve:
    """The greatest convex curve that is nowhere above the given points and never decreases.

    Between points it is straight, and beyond the last one it goes on as before it. It does so before the first one,
    too, unless no samples would take less than no time; then the guess is a fixed cost of a fifth of the first time.
    Of more than ``MOST_BENDS`` bends those that matter least are left out; the curve rises there.

    Args:
        points: pairs of samples and seconds, at least two, sorted by samples without repetition.
    """
    times, hull = [math.inf], list[tuple[float, float]]()
    for _, seconds in reversed(points):
        times.append(min(seconds, times[-1]))  # a time that a larger batch does not reach is above the curve
    for (samples, _), seconds in zip(points, reversed(times), strict=False):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], (samples, seconds)):
            hull.pop()
        hull.append((samples, seconds))
    # Without its inner points a convex curve is convex. One bend is for the guess.
    while len(hull) > MOST_BENDS + 1:
        del hull[min(range(1, len(hull) - 1), key=lambda i: _above(hull[i - 1 : i + 2]))]
    least = LEAST_SLOPE * hull[-1][1] / hull[-1][0]
    slopes = [max(_slope(*pair), least) for pair in pairwise(hull)]
    (first, seconds), fixed = hull[0], hull[0][1] - slopes[0] * hull[0][0]
    starts = [0.0, *(samples for samples, _ in hull[1:-1])]
    if fixed < 0:
        fixed = GUESSED_FIXED * seconds
        starts, slopes = [0.0, first, *starts[1:]], [(seconds - fixed) / first, *slopes]
    increases = (later - earlier for earlier, later in pairwise(slopes))
    bends = tuple((at, more) for at, more in zip(starts[1:], increases, strict=True) if more > 0)
    return Curve(fixed, slopes[0], bends)


def _slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


def _above(three: Sequence[tuple[float, float]]) -> float:
    """How much higher the curve would be at the middle one of three points without it, as a fraction."""
    left, middle, right = three
    return (left[1] + _slope(left, right) * (middle[0] - left[0])) / middle[1] - 1
