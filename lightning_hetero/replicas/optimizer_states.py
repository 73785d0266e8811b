"""Optimizer states, restored wherever they were saved; and hyperparameters, which ranks must share."""

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_hetero.comm.agreement import check_equal, gather
from lightning_hetero.replicas.sharding import in_shards, is_dtensor, local

_HOW = ("foreach", "fused", "capturable", "differentiable")  # of an optimizer: how it computes, on this device
_CLOSE = 1e-3  # relative: unlike machines may compute a schedule, or an adaptive scale, a little differently


def of_rank(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's ``state_dict()``, with this rank's shards of what is sharded."""
    return tree_map_only(Tensor, local, optimizer.state_dict())


def restore(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Let an optimizer go on from a state, each tensor on the device on which the optimizer needs it.

    PyTorch moves what belongs to a parameter to that parameter's device, but for numbers of steps, which it keeps where
    it counts them. What belongs to none goes to the device of the first parameter.

    Args:
        optimizer: with its parameters on their devices.
        state: of its ``state_dict()``, on the CPU, or of :func:`of_rank`.
    """
    optimizer.load_state_dict(dict(state))
    for parameter, values in optimizer.state.items():
        if is_dtensor(parameter):
            optimizer.state[parameter] = tree_map_only(Tensor, partial(in_shards, parameter), values)
    device = optimizer.param_groups[0]["params"][0].device

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device)

    for key, value in optimizer.state.items():
        if not isinstance(key, Tensor):
            optimizer.state[key] = tree_map_only(torch.Tensor, moved, value)


def hyperparameters(optimizers: Sequence[Optimizer]) -> dict[str, float]:
    """The numbers in the parameter groups of optimizers, by what a message calls them.

    Tensors on an accelerator are left out: to read them would wait for it.
    """
    return dict(_numbers(optimizers))


def _numbers(optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, float]]:
    for index, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            where = (f" of optimizer {index}" if len(optimizers) > 1 else "") + f", group {number}"
            for name, setting in group.items():
                if name == "params" or name in _HOW:
                    continue
                values = tree_leaves(setting)
                for place, value in enumerate(values):
                    called = f"{name}[{place}]{where}" if len(values) > 1 else name + where
                    if isinstance(value, int | float):
                        yield called, float(value)
                    elif isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
                        yield called, value.item()


def settings_number(settings: Mapping[str, float]) -> int:
    """A number that differs where hyperparameters differ by more than machines do."""
    return zlib.crc32(" ".join(f"{value:.4g}" for value in settings.values()).encode())


def check_settings(settings: Mapping[str, float], step: int, group: dist.ProcessGroup | None) -> None:
    """Check that ranks have the same hyperparameters, where their numbers differ (collective).

    Args:
        settings: of this rank, when it sent its number.
        step: batches done then.
        group: the ranks. ``None``: all.

    Raises:
        DisagreementError: on every rank, with each rank's values.
    """
    first, *others = gather(dict(settings), "the hyperparameters of optimizers", group)
    if all(other.keys() == first.keys() and all(map(_close, first.values(), other.values())) for other in others):
        return
    check_equal(
        f"the hyperparameters of optimizers after batch {step}, though they average gradients: a scheduler or a "
        "callback has changed them by what each rank has for itself. Let it go by a value that all ranks share, such "
        "as one of self.log(..., sync_dist=True) or trainer.strategy.reduce",
        {name: f"{value:.6g}" for name, value in settings.items()},
        group,
    )


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_CLOSE) or (math.isnan(one) and math.isnan(other))
