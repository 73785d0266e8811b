"""What brings replicas together that have been made equal and take no more optimizer steps."""

from dataclasses import dataclass

from typing_extensions import override

from lightning_hetero.averaging.averager import Averager, StepContext
from lightning_hetero.averaging.facts import Facts


@dataclass
class RestingAverager(Averager):
    """The mean of what still changes, such as BatchNorm's statistics, where it is looked at and at the end.

    Between these replicas do not meet.

    Args:
        pairings: of the averager that has served the replicas before.
    """

    facts = Facts(regrows=True)

    pairings: list[list[int]] | None = None

    @override
    def due(self, context: StepContext) -> bool:
        return False
