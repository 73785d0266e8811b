"""The options that all strategies share, checked."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from lightning_hetero.errors import ConfigurationError
from lightning_hetero.workload.planner import Planner


@dataclass(frozen=True)
class Options:
    """What the user asked for; the same on every rank. See ``HeteroStrategy`` for the meaning of each.

    Raises:
        ConfigurationError: a value that cannot work.
    """

    strategy: str
    balance: Literal["auto", "off"] | list[float]
    global_batch_size: int | None
    min_batch_size: int | list[int] | None
    max_batch_size: int | list[int] | None
    rebalance_every_n_steps: int
    ranks_per_node: int | list[int] | None
    timeout: timedelta

    def __post_init__(self) -> None:
        if self.balance not in ("auto", "off") and not isinstance(self.balance, list | tuple):
            raise ConfigurationError(
                f"balance={self.balance!r}: give 'auto', 'off', or a list with one share per rank."
            )
        for name in ("global_batch_size", "rebalance_every_n_steps"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigurationError(f"{name}={value!r} must be a whole number of at least 1.")
        if self.timeout <= timedelta(0):
            raise ConfigurationError(f"timeout={self.timeout}: the longest wait must be above 0 seconds.")
        if not isinstance(self.balance, str):
            self.planner(len(self.balance))  # raises now rather than after the launch

    def planner(self, world: int) -> Planner:
        """A planner for ``world`` ranks."""
        return Planner(world, self.balance, self.min_batch_size, self.max_batch_size)
