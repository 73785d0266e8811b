"""Periodic averaging: replicas train apart and meet every K steps (eDNNcomm)."""

from dataclasses import dataclass, field

import torch
from typing_extensions import override

from lightning_hetero.averaging.averager import Averager, Facts, Outcome, StepContext
from lightning_hetero.averaging.moments import Moments
from lightning_hetero.checks import at_least_one
from lightning_hetero.comm.replica import wide


@dataclass
class PeriodicAverager(Averager):
    """Every K steps ``x_i <- sum_j w_j x_j``, with ``w_j`` the part of the samples that replica ``j`` takes.

    Source: eDNNcomm, Moreno-Alvarez et al. 2023, where the replicas are nodes.

    Args:
        every_n_steps: K, in optimizer steps. Default: once per epoch, as in the paper's experiments.
        average_optimizer_state: also average momentum and the like, but never step counts. With it and K = 1, plain SGD
            is exactly flat data-parallel training.

    Raises:
        ConfigurationError: ``every_n_steps`` below 1.
    """

    facts = Facts(regrows=True)

    every_n_steps: int | None = None
    average_optimizer_state: bool = False
    _moments: Moments | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.every_n_steps is not None:
            at_least_one("every_n_steps", self.every_n_steps, ", or None")

    @override
    def prepare(self) -> Outcome | None:
        self._moments = None  # what optimizers hold changes when parameters become trainable
        return None

    @override
    def due(self, context: StepContext) -> bool:
        return context.epoch_ends if self.every_n_steps is None else context.step % self.every_n_steps == 0

    @override
    def meet(self, context: StepContext) -> Outcome | None:
        self.adopt(self.average(context))
        if self.average_optimizer_state:
            moments = self._moments_of_all()
            flats = moments.pack()
            origin = [torch.zeros_like(f, device="cpu", dtype=wide(f)) for f in flats]
            moments.unpack(self.links.average(flats, context.samples_per_replica, origin).mean)
        return None

    @override
    def finish(self, context: StepContext) -> Outcome | None:
        return self.meet(context)

    def _moments_of_all(self) -> Moments:
        if self._moments is None:  # at the first meeting all replicas have taken a step, and so have their state
            names = {name for found in self.links.gather(Moments.names(self.optimizers)) for name in found}
            self._moments = Moments(self.optimizers, sorted(names))
        return self._moments
