"""Fragments in the midst of a fit, and their exchanges."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lightning_hetero.comm.all_reduce import Average
from lightning_hetero.comm.encodings import Feedback
from lightning_hetero.comm.links import Exchange
from lightning_hetero.comm.replica import Replica


@dataclass
class Fragment:
    """A part of the model in the midst of a fit.

    Attributes:
        replica: this rank's values of it.
        center: its part of the center, in the center's own memory.
        snapshot: memory for what is sent.
        mean: memory for what arrives.
        feedback: what low-bit messages of it have left out, if there are any.
        lasted: how long its latest exchange lasted, in steps of this replica; NaN before.
        distance: of the replicas from the center, at its latest exchange; NaN before.
    """

    replica: Replica
    center: list[Tensor]
    snapshot: list[Tensor]
    mean: list[Tensor]
    feedback: Feedback | None
    lasted: float = math.nan
    distance: float = math.nan


class Pending(NamedTuple):
    """An exchange that has begun, and has not been mixed in yet.

    Attributes:
        step: optimizer step after which it began.
        average: what the exchange brings, or has brought.
    """

    step: int
    average: Exchange | Average
