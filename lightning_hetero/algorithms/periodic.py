"""Periodic averaging: replicas train apart and meet every K steps (eDNNcomm)."""

from dataclasses import dataclass, field

import torch
from typing_extensions import override

from lightning_hetero.algorithms.base import LowBitAverager, Outcome, StepContext
from lightning_hetero.argument_checks import at_least_one
from lightning_hetero.comm.all_reduce import Average, Contribution
from lightning_hetero.comm.compression import check_wire
from lightning_hetero.comm.staging import memory_like
from lightning_hetero.replicas.optimizer_states import OptimizerMoments
from lightning_hetero.replicas.vectors import wide_dtype


@dataclass
class PeriodicAverager(LowBitAverager):
    """Every K steps ``x_i <- sum_j w_j x_j``, with ``w_j`` the part of the samples that replica ``j`` takes.

    Source: eDNNcomm, Moreno-Alvarez et al. 2023, where the replicas are nodes.

    Args:
        every_n_steps: K, in optimizer steps. Default: once per epoch, as in the paper's experiments.
        average_optimizer_state: also average momentum and the like, but never step counts. With it and K = 1, plain SGD
            is exactly flat data-parallel training.
        wire: number format of differences between parameters: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"int8"``,
            ``"int4"``, ``"2bit"`` or ``"topk:0.02"``. The last average of the fit, and those of optimizer states, are
            exact.

    Raises:
        ConfigurationError: ``every_n_steps`` below 1, or an unknown wire.
    """

    every_n_steps: int | None = None
    average_optimizer_state: bool = False
    wire: str = "fp32"
    _moments: OptimizerMoments | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.every_n_steps is not None:
            at_least_one("every_n_steps", self.every_n_steps, ", or None")
        check_wire(self.wire)

    @override
    def prepare(self) -> Outcome | None:
        self._moments = None  # what optimizers hold changes when parameters become trainable
        return None

    @override
    def due(self, context: StepContext) -> bool:
        return context.epoch_ends if self.every_n_steps is None else context.step % self.every_n_steps == 0

    @override
    def meet(self, context: StepContext) -> Outcome | None:
        self._packed = self.replica.pack(self._packed)
        self._spare = self._spare or [memory_like(old) for old in self.reference]
        own = Contribution(self._packed, context.samples_per_replica, self.reference, self.wire, feedback=self.feedback)
        self._take(self.links.exchange(own, self._spare), context)
        return None

    def _take(self, average: Average, context: StepContext) -> None:
        self.adopt(average)
        if self.average_optimizer_state:
            moments = self._moments_of_all()
            flats = moments.pack()
            origin = [torch.zeros_like(f, device="cpu", dtype=wide_dtype(f)) for f in flats]
            layout = moments.layout(self.replica.parameter_ids)
            counted = [n * well for n, well in zip(context.samples_per_replica, average.healthy, strict=True)]
            moments.unpack(self.links.average(flats, counted, origin, layout=layout).mean)

    @override
    def finish(self, context: StepContext) -> Outcome | None:
        self._take(self.average(context), context)  # exact: nothing comes after it
        return None

    def _moments_of_all(self) -> OptimizerMoments:
        if self._moments is None:  # at the first meeting all replicas have taken a step, and so have their state
            names = {name for found in self.links.gather(OptimizerMoments.names(self.optimizers)) for name in found}
            self._moments = OptimizerMoments(self.optimizers, sorted(names))
        return self._moments
