"""What a training of the demo leaves behind, and what follows from it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from lightning_hetero.workload.shares import Cost

#: The emulated devices, one per rank: two alike, one half as fast, one a quarter as fast.
DEVICES = [Cost(0.010, 0.002), Cost(0.010, 0.002), Cost(0.010, 0.004), Cost(0.010, 0.008)]
GLOBAL_BATCH = 64
#: First steps of a training that its time per epoch leaves out: memory is allocated, connections are opened.
WARM_UP = 3


class Step(NamedTuple):
    """One step of one rank.

    Attributes:
        epoch: counted from 0.
        start: seconds on a clock that all ranks share.
        samples: samples that the rank processed.
        work: seconds of its own work.
        wait: seconds that it waited for others.
    """

    epoch: int
    start: float
    samples: int
    work: float
    wait: float


@dataclass(frozen=True)
class Result:
    """One training.

    Attributes:
        strategy: as given to the Trainer.
        accuracy: fraction of the test digits read right.
        ranks: for each rank its steps, in order.
    """

    strategy: str
    accuracy: float
    ranks: list[list[Step]]

    @classmethod
    def load(cls, path: Path) -> "Result":
        """Read what :meth:`save` wrote."""
        content = json.loads(path.read_text())
        return cls(**{**content, "ranks": [[Step(*step) for step in steps] for steps in content["ranks"]]})

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @property
    def epoch_seconds(self) -> float:
        """Seconds per epoch, as the mean time from one step's start to the next one's, times the steps of an epoch."""
        steps = self.ranks[0]
        pairs = zip(steps[WARM_UP:], steps[WARM_UP + 1 :], strict=False)
        return mean(b.start - a.start for a, b in pairs if a.epoch == b.epoch) * self.steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        return sum(step.epoch == 0 for step in self.ranks[0])

    @property
    def shares(self) -> list[int]:
        """Samples per rank in the last step."""
        return [steps[-1].samples for steps in self.ranks]

    def waiting(self, rank: int | None = None) -> float:
        """Fraction of the steps' time that a rank (default: all of them) spent waiting for others."""
        steps = [step for steps in (self.ranks if rank is None else [self.ranks[rank]]) for step in steps[WARM_UP:]]
        return sum(step.wait for step in steps) / sum(step.work + step.wait for step in steps)
