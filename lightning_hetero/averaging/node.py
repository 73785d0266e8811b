"""Periodic averaging: replicas train apart and meet every K steps (eDNNcomm)."""

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from lightning_hetero.averaging.averager import Averager, StepContext
from lightning_hetero.averaging.moments import Moments


class PeriodicAverager(Averager):
    """Every K steps ``x_i <- sum_j w_j x_j``, with ``w_j`` the part of the samples that replica ``j`` takes.

    Source: eDNNcomm, Moreno-Alvarez et al. 2023, where the replicas are nodes.

    Args:
        every_n_steps: K, in optimizer steps; ``None``: at the end of each epoch, as in the paper's experiments.
        average_optimizer_state: also average the moments (momentum, Adam's), but never the step counts.
    """

    def __init__(self, every_n_steps: int | None = None, average_optimizer_state: bool = False) -> None:
        self.every_n_steps, self.average_optimizer_state = every_n_steps, average_optimizer_state
        self._moments: Moments | None = None
        self._apart = False  # whether replicas have stepped since they met

    @override
    def due(self, context: StepContext) -> bool:
        return context.epoch_ends if self.every_n_steps is None else context.step % self.every_n_steps == 0

    @override
    def after_step(self, context: StepContext) -> None:
        self._apart = True
        if self.due(context):
            self.meet(context.planned)

    @override
    def finish(self, planned: Sequence[int]) -> None:
        if self._apart:
            self.meet(planned)

    def meet(self, planned: Sequence[int]) -> None:
        """Average all replicas (collective)."""
        self._apart = False
        values = self.replica.pack()
        moments = self._moments_of_all() if self.average_optimizer_state else None
        flats: list[Tensor] = values + (moments.pack() if moments else [])
        mean = self.links.average(flats, planned)
        self.replica.unpack(mean[: len(values)])
        if moments:
            moments.unpack(mean[len(values) :])

    def _moments_of_all(self) -> Moments:
        if self._moments is None:  # at the first meeting all replicas have taken a step, and so have their state
            optimizers = self.optimizers()
            names = {name for found in self.links.gather(Moments.names(optimizers)) for name in found}
            self._moments = Moments(optimizers, sorted(names))
        return self._moments
