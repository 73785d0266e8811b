"""Gradients that travel together."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

#: Values after which a bundle is full: 4 MiB of fp32. A parameter is never cut.
FULL = 1 << 20


@dataclass(frozen=True)
class Bundle:
    """Some parameters of which the gradients travel together, one behind the other.

    Bundles depend on the model only. DDP's buckets depend on the link, too, and change after the first step; what is
    left out of messages would not fit them any more.

    Attributes:
        names: of the parameters.
        parameters: the parameters.
    """

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]

    @property
    def shapes(self) -> list[torch.Size]:
        """Of the parameters."""
        return [p.shape for p in self.parameters]

    @property
    def length(self) -> int:
        """Number of values."""
        return sum(p.numel() for p in self.parameters)

    @property
    def dtype(self) -> torch.dtype:
        """Of the smallest precision, at least fp32, that holds all of the gradients."""
        dtype = torch.float32
        for p in self.parameters:
            dtype = torch.promote_types(dtype, p.dtype)
        return dtype

    def parts(self, values: Tensor) -> list[Tensor]:
        """The part of each parameter in a vector of the bundle."""
        return list(values.split([p.numel() for p in self.parameters]))


def bundles_of(named: Iterable[tuple[str, nn.Parameter]]) -> list[Bundle]:
    """Put trainable parameters into bundles, from the model's end, of which the gradients come first.

    Args:
        named: the model's parameters with their names, in its order.
    """
    bundles, open_ = [], list[tuple[str, nn.Parameter]]()
    for name, p in reversed([pair for pair in named if pair[1].requires_grad]):
        open_.append((name, p))
        if sum(p.numel() for _, p in open_) >= FULL:
            bundles.append(open_)
            open_ = []
    return [Bundle(*zip(*pairs, strict=True)) for pairs in (*bundles, open_) if pairs]
