"""Base of algorithms with a center, and of those in which all replicas exchange with it at the same step."""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import ClassVar

from torch import Tensor, nn
from typing_extensions import override

from lightning_hetero.algorithms.base import (
    Averager,
    LowBitAverager,
    Outcome,
    StepContext,
    Traits,
    zero_nonfinite_state,
)
from lightning_hetero.algorithms.state import Own
from lightning_hetero.comm.all_reduce import Average, Contribution
from lightning_hetero.comm.staging import memory_like
from lightning_hetero.errors import ConfigurationError
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
        self.check_tau()
        if not isinstance(self.exclude, (list, tuple)) or not all(isinstance(name, str) for name in self.exclude):
            raise ConfigurationError(
                f"exclude={self.exclude!r}: give a list of names, such as ['embedding.weight', '*norm*']."
            )
        self.exclude = tuple(self.exclude)

    def check_tau(self) -> None:
        """See that tau is a number of steps.

        Raises:
            ConfigurationError: it is not.
        """
        if type(self.tau) is not int or self.tau < 1:
            raise ConfigurationError(f"tau={self.tau!r} must be a whole number of optimizer steps, at least 1.")

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
    def join_values(self, context: StepContext) -> list[Tensor]:
        # The center is some exchanges behind the replicas: what they have learned since would be lost.
        return super().consensus(context)

    @override
    def finish(self, context: StepContext) -> Outcome | None:
        self.complete(context)
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


class SyncCenterAverager(LowBitAverager, CenteredAverager):
    """Every tau steps replicas and their center move towards each other.

    With ``D_i = x_i - c`` and weights that sum to 1::

        x_i <- x_i - a D_i
        c   <- Outer(c, grad = -sum_i w_i D_i)

    and each algorithm is a setting of ``a`` and ``Outer``. ``D_i`` is taken before the replica's own step. Every rank
    keeps the center, bitwise the same.

    Attributes:
        overlap: exchange in the background of the step.
    """

    overlap: ClassVar[bool] = False

    @override
    def prepare(self) -> Outcome | None:
        self._exchange: Callable[[], Average] | None = None
        self._snapshot, self._packed = self._packed[: self.replica.included], []
        self._mean = [memory_like(old) for old in self.center]  # memory for the next exchange
        if self.overlap:
            self.links.prepare()
        return None

    @property
    def center(self) -> list[Tensor]:
        """``c``, which every rank keeps up to date."""
        return self.last_center

    @override
    def due(self, context: StepContext) -> bool:
        return context.step % self.tau == 0

    @override
    def before_step(self, context: StepContext) -> None:
        if self.due(context._replace(step=context.step + 1)):
            self._begin(context)

    @override
    def meet(self, context: StepContext) -> Outcome | None:
        exchange = self._exchange or self._begin(context)  # replicas may have been lost since the step began
        average, self._exchange = exchange(), None
        self._distance = average.displacement  # RMS over the replicas
        own = [value.to("cpu", c.dtype).sub_(c) for value, c in zip(self._snapshot, self.center, strict=True)]
        warning = self.move(own, average)
        if not average.healthy[self.links.index]:
            self.restart_from(self.center)
        self.commits += 1
        return Outcome(exchanged=True, warning=warning)

    def _begin(self, context: StepContext) -> Callable[[], Average]:
        """Take ``x_i``, and exchange the differences: now in the background, or when the result is asked for."""
        weights, payload = context.samples_per_replica, self.payload()
        if self.overlap:
            self._snapshot, copied = self.replica.snapshot(self._snapshot)
            own = Contribution(self._snapshot, weights, self.center, self.wire, payload, self.feedback, copied)
            self._exchange = self.links.begin(own, self._mean, want="difference").result
        else:
            self._snapshot = self.position(self._snapshot)
            own = Contribution(self._snapshot, weights, self.center, self.wire, payload, self.feedback)
            self._exchange = lambda: self.links.exchange(own, self._mean, want="difference")
        return self._exchange

    def position(self, out: Sequence[Tensor]) -> list[Tensor]:
        """``x_i``, of which differences are taken."""
        return self.replica.pack(out)

    def payload(self) -> float:
        """A number of this replica for all."""
        return 0.0

    @abstractmethod
    def move(self, own: list[Tensor], average: Average) -> str | None:
        """Move replica and center: the kernel.

        Args:
            own: ``D_i``: vectors like the center.
            average: with ``sum_i w_i D_i`` as its ``difference``.

        Returns:
            What to warn the user of, if anything.
        """


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
