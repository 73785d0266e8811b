"""Drift check: the parameters of a replica stay the same where its ranks compute on unlike devices."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_hetero.comm.failures import deadline
from lightning_hetero.comm.topology import widest_float


class Drift(NamedTuple):
    """Distance of a rank's parameters from those of the first one.

    Attributes:
        rank: which one.
        distance: Euclidean, as estimated from sums, relative to the norm of the parameters.
        name: of the parameter with the largest part in it.
    """

    rank: int
    distance: float
    name: str


class ParameterDriftCheck:
    """Check, now and then, that a replica's ranks hold the same parameters.

    All ranks step with the same gradients, to the last bit. But kinds of devices round differently within an optimizer,
    and what differs in the last bit grows with the steps. So every :attr:`EVERY` optimizer steps the ranks compare a
    sum for each parameter. If the differences of elements have random signs, the squared difference of two sums is, on
    average, the squared distance of the two parameters; if they have one sign, it is more.

    Where the distance of a rank exceeds :attr:`LIMIT`, all take over the parameters of the first rank, with a warning.

    Args:
        ranks: of the replica.
        group: of these ranks, for tensors on their devices.
        small: of these ranks, for small tensors on CPUs.
    """

    EVERY = 100  #: optimizer steps between two comparisons
    LIMIT = 1e-4  #: of a distance, relative to the norm of the parameters; rounding of fp32 stays far below

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup, small: dist.ProcessGroup) -> None:
        self._ranks, self._group, self._small = ranks, group, small
        self._steps = 0

    def stepped(self, module: nn.Module, where: Callable[[], str]) -> list[Drift]:
        """An optimizer has stepped: compare now and then, and take over the first rank's parameters if need be.

        Collective over the replica.

        Args:
            module: the model.
            where: says which step this is.

        Returns:
            The ranks that were too far from the first one; the same on every rank.
        """
        self._steps += 1
        if self._steps % self.EVERY:
            return []
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        own = sums_of(list(parameters.values()))
        rows = [torch.empty_like(own) for _ in self._ranks]
        with deadline("compare the parameters of unlike devices"):
            dist.all_gather(rows, own, group=self._small)
            far = [d for d in drifts(rows, self._ranks, list(parameters)) if not d.distance <= self.LIMIT]
            if far:
                for parameter in parameters.values():
                    dist.broadcast(parameter.data, self._ranks[0], group=self._group)
        if far:
            worst = max(far, key=lambda drift: drift.distance)
            rank_zero_warn(
                f"Parameters differ between the devices of a replica: those of rank {worst.rank} were "
                f"up to {worst.distance:.1e} of their norm away from rank {self._ranks[0]}'s at {where()}, most of "
                f"it in {worst.name!r}. All of its ranks have taken over rank {self._ranks[0]}'s. Rounding alone does "
                "not do that: look for what differs between the ranks, such as an optimizer's state or options."
            )
        return far


def sums_of(tensors: Sequence[Tensor]) -> Tensor:
    """A row of each tensor: the sum and the Euclidean norm of its values; float64 on the CPU, of shape (tensors, 2)."""
    rows = []
    for tensor in tensors:
        values, wide = tensor.detach(), widest_float(tensor.device)
        if wide is not torch.float64:
            values, wide = values.cpu(), torch.float64
        rows.append(torch.stack([values.sum(dtype=wide), torch.linalg.vector_norm(values, dtype=wide)]))
    return torch.stack(rows).cpu() if rows else torch.zeros(0, 2, dtype=torch.float64)


def drifts(rows: Sequence[Tensor], ranks: Sequence[int], names: Sequence[str]) -> list[Drift]:
    """Distance of each rank but the first from the first one.

    Args:
        rows: of each rank, as :func:`sums_of` returns them.
        ranks: of the replica.
        names: of the parameters.
    """
    first, norm = rows[0][:, 0], float(rows[0][:, 1].norm())
    found = []
    for rank, other in zip(ranks[1:], rows[1:], strict=True):
        difference = (other[:, 0] - first).abs()
        distance = float(difference.norm()) / norm if norm else float(difference.norm())
        name = names[int(difference.nan_to_num(math.inf).argmax())] if names else ""
        found.append(Drift(rank, distance, name))
    return found
