"""Periodic averaging: replicas train apart and meet every K steps (eDNNcomm)."""

from collections.abc import Sequence

import torch
from typing_extensions import override

from lightning_hetero.averaging.averager import Averager, StepContext
from lightning_hetero.averaging.moments import Moments
from lightning_hetero.comm.replica import wide


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

    @override
    def due(self, context: StepContext) -> bool:
        return context.epoch_ends if self.every_n_steps is None else context.step % self.every_n_steps == 0

    @override
    def after_step(self, context: StepContext) -> None:
        if self.due(context):
            self.meet(context.samples_per_replica)

    @override
    def meet(self, samples_per_replica: Sequence[int]) -> None:
        super().meet(samples_per_replica)
        if self.average_optimizer_state:
            moments = self._moments_of_all()
            flats = moments.pack()
            origin = [torch.zeros_like(f, device="cpu", dtype=wide(f)) for f in flats]
            moments.unpack(self.links.average(flats, samples_per_replica, origin).mean)

    def _moments_of_all(self) -> Moments:
        if self._moments is None:  # at the first meeting all replicas have taken a step, and so have their state
            optimizers = self.optimizers()
            names = {name for found in self.links.gather(Moments.names(optimizers)) for name in found}
            self._moments = Moments(optimizers, sorted(names))
        return self._moments
