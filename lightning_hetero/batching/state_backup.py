"""Backup of a model's state and its optimizers', restored after steps that were only tried."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

Restore = Callable[[], Any]


class StateBackup:
    """Backup of what objects held, each once.

    That covers parameters, buffers, gradients, and what attributes hold: numbers, texts, tensors, generators of random
    numbers, other modules such as metrics, and lists, dictionaries and sets of these. It does not cover objects of
    other classes that an attribute holds.

    Args:
        whole: which objects are kept as they are, without what they hold; default: none.
        counters: whether numbers in dictionaries, such as those of a ``Counter``, are restored too.
    """

    def __init__(self, whole: Callable[[Any], bool] = lambda _: False, counters: bool = True) -> None:
        self._whole, self._counters = whole, counters
        self._seen: dict[int, Any] = {}  # the objects themselves, so that no other gets the id of one
        self._restores: list[Restore] = []

    def restore(self) -> None:
        """Let all objects hold again what they held."""
        for restore in self._restores:
            restore()

    def keep(self, value: Any) -> None:
        """Note what an object holds, and what these objects hold."""
        if isinstance(value, str | bytes | int | float | complex | type | None) or id(value) in self._seen:
            return
        if self._whole(value):
            return
        self._seen[id(value)] = value
        if (restore := self._restore_of(value)) is not None:
            self._restores.append(restore)
        for part in _parts(value):
            self.keep(part)

    def _restore_of(self, value: Any) -> Restore | None:
        if isinstance(value, Tensor):
            return _restore_tensor(value)
        if isinstance(value, nn.Module | Optimizer):
            return _restore_dict(vars(value), numbers=True)
        if isinstance(value, dict):
            return _restore_dict(value, self._counters)
        if isinstance(value, list):
            return partial(value.__setitem__, slice(None), list(value))
        if isinstance(value, set | deque):
            return partial(_refill, value, list(value))
        if isinstance(value, torch.Generator):
            return partial(value.set_state, value.get_state())
        if isinstance(value, random.Random):
            return partial(value.setstate, value.getstate())
        if isinstance(value, np.random.Generator):
            return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
        return None


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, nn.Module | Optimizer):
        yield from list(vars(value).values())
    elif isinstance(value, dict):
        yield from list(value.values())
    elif isinstance(value, list | tuple | set | deque):
        yield from list(value)


def _restore_tensor(tensor: Tensor) -> Restore | None:
    if is_lazy(tensor) or tensor.is_meta or tensor.layout != torch.strided or tensor.is_inference():
        return None
    if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return None  # expanded: it cannot be written to
    # On the CPU, so that a device's memory holds during a trial what it holds in training.
    values, data = tensor.detach().to("cpu", copy=True), tensor.data
    gradient, trainable = (tensor.grad, tensor.requires_grad) if tensor.is_leaf else (None, None)

    def restore() -> None:
        with torch.no_grad():
            if tensor.data_ptr() != data.data_ptr():
                tensor.data = data
            data.copy_(values)
        if trainable is not None:
            tensor.requires_grad_(trainable)
            tensor.grad = gradient

    return restore


def _refill(value: Any, items: list[Any]) -> None:
    value.clear()
    for item in items:
        value.add(item) if isinstance(value, set) else value.append(item)


def _restore_dict(value: dict[Any, Any], numbers: bool) -> Restore:
    items = dict(value)

    def restore() -> None:
        if not numbers:
            items.update({key: item for key, item in value.items() if isinstance(item, int | float)})
        if list(value) != list(items) or any(value[key] is not item for key, item in items.items()):
            value.clear()
            value.update(items)

    return restore
