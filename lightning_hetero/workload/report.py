"""What a rank reports to the others about its steps."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from lightning_hetero.workload.curve import MOST_BENDS, Curve
from lightning_hetero.workload.shares import Cost, bends_of


class Report(NamedTuple):
    """What a rank reports to the others. It fits in a row of floats of a fixed size, so one small tensor carries it.

    Attributes:
        fixed: ``a`` of its cost, seconds.
        per_sample: ``k`` of its cost, seconds per sample; of a curve, up to its first bend.
        error: how far its cost may be off by noise, as a fraction; infinite while nothing is known.
        drawn: first step that its samplers have not drawn yet.
        samples: samples per step that it processed since its last report, mean.
        compute: seconds per step of its own work since its last report, mean.
        wait: seconds per step that it waited for others since its last report, mean.
        laps: steps that these means are over.
        since: seconds of steps since the rank's speed has changed; infinite if it is not known to have.
        bump: samples of a batch that takes longer than the curve says, because the times bend down; 0 if none does.
        bump_seconds: how long it takes.
        ended: whether its replica has come to the end of its own data, and runs padding batches.
        settings: a number that stands for the hyperparameters of its optimizers.
        bends: of its cost, at most ``MOST_BENDS``; none if it is a straight line.
    """

    fixed: float
    per_sample: float
    error: float
    drawn: float
    samples: float
    compute: float
    wait: float
    laps: float = 0.0
    since: float = math.inf
    bump: float = 0.0
    bump_seconds: float = 0.0
    ended: float = 0.0
    settings: float = 0.0
    bends: tuple[tuple[float, float], ...] = ()

    @property
    def cost(self) -> Cost | Curve:
        """The rank's cost."""
        return Curve(self.fixed, self.per_sample, self.bends) if self.bends else Cost(self.fixed, self.per_sample)

    @property
    def row(self) -> list[float]:
        """The report as numbers, always as many."""
        bends = [number for bend in self.bends for number in bend]
        return [*self[:-1], *bends, *[0.0] * (2 * MOST_BENDS - len(bends))]

    @classmethod
    def of_row(cls, row: Sequence[float]) -> "Report":
        """The report that a row holds."""
        numbers = len(cls._fields) - 1
        return cls._make([*row[:numbers], bends_of(row[numbers:])])
