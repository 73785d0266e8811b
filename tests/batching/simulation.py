"""A simulated cluster: ranks that take `a + k n` seconds for their share, times noise; no processes, no clock."""

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from lightning_hetero.batching.accounting import OPENING
from lightning_hetero.batching.cost import CostModel, SpeedEstimator
from lightning_hetero.batching.plan import Plan
from lightning_hetero.batching.planner import Planner
from lightning_hetero.batching.reports import Idling, Report
from lightning_hetero.batching.shares import Cost, makespan, split
from lightning_hetero.batching.timer import StepTiming

#: Seconds of a step, from the step, the rank, the seconds since the start, and its seconds without noise.
Noise = Callable[[int, int, float, float], float]
TRACES = Path(__file__).parent / "data" / "steps.npz"
NAMES = ("quiet", "one_busy", "two_busy", "bursts")


def gaussian(deviation: float, seed: int = 0) -> Noise:
    """Independent noise for every step and rank."""
    rng = random.Random(seed)
    return lambda step, rank, now, seconds: seconds * max(0.2, rng.gauss(1, deviation))


def traces(name: str) -> list[np.ndarray]:
    """Seconds per step of two equal ranks that ran at the same time."""
    with np.load(TRACES) as arrays:
        return [1e-5 * arrays[f"{name}_{rank}"].astype(float) for rank in (0, 1)]


def by_row(rows: Sequence[np.ndarray], first: int = 0) -> Noise:
    """Noise of one recorded step for each step, however long that takes: states of the noise last a number of steps."""
    unit = min(np.percentile(row, 10) for row in rows)

    def noise(step: int, rank: int, now: float, seconds: float) -> float:
        row = rows[rank % 2]
        return seconds * float(row[(first + step + 997 * (rank // 2)) % len(row)] / unit)

    return noise


def by_time(rows: Sequence[np.ndarray], first: float = 0.0) -> Noise:
    """Noise by the recorded rank's work from that time on: states of the noise last a number of seconds."""
    unit = min(np.percentile(row, 10) for row in rows)
    ends = [np.concatenate([[0.0], np.cumsum(row)]) for row in rows]  # seconds until so many recorded steps are done

    def noise(step: int, rank: int, now: float, seconds: float) -> float:
        end = ends[rank % 2]
        begin = (first + now + 3.1 * (rank // 2)) % end[-1]
        done = np.interp(begin, end, np.arange(len(end))) + seconds / unit
        rounds, done = divmod(done, len(end) - 1)
        return float(rounds * end[-1] + np.interp(done, np.arange(len(end)), end) - begin)

    return noise


class Cluster:
    """Ranks that report every few steps and follow the plan.

    Every rank has a planner of its own, fed with the same reports. As in the strategy, reports sent after a step
    arrive within the next one, when each rank has drawn one batch more than it said; but those of the opening, and all
    where ranks go at their own pace, are acted on before another batch is drawn.

    Args:
        meet_every: steps from one meeting of all ranks to the next; above 1 ranks keep their own pace in between.
    """

    def __init__(
        self,
        costs: Sequence[Cost],
        total: int = 64,
        every: int = 4,
        noise: Noise | None = None,
        ahead: Sequence[int] | None = None,
        balance: str = "auto",
        planners: int = 0,
        meet_every: int = 1,
    ) -> None:
        self.costs, self.every, self.total = list(costs), every, total
        self.noise: Noise = noise or (lambda step, rank, now, seconds: seconds)
        self.ahead = ahead or [0] * len(self.costs)  # batches that each rank's workers prefetch
        self.planners = [Planner(len(self.costs), balance) for _ in self.costs[: planners or None]]
        for planner in self.planners:
            planner.expect(total)
        self.models = [CostModel() for _ in self.costs]
        self.evidence = [SpeedEstimator() for _ in self.costs]
        self.idling = [Idling.FIRST, *[Idling.POSSIBLE] * (len(self.costs) - 1)]
        self.step, self.meet_every = 0, meet_every
        self.clocks = self.exact = (0.0,) * len(self.costs)  # seconds of each rank with the noise, and without
        self.reports: list[Report] | None = None
        self.shares: list[list[int]] = []
        self.seconds: list[float] = []  # of each step, without the noise
        self.measured: list[float] = []  # with it
        self.plans: list[tuple[int, Plan]] = []
        self._laps: list[list[StepTiming]] = [[] for _ in self.costs]

    def run(self, steps: int, costs: Sequence[Cost] | None = None) -> list[float]:
        """Run; returns the seconds of each of these steps without the noise."""
        self.costs = list(costs or self.costs)
        for _ in range(steps):
            self._step()
        return self.seconds[-steps:]

    def _step(self) -> None:
        if self.reports:
            self._act(drawn=1)
        shares = self.planners[0].shares(self.step)
        idle = self.planners[0].at(self.step).idle
        times = [
            0.0 if rank in idle else cost.seconds(max(n, 1))  # else it runs a padding batch
            for rank, (cost, n) in enumerate(zip(self.costs, shares, strict=True))
        ]
        noisy = [
            self.noise(self.step, rank, now, t) for rank, (now, t) in enumerate(zip(self.clocks, times, strict=True))
        ]
        self.step += 1
        opening, alone, begun = self.step in OPENING, self.meet_every > 1, max(self.clocks)
        meet = opening or self.step % self.meet_every == 0
        self.clocks, self.exact = _later(self.clocks, noisy, meet), _later(self.exact, times, meet)
        rows = zip(self._laps, self.models, self.evidence, shares, noisy, strict=True)
        for rank, (laps, model, evidence, n, t) in enumerate(rows):
            if rank in idle:
                laps.append(StepTiming(0, 0.0, max(noisy), 0.0, 0.0, 0.0))
                continue
            model.observe(max(n, 1), t)
            if model.warm:
                laps.append(StepTiming(max(n, 1), t, 0.0 if alone else max(noisy) - t, 0.0, 0.0, 0.0))
                evidence.observe(laps[-1], model.cost)
        if opening or (meet if alone else self.step % self.every == 0):
            self.reports = [self._report(rank) for rank in range(len(self.costs))]
            if opening or alone:
                self._act(drawn=0)
        self.shares.append(shares)
        self.seconds.append(max(times))
        self.measured.append(max(self.clocks) - begun)

    def _act(self, drawn: int) -> None:
        reports = [report._replace(drawn=report.drawn + drawn) for report in self.reports or ()]
        made = [planner.update(self.step, reports) for planner in self.planners]
        assert all(plan == made[0] for plan in made), "the ranks have made different plans"
        if made[0]:
            self.plans.append((self.step, made[0]))
        self.reports = None

    def _report(self, rank: int) -> Report:
        laps, model, evidence = self._laps[rank], self.models[rank], self.evidence[rank]
        self._laps[rank] = []
        samples, compute, wait = (
            sum(column) / max(len(laps), 1) for column in zip(*(lap[:3] for lap in laps), (0.0, 0.0, 0.0), strict=True)
        )
        speed = evidence.speed(model.cost)
        error = speed.noise if model.ready else math.inf
        drawn = self.step + self.ahead[rank]
        cost, means = speed.cost, (samples, compute, wait)
        row = Report(
            *(cost.fixed, cost.per_sample, error, drawn, *means, len(laps), speed.since, *speed.bump),
            idling=self.idling[rank],
            bends=cost.bends,
        ).row
        return Report.of_row(row)


def _later(clocks: Sequence[float], seconds: Sequence[float], meet: bool) -> tuple[float, ...]:
    """The ranks' clocks after a step, and after the wait for the slowest rank if all meet."""
    ends = [now + took for now, took in zip(clocks, seconds, strict=True)]
    return tuple([max(ends)] * len(ends) if meet else ends)


def optimum(costs: Sequence[Cost], total: int) -> float:
    """Seconds of the best split."""
    return makespan(split(total, list(costs)), list(costs))


def near_even(shares: Sequence[Sequence[int]]) -> float:
    """Share of steps in which every rank's share is within 10% of an even one."""
    even = sum(shares[0]) / len(shares[0])
    return sum(all(abs(n - even) <= 0.1 * even for n in step) for step in shares) / len(shares)
