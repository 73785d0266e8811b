"""Reports of ranks to each other, and the times of steps that follow from them."""

import math
from collections.abc import Sequence
from enum import IntEnum
from statistics import median
from typing import NamedTuple

from lightning_hetero.batching.shares import MOST_BENDS, Cost, bends_of


class Idling(IntEnum):
    """Whether a rank's training step can be left out while the rank has no samples; if not, why."""

    UNKNOWN, POSSIBLE, FIRST, ALONE, MANUAL, GRADIENTS, BUFFERS, COLLECTIVES, STATE, OUTPUT = range(10)

    @property
    def reason(self) -> str:
        """Completes "it keeps its least share: ..."."""
        return _REASONS.get(self, "")


_REASONS = {
    Idling.UNKNOWN: "its training step has not been looked at",
    Idling.ALONE: "gradients are not averaged over all ranks, or each rank has data of its own",
    Idling.FIRST: "it is the first rank, which logs and saves, and gives its buffers to the others",
    Idling.MANUAL: "optimization is manual",
    Idling.GRADIENTS: "the model is sharded, or has sparse gradients, or find_unused_parameters or static_graph is set",
    Idling.BUFFERS: "buffers of the model are not shared (broadcast_buffers=False)",
    Idling.COLLECTIVES: "ranks meet in training_step, by a collective, a SyncBatchNorm or self.log(..., sync_dist=True)"
    " without on_step=False",
    Idling.STATE: "training_step changes attributes or frozen parameters of the module",
    Idling.OUTPUT: "training_step returns more than a loss",
}


class Report(NamedTuple):
    """Report of a rank to the others. It fits in a row of floats of a fixed size, so one small tensor carries it.

    Attributes:
        fixed: ``a`` of its cost, seconds.
        per_sample: ``k`` of its cost, seconds per sample; of a curve, up to its first bend.
        error: how far its cost may be off by noise, as a fraction; infinite while nothing is known.
        drawn: first step that its samplers have not drawn yet.
        samples: samples per step that it processed since its last report, mean.
        compute: seconds per step of its own work since its last report, mean.
        wait: seconds per step that it waited for others since its last report, mean.
        steps: steps that these means are over.
        since: seconds of steps since the rank's speed has changed; infinite if it is not known to have.
        bump: samples of a batch that takes longer than the curve says, because the times bend down; 0 if none does.
        bump_seconds: how long it takes.
        ended: whether its replica has come to the end of its own data, and runs padding batches.
        off_by_cost: how far its times are from what the cost of its samples explains, as a fraction; 0 if unknown.
        off_by_samples: how far they are from what the number of its samples explains.
        settings: a number that stands for the hyperparameters of its optimizers.
        idling: whether it can be left without samples, as a number of :class:`Idling`.
        compiles: whether it uses ``torch.compile``.
        bends: of its cost, at most ``MOST_BENDS``; none if it is a straight line.
    """

    fixed: float
    per_sample: float
    error: float
    drawn: float
    samples: float
    compute: float
    wait: float
    steps: float = 0.0
    since: float = math.inf
    bump: float = 0.0
    bump_seconds: float = 0.0
    ended: float = 0.0
    off_by_cost: float = 0.0
    off_by_samples: float = 0.0
    settings: float = 0.0
    idling: float = 0.0
    compiles: float = 0.0
    bends: tuple[tuple[float, float], ...] = ()

    @property
    def cost(self) -> Cost:
        """The rank's cost."""
        return Cost(self.fixed, self.per_sample, self.bends)

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


class StepTimes(NamedTuple):
    """Times of steps in a row, of each rank.

    Attributes:
        steps: how many, by rank: the same number, unless ranks go at their own pace.
        seconds: that they took, by rank.
        work: of these, seconds of each rank's own work.
    """

    steps: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    work: tuple[float, ...] = ()

    def after(self, reports: Sequence[Report]) -> "StepTimes":
        """With the steps that the ranks report; those of ranks that report at different steps are not the same ones."""
        none = (0.0,) * len(reports)
        rows = [(r.steps, r.steps * (r.compute + r.wait), r.steps * r.compute) for r in reports]
        before = zip(*(column or none for column in self), strict=True)
        sums = [[a + b for a, b in zip(old, new, strict=True)] for old, new in zip(before, rows, strict=True)]
        return StepTimes(*map(tuple, zip(*sums, strict=True)))

    @property
    def shortest(self) -> float:
        """Seconds of the rank with the fewest."""
        return min(self.seconds, default=0.0)

    @property
    def at_own_pace(self) -> bool:
        """Whether ranks go at their own pace."""
        return len(set(self.steps)) > 1


def step_seconds(looks: Sequence[StepTimes]) -> float:
    """Seconds that a step takes, on the rank on which it takes longest.

    Each rank counts by itself first. Where ranks go at their own pace, the longest of each look would be that of a rank
    on which an exchange, or a disturbance, happened to fall into it.
    """
    ranks = range(len(looks[0].steps))
    return max(median(look.seconds[rank] / look.steps[rank] for look in looks) for rank in ranks)
