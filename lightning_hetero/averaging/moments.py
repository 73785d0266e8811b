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
        found: dict[tuple[int, str], bool] = {}
        for i, optimizer in enumerate(optimizers):
            for parameter, state in optimizer.state.items():
                for name, value in state.items():
                    if not isinstance(value, Tensor):
                        continue
                    # Of all parameters: a number beside a parameter that is one itself only happens to have its shape.
                    found[i, name] = found.get((i, name), name != "step") and _is_moment(value, parameter)
        return sorted(entry for entry, is_moment in found.items() if is_moment)

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
                value = optimizer.state.get(parameter, {}).get(name)
                if _is_moment(value, parameter):
                    value.copy_(part.view_as(parameter))

    @staticmethod
    def _value(optimizer: Optimizer, parameter: Tensor, name: str) -> Tensor:
        value = optimizer.state.get(parameter, {}).get(name)
        return value.detach() if _is_moment(value, parameter) else torch.zeros_like(parameter)


def _is_moment(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point()


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
