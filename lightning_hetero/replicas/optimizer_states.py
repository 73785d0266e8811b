"""Optimizer states, restored wherever they were saved; their moments; and hyperparameters, which ranks must share."""

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
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), None)  # groups may be empty
    for key, value in optimizer.state.items():
        if not isinstance(key, Tensor):
            optimizer.state[key] = tree_map_only(Tensor, partial(Tensor.to, device=device), value)


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


# -- moments ---------------------------------------------------------------------------------------


class OptimizerMoments:
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
                for name, value in state.items() if isinstance(parameter, Tensor) else ():
                    if not isinstance(value, Tensor):
                        continue
                    # Of all parameters: a number beside a parameter that is one itself only happens to have its shape.
                    found[i, name] = found.get((i, name), name != "step") and _is_moment(value, parameter)
        return sorted(entry for entry, is_moment in found.items() if is_moment)

    def pack(self) -> list[Tensor]:
        """One vector per entry, of this rank's values; zeros where a parameter has no such state yet."""
        return [
            torch.cat([self._value(opt, p, name).reshape(-1) for p in _parameters(opt)]) for opt, name in self._slots
        ]

    def layout(self, names: Mapping[int, str]) -> list[dict[str, Tensor]]:
        """Of each entry, the parameters in its vector, by name.

        Args:
            names: of parameters, by their ``id``.
        """
        return [{names[id(p)]: local(p) for p in _parameters(opt)} for opt, _ in self._slots]

    @torch.no_grad()
    def unpack(self, flats: Sequence[Tensor]) -> None:
        """Write vectors back where there is state to write to."""
        for (optimizer, name), flat in zip(self._slots, flats, strict=True):
            parameters = _parameters(optimizer)
            for parameter, part in zip(parameters, flat.split([local(p).numel() for p in parameters]), strict=True):
                value = optimizer.state.get(parameter, {}).get(name)
                if _is_moment(value, parameter):
                    local(value).copy_(part.view_as(local(value)))

    @staticmethod
    def _value(optimizer: Optimizer, parameter: Tensor, name: str) -> Tensor:
        value = optimizer.state.get(parameter, {}).get(name)
        return local(value.detach()) if _is_moment(value, parameter) else torch.zeros_like(local(parameter))


def _is_moment(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point()


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


@torch.no_grad()
def zero_nonfinite_state(optimizers: Sequence[Optimizer]) -> None:
    """Zero what is not finite in optimizers' state, which would break the next step again."""
    for value in tree_leaves([list(optimizer.state.values()) for optimizer in optimizers]):
        if isinstance(value, Tensor) and value.is_floating_point():
            value.nan_to_num_(0.0, 0.0, 0.0)
