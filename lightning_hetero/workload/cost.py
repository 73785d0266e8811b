"""What a batch costs on this rank as long as a straight line explains it, learned from its own measured times."""

import math

from lightning_hetero.workload.shares import Cost


class CostModel:
    """Affine fit ``t(n) = a + k * n`` of one rank's seconds per batch, by a Kalman filter on ``x = (a, k)``.

    * A device drifts as a whole (clocks, co-tenants): old knowledge fades only in the direction ``x`` itself, the
      scale, which every measurement shows. The ratio ``a : k`` shows only when ``n`` varies, and is kept until then.
    * A lasting change of speed is told from a hiccup: one far measurement is left out, the second on the same side
      rescales the model at once and lets it learn the ratio anew. Several surprises on the same side, none of them far,
      make the model doubt itself, so that it follows the next ones.

    Args:
        drift: relative change of the device's speed that is expected per measurement.
        noise: relative noise of one measurement, to start with; it is re-estimated.
        warm_up: first measurements to leave out (lazy initialisation, bucket rebuilding).
    """

    #: A measurement this many deviations off is far, provided that it is also ``JUMP`` off relatively.
    FAR = 4.0
    JUMP = 0.2
    LEAST_NOISE = 0.01
    #: Surprises, in deviations, are averaged over about three measurements; beyond this the model doubts itself.
    DOUBT = 1.3

    def __init__(self, drift: float = 0.01, noise: float = 0.05, warm_up: int = 2) -> None:
        self.drift, self.noise, self.warm_up = drift, noise, warm_up
        self.count = 0
        self._samples = 1  # of the last measurement
        self._a = self._k = 0.0  # seconds, seconds per sample
        self._p = (0.0, 0.0, 0.0)  # covariance of (a, k): p_aa, p_ak, p_kk, in s^2
        self._bias = 0.0  # running mean of surprises, in deviations
        self._far = 0.0  # ratio measured : predicted of the far measurement before this one, 0 if none

    @property
    def warm(self) -> bool:
        """Whether the latest measurement was beyond the warm-up."""
        return self.count > self.warm_up

    @property
    def ready(self) -> bool:
        """Whether there is anything to go by, which takes three measurements beyond the warm-up."""
        return self.count >= self.warm_up + 3

    @property
    def cost(self) -> Cost:
        """The fit, in seconds and seconds per sample; exact at the last ``n``, with ``a >= 0`` and ``k > 0``."""
        seconds = max(self.predict(self._samples), 1e-9)
        fixed = min(max(self._a, 0.0), 0.999 * seconds)
        return Cost(fixed, (seconds - fixed) / self._samples)

    def predict(self, samples: int) -> float:
        """Expected seconds for ``samples`` samples."""
        return self._a + self._k * samples

    def error(self, samples: int) -> float:
        """Relative standard error of :meth:`predict`; infinite before the model is ready."""
        if not self.ready:
            return math.inf
        return math.sqrt(self._variance(samples)) / max(self.predict(samples), 1e-12)

    def observe(self, samples: int, seconds: float) -> None:
        """Take in one measured batch of ``samples >= 1`` samples that took ``seconds`` of this rank's own time."""
        if not (samples >= 1 and math.isfinite(seconds) and seconds > 0):
            return
        self.count += 1
        self._samples = samples
        if self.count <= self.warm_up:
            return
        if self.count == self.warm_up + 1:
            self._start(samples, seconds)
            return
        self._fade()
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
        self.count, self._samples = self.warm_up + 3, samples
        self._a, self._k = cost
        self._p, self._far = (0.0, 0.0, 0.0), 0.0
        self._widen(samples, scale=self.noise, ratio=0.05)

    def _start(self, samples: int, seconds: float) -> None:
        # One point fixes the scale only. Guess a fifth of it to be fixed cost, and admit that this is a guess.
        self._a, self._k = 0.2 * seconds, 0.8 * seconds / samples
        self._p = (0.0, 0.0, 0.0)
        self._widen(samples, scale=self.noise, ratio=0.3)

    def _widen(self, samples: int, scale: float, ratio: float) -> None:
        """Add uncertainty about the scale (along x) and about a : k at constant time for ``samples``."""
        seconds = self.predict(samples)
        for weight, (da, dk) in ((scale, (self._a, self._k)), (ratio, (seconds, -seconds / samples))):
            p_aa, p_ak, p_kk = self._p
            w = weight**2
            self._p = (p_aa + w * da * da, p_ak + w * da * dk, p_kk + w * dk * dk)

    def _fade(self) -> None:
        self._widen(1, scale=self.drift, ratio=0.0)

    def _variance(self, samples: int) -> float:
        p_aa, p_ak, p_kk = self._p
        return max(p_aa + 2 * samples * p_ak + samples**2 * p_kk, 0.0)  # below 0 only by rounding

    def _jump(self, samples: int, ratio: float) -> None:
        self._a, self._k = ratio * self._a, ratio * self._k
        p_aa, p_ak, p_kk = self._p
        self._p = (ratio**2 * p_aa, ratio**2 * p_ak, ratio**2 * p_kk)
        self._widen(samples, scale=self.noise, ratio=0.3)

    def _learn_noise(self, surprise: float, spread: float) -> None:
        explained = spread**2 - self.noise**2  # the part of the surprise that is the model's own uncertainty
        seen = min(max(surprise**2 - explained, 0.0), (3 * self.noise) ** 2)
        self.noise = max(math.sqrt(0.9 * self.noise**2 + 0.1 * seen), self.LEAST_NOISE)

    def _correct(self, samples: int, surprise: float) -> None:
        p_aa, p_ak, p_kk = self._p
        to_a, to_k = p_aa + samples * p_ak, p_ak + samples * p_kk  # P h, with h = (1, samples)
        total = to_a + samples * to_k + (self.noise * self.predict(samples)) ** 2
        self._a += to_a / total * surprise
        self._k += to_k / total * surprise
        self._p = (p_aa - to_a * to_a / total, p_ak - to_a * to_k / total, p_kk - to_k * to_k / total)
