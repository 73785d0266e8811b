"""A rank that has no sample of a batch takes part with a padding batch, of which nothing may count."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def no_gradients(module: nn.Module) -> Iterator[None]:
    """Backward passes in this block give zeros for all parameters.

    A loss times 0 is not enough: where the loss of a padding batch is not finite (a mean over no token, a standard
    deviation of one sample), its gradient would be NaN for all ranks.
    """
    hooks = [p.register_hook(torch.zeros_like) for p in module.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def same_buffers(module: nn.Module) -> Iterator[None]:
    """Forward passes in this block leave the buffers as they were, such as BatchNorm's running statistics."""
    before = [buffer.detach().clone() for buffer in module.buffers()]
    yield
    for buffer, value in zip(module.buffers(), before, strict=True):
        buffer.data.copy_(value)  # `.data`: the backward pass that follows must not take it for a change
