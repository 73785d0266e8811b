"""What a rank reports to the others about its steps."""

import math
from typing import NamedTuple


class Report(NamedTuple):
    """What a rank reports to the others. All are floats, so one small tensor carries them.

    Attributes:
        fixed: ``a`` of its cost, seconds.
        per_sample: ``k`` of its cost, seconds per sample.
        error: how far its cost may be off by noise, as a fraction; infinite while nothing is known.
        drawn: first step that its samplers have not drawn yet.
        samples: samples per step that it processed since its last report, mean.
        compute: seconds per step of its own work since its last report, mean.
        wait: seconds per step that it waited for others since its last report, mean.
        laps: steps that these means are over.
        since: seconds of steps since the rank's speed has changed; infinite if it is not known to have.
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
