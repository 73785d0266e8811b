"""Base of algorithms with a center."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import Tensor, nn
from typing_extensions import override

from lightning_hetero.algorithms.base import Averager, Outcome, StepContext, Traits
from lightning_hetero.algorithms.state import Own
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.replicas.optimizer_states import zero_nonfinite_state
from lightning_hetero.replicas.vectors import Partition, Replica


@dataclass
class CenteredAverager(Averager):
    """Base of algorithms whose result is a center; values that take no part have their mean beside it.

    As long as no replica has met the center, which then is only the model that all began with, it is the mean of all.

    Args:
        tau: optimizer steps from one exchange of a replica to the next.
        exclude: names of parameters and buffers that do not take part, such as norms or embeddings; with patterns:
            ``"*norm*"``. Each replica keeps its own; where the center is looked at, their mean stands for them.

    Raises:
        ConfigurationError: a value that cannot work.

    Attributes:
        reference: the center, as all know it; then, for values that stay excluded, their last mean that all know.
    """

    tau: int
    exclude: Sequence[str] = field(default=(), kw_only=True)
    _cut: Partition | None = field(default=None, init=False, repr=False)  # into fragments

    traits = Traits(
        needs_others=False,
        fresh_start="the center",
        between=(
            "the mean of all replicas before the first exchange, and then the same center as at the latest exchange, "
            "so that early stopping and the choice of a best checkpoint may go by looks at which nothing has changed"
        ),
    )
    _distance = Own[float](math.nan)  # from the center, at the latest exchange

    def __post_init__(self) -> None:
        if not isinstance(self.exclude, (list, tuple)) or not all(isinstance(name, str) for name in self.exclude):
            raise ConfigurationError(
                f"exclude={self.exclude!r}: give a list of names, such as ['embedding.weight', '*norm*']."
            )
        self.exclude = tuple(self.exclude)

    @override
    def make_replica(self, module: nn.Module, settle: Callable[[], None] | None = None) -> Replica:
        replica = Replica(module, settle, self.exclude, cut=self._cut)
        check_patterns(self.exclude, replica.names)
        return replica

    @property
    def last_center(self) -> list[Tensor]:
        """The center as all ranks last read it, as vectors on the CPU, in fp32 or wider."""
        return self.reference[: self.replica.included]

    def restart_from(self, center: Sequence[Tensor]) -> None:
        """Let this replica, which is not finite, go on from the center."""
        self.replica.unpack(center)
        self.replica.replace_nonfinite(self.reference)  # what takes no part
        zero_nonfinite_state(self.optimizers)

    @property
    def uses_center(self) -> bool:
        """Whether the center is what to validate and to save, once a replica has met it; the same on all ranks."""
        return self.commits > 0

    @property
    @override
    def consensus_is_mean(self) -> bool:
        return type(self).consensus is CenteredAverager.consensus

    @override
    def consensus(self, context: StepContext) -> list[Tensor]:
        if not self.uses_center:
            return super().consensus(context)
        first = self.replica.included
        if first == len(self.reference):  # nothing stays excluded
            return self.last_center
        excluded = self.replica.pack()[first:]
        own, layout = self.reference[first:], self.replica.layout[first:]
        mean = self.links.average(excluded, context.samples_per_replica, own, layout=layout).mean
        return [*self.last_center, *mean]

    @override
    def finish(self, context: StepContext) -> Outcome | None:
        self.replica.unpack(self.consensus(context))
        if not math.isnan(self._distance):
            return None
        left = "the center as it was" if self.uses_center else "the mean of all replicas"
        return Outcome(
            warning=f"No replica has met the center in this fit: tau={self.tau} steps are more than there were, or "
            f"alpha is 0. What is left is {left}. Lower tau, or train for longer."
        )

    @override
    def status(self, step: int) -> dict[str, float | str]:
        return {"center_distance": self._distance}


def check_patterns(excluded: Sequence[str], names: Sequence[str]) -> None:
    """See that each pattern names something.

    Raises:
        ConfigurationError: one does not.
    """
    for pattern in excluded:
        if not any(fnmatchcase(name, pattern) for name in names):
            shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise ConfigurationError(
                f"exclude: {pattern!r} is the name of no parameter or buffer that replicas exchange: {shown}. (Frozen "
                "ones stay excluded anyway, tied ones go by their first name.)"
            )
