"""How long steps take under a plan, and what a new one has to prove."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from lightning_hetero.workload.plan import Plan
from lightning_hetero.workload.report import Report


class Look(NamedTuple):
    """Steps in a row, of each rank.

    Attributes:
        steps: how many, by rank: the same number, unless ranks go at their own pace.
        seconds: that they took, by rank.
    """

    steps: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()

    def after(self, reports: Sequence[Report]) -> "Look":
        """With the steps that the ranks report; those of ranks that report at different steps are not the same ones."""
        none = (0.0,) * len(reports)
        steps = [before + report.laps for before, report in zip(self.steps or none, reports, strict=True)]
        seconds = [
            before + report.laps * (report.compute + report.wait)
            for before, report in zip(self.seconds or none, reports, strict=True)
        ]
        return Look(tuple(steps), tuple(seconds))

    @property
    def shortest(self) -> float:
        """Seconds of the rank with the fewest."""
        return min(self.seconds, default=0.0)

    @property
    def apart(self) -> bool:
        """Whether ranks go at their own pace."""
        return len(set(self.steps)) > 1


class Trial(NamedTuple):
    """A re-split that has to prove itself.

    Attributes:
        before: the plan to return to.
        bar: seconds per step that it must stay below: halfway from what was to what was promised.
    """

    before: Plan
    bar: float


def seconds_of(looks: Sequence[Look]) -> float:
    """Seconds that a step takes, on the rank on which it takes longest.

    Each rank counts by itself first. Where ranks go at their own pace, the longest of each look would be that of a rank
    on which an exchange, or a disturbance, happened to fall into it.
    """
    ranks = range(len(looks[0].steps))
    return max(median(look.seconds[rank] / look.steps[rank] for look in looks) for rank in ranks)
