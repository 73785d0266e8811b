"""How far ranks have come when one of them is lost."""

from typing import NamedTuple


class Standing(NamedTuple):
    """How far a rank has come.

    Attributes:
        windows: optimizer steps.
        meetings: exchanges between replicas.
        calls: collectives over all ranks.
        next_step: the first step that it has not drawn yet.
        reports: how many times it has acted on the reports of all ranks.
    """

    windows: int
    meetings: int
    calls: int
    next_step: int
    reports: int


class Behind(NamedTuple):
    """What others have completed while this rank lost its connections.

    Attributes:
        step: the running optimizer step; the weights after it are there now.
        exchange: the exchange between replicas that follows a step.
    """

    step: bool
    exchange: bool
