"""Counts the memory of tensors, operation by operation: the same number in every run, on every machine."""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Footprint(TorchDispatchMode):
    """Counts the bytes of all tensors that live while operations run in this context.

    What an operation needs for itself is not seen, nor what the allocator does not give back.

    Args:
        resident: tensors that live already.

    Attributes:
        peak: the most bytes so far.
    """

    def __init__(self, resident: Iterable[Any]) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._live = self.peak = 0
        self._add(resident)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._add(tree_leaves((args, kwargs)))  # a batch may have been made elsewhere
        result = func(*args, **(kwargs or {}))
        self._add(tree_leaves(result))
        return result

    def _add(self, leaves: Iterable[Any]) -> None:
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:  # others have no storage
                continue
            storage = leaf.untyped_storage()
            if storage._cdata not in self._storages:
                gone = partial(self._gone, storage._cdata, storage.nbytes())
                self._storages[storage._cdata] = weakref.ref(storage, gone)
                self._live += storage.nbytes()
        self.peak = max(self.peak, self._live)

    def _gone(self, key: int, size: int, _: Any) -> None:
        del self._storages[key]
        self._live -= size
