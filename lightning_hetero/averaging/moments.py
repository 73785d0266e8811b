"""Optimizer state that can be averaged: tensors shaped like their parameters, such as momentum."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


class Moments:
    """The moments of all optimizers as flat vectors. Step counts are never among them.

    Args:
        optimizers: the optimizers of this rank.
        names: state entries to take, in the order of :meth:`names`; agreed among replicas, since a replica may not
            have them all yet.
    """

    def __init__(self, optimizers: Sequence[Optimizer], names: Sequence[tuple[int, str]]) -> None:
        self._slots = [(optimizers[i], name) for i, name in names]

    @staticmethod
    def names(optimizers: Sequence[Optimizer]) -> list[tuple[int, str]]:
        """Entries that this rank has: (number of the optimizer, name of the state entry)."""
        found = {
            (i, name)
            for i, optimizer in enumerate(optimizers)
            for parameter, state in optimizer.state.items()
            for name, value in state.items()
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point()
        }
        return sorted(found)

    def pack(self) -> list[Tensor]:
        """One vector per entry; zeros where a parameter has no such state yet."""
        return [
            torch.cat([self._value(opt, p, name).reshape(-1) for p in _parameters(opt)]) for opt, name in self._slots
        ]

    @torch.no_grad()
    def unpack(self, flats: Sequence[Tensor]) -> None:
        """Write vectors back where there is state to write to."""
        for (optimizer, name), flat in zip(self._slots, flats, strict=True):
            parameters = _parameters(optimizer)
            for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                if name in optimizer.state.get(parameter, {}):
                    optimizer.state[parameter][name].copy_(part.view_as(parameter))

    @staticmethod
    def _value(optimizer: Optimizer, parameter: Tensor, name: str) -> Tensor:
        value = optimizer.state.get(parameter, {}).get(name)
        return torch.zeros_like(parameter) if value is None else value.detach()


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


@torch.no_grad()
def clear_broken(optimizers: Sequence[Optimizer]) -> None:
    """Zero what is not finite in optimizers' state, which would break the next step again."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and value.is_floating_point():
                    value.nan_to_num_(0.0, 0.0, 0.0)
