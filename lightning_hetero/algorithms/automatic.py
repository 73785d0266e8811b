"""Options of ``hetero_auto``, and its averager until it has chosen: there is one replica, so nothing is averaged."""

from dataclasses import dataclass

from typing_extensions import override

from lightning_hetero.algorithms.base import Averager, StepContext
from lightning_hetero.argument_checks import at_least_one, is_number, one_of
from lightning_hetero.errors import ConfigurationError


@dataclass
class AutoAverager(Averager):
    """Begins with gradients over all ranks, measures, and leaves it to the cost model which algorithm goes on.

    Args:
        gain: how much faster a strategy must be than one that learns more in a step, as a fraction of samples per
            second.
        exact: never leave ``hetero_ddp``: the weights stay those of one process.
        deterministic: choose no asynchronous strategy: two runs that choose alike give the same weights.
        every: steps between two exchanges of strategies that meet now and then.
        wire: number format between replicas, for strategies that have one: ``"fp32"``, ``"bf16"``, ``"int8"``
            or ``"int4"``.
        measure: optimizer steps after which the choice is made; sooner, from the fourth one on, if another strategy
            promises twice as much as ``1 + gain`` asks for. If not every rank has measured its speed by then, as many
            again, up to ten times.

    Raises:
        ConfigurationError: ``gain`` is no number of at least 0, ``every`` or ``measure`` is below 1, the wire is
            unknown, or ``exact`` or ``deterministic`` is neither true nor false.
    """

    gain: float = 0.2
    exact: bool = False
    deterministic: bool = False
    every: int = 16
    wire: str = "fp32"
    measure: int = 50

    def __post_init__(self) -> None:
        if not is_number(self.gain) or self.gain < 0:
            raise ConfigurationError(f"gain={self.gain!r} must be a number of at least 0, such as 0.2 for 20%.")
        at_least_one("every", self.every)
        at_least_one("measure", self.measure)
        one_of("wire", self.wire, ("fp32", "bf16", "int8", "int4"))
        one_of("exact", self.exact, (True, False))
        one_of("deterministic", self.deterministic, (True, False))

    @override
    def due(self, context: StepContext) -> bool:
        return False
