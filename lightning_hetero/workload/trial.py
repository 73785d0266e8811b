"""How long steps take under a plan, and what a new one has to prove."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from lightning_hetero.workload.plan import Plan


class Look(NamedTuple):
    """Steps in a row.

    Attributes:
        steps: how many.
        seconds: that they took.
    """

    steps: float
    seconds: float


class Trial(NamedTuple):
    """A re-split that has to prove itself.

    Attributes:
        before: the plan to return to.
        bar: seconds per step that it must stay below: halfway from what was to what was promised.
    """

    before: Plan
    bar: float


def seconds_of(looks: Sequence[Look]) -> float:
    """Seconds that a step takes."""
    return median(look.seconds / look.steps for look in looks)
