"""What an algorithm between replicas is."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hetero.averaging.moments import clear_broken
from lightning_hetero.comm.all_reduce import Average
from lightning_hetero.comm.links import ReplicaLinks
from lightning_hetero.comm.replica import Replica, wide


class StepContext(NamedTuple):
    """What all ranks know alike about the step that has just been taken.

    Attributes:
        step: optimizer steps (accumulation windows) since the start of the fit, this one included.
        epoch_ends: whether it was the last of its epoch.
        samples_per_replica: samples of a full batch that each replica takes by the plan in force.
    """

    step: int
    epoch_ends: bool
    samples_per_replica: Sequence[int]


class Averager(ABC):
    """Brings the parameters of replicas together; touches neither Lightning nor the data.

    Only :meth:`before_step` and :meth:`after_step` change parameters. :meth:`consensus` and :meth:`state_dict` may wait
    for other replicas, but never mix, cancel or advance, so that validating and saving do not change the training.

    Attributes:
        replica: this rank's values, since :meth:`setup`.
        links: the wires to other replicas, since :meth:`setup`.
        optimizers: gives the optimizers, since :meth:`setup`.
        reference: the last mean that all ranks know, on the CPU, in fp32 or wider. What travels is the difference from
            it, which is small, so that rounding it on the wire is harmless.
    """

    reference: list[Tensor]
    #: Whether all ranks wait for each other when they meet.
    blocking = True
    #: Whether one replica alone has nothing to average.
    needs_others = True
    #: Whether all replicas exchange after the same steps.
    lockstep = True
    #: What a replica continues with after its own values were left out because they were not finite, in words.
    fresh_start = "the mean of the others"
    #: What to tell the user, if anything.
    warning: str | None = None
    #: How many exchanges this replica has completed in this fit, if what it validates depends on that.
    meetings: int | None = None
    #: What is validated and saved between two exchanges, in words.
    between = ""
    #: Where replicas exchange one to one, at the end: of each, its completed exchanges with each.
    pairings: list[list[int]] | None = None

    def setup(self, replica: Replica, links: ReplicaLinks, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
        """Learn what to average and with whom. All replicas hold the same values now.

        Args:
            replica: this rank's values.
            links: the wires to other replicas.
            optimizers: gives the optimizers, whose state appears with their first step.
        """
        self.replica, self.links, self.optimizers = replica, links, optimizers
        self._packed = replica.pack()
        self.reference = [flat.to("cpu", wide(flat), copy=True) for flat in self._packed]
        self._spare: list[Tensor] = []

    def before_step(self, context: StepContext) -> None:  # noqa: B027 - not all algorithms need it
        """Before a window's first forward pass; ``context.step`` counts the steps before it."""

    @abstractmethod
    def after_step(self, context: StepContext) -> None:
        """After the optimizer's step."""

    @abstractmethod
    def due(self, context: StepContext) -> bool:
        """Whether all replicas meet after this step; on the same steps for all."""

    def meet(self, samples_per_replica: Sequence[int]) -> None:
        """Average all replicas, which then are equal (collective)."""
        self._spare = self.adopt(self._average(samples_per_replica))

    def _average(self, samples_per_replica: Sequence[int]) -> Average:
        """The mean of all replicas (collective), in memory that the next one will overwrite."""
        self._packed = self.replica.pack(self._packed)
        self._spare = self._spare or [torch.empty_like(old) for old in self.reference]
        return self.links.average(self._packed, samples_per_replica, self.reference, self._spare)

    def adopt(self, average: Average) -> list[Tensor]:
        """Take over the mean; returns memory that is free now."""
        self.replica.unpack(average.mean)
        if not average.healthy[self.links.index]:
            clear_broken(self.optimizers())
        return self.refer_to(average)

    def refer_to(self, average: Average) -> list[Tensor]:
        """Let the mean be the new reference; returns memory that is free now: the old one."""
        free, self.reference = self.reference, average.mean
        return free

    def consensus(self, samples_per_replica: Sequence[int]) -> list[Tensor]:
        """The values to evaluate and to save: here the mean of all replicas, weighted by samples (collective)."""
        return self._average(samples_per_replica).mean

    def finish(self, samples_per_replica: Sequence[int]) -> None:
        """End of the fit: complete what is in flight and make all replicas equal (collective)."""
        self.meet(samples_per_replica)

    def status(self, step: int) -> dict[str, float | str]:
        """What people may want to see of the algorithm's course, by name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """This replica's own state; tensors and builtins only."""
        return {"reference": self.reference}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self.reference = state["reference"]

    def close(self) -> None:  # noqa: B027 - not all algorithms hold resources
        """Let go of all resources; local, idempotent, also after an error."""
