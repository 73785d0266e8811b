"""Lets optimizers go on from states that were saved anywhere."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only


def restore(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Let an optimizer go on from a state, each tensor on the device on which the optimizer needs it.

    PyTorch moves what belongs to a parameter to that parameter's device, but for numbers of steps, which it keeps where
    it counts them. What belongs to none goes to the device of the first parameter.

    Args:
        optimizer: with its parameters on their devices.
        state: of its ``state_dict()``, on the CPU.
    """
    optimizer.load_state_dict(dict(state))
    device = optimizer.param_groups[0]["params"][0].device

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device)

    for key, value in optimizer.state.items():
        if not isinstance(key, Tensor):
            optimizer.state[key] = tree_map_only(torch.Tensor, moved, value)
