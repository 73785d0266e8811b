"""A rank without a sample of a batch takes part with a filler, of which nothing may count."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def no_gradients(module: nn.Module) -> Iterator[None]:
    """Backward passes in this block give zeros for all parameters.

    A loss times 0 is not enough: where the loss of a filler is not finite (a mean over no token, a standard deviation
    of one sample), its gradient would be NaN for all ranks.
    """
    hooks = [p.register_hook(torch.zeros_like) for p in module.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def logs_nothing(results: Any) -> Iterator[None]:
    """What ``self.log`` takes in this block adds nothing to any sum, mean, minimum or maximum.

    It is logged all the same: with ``sync_dist=True`` the other ranks wait for it.

    Args:
        results: the Trainer's collection of logged values.
    """
    log = type(results).log

    def neutral(fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, Tensor):
            reduction = getattr(kwargs.get("reduce_fx", torch.mean), "__name__", str(kwargs.get("reduce_fx")))
            nothing = {"max": float("-inf"), "min": float("inf")}.get(reduction.lower(), 0.0)
            value = torch.full_like(value, nothing, dtype=value.dtype if value.is_floating_point() else torch.float32)
        log(results, fx, name, value, *args, **{**kwargs, "batch_size": 0})

    results.log = neutral
    try:
        yield
    finally:
        del results.log
