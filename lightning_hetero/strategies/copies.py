"""Copies of what training is about to change: taken at once, or beside the training until the moment of the change."""

import threading
import time
from collections import deque
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_hetero.comm.background import come_last

#: Elements that are copied at a time. PyTorch takes more threads for more than 32768, and these belong to the training.
PIECE = 24576


class _Piece(NamedTuple):
    target: Tensor
    source: Tensor
    version: int  # of the source when the copy was asked for


class Copies:
    """Copies tensors to the CPU, into the memory of the copies before where these had the same form.

    A copy of what only an optimizer's step, or an exchange, changes may be taken late: a thread takes it piece by piece
    with :meth:`work`, and before the step, or the exchange, :meth:`finish` takes what is left.

    Attributes:
        changed: whether a tensor was written to before it was copied, so that the copies are of no use.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._next = 0
        self._left: deque[_Piece] = deque()  # of what the next step changes
        self._lasting: deque[_Piece] = deque()  # of what the next exchange changes
        self._known: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}  # a tensor, which so stays alive, and its copy
        self._copying = threading.Lock()
        self._awaited = self.changed = False
        self.lasting: Collection[int] = ()  # where the memory begins of what only an exchange changes

    def rewind(self) -> None:
        """Nobody needs the copies any more."""
        del self._kept[self._next :]
        self._next, self.changed = 0, False
        self._left.clear()
        self._lasting.clear()
        self._known.clear()

    def of(self, collection: Any, new: Collection[int] = ()) -> Any:
        """A collection with copies of its tensors, taken now; what is one tensor in it stays one.

        Args:
            collection: of tensors, as above.
            new: where the memory begins of storages on the CPU that nobody else writes to: they are not copied.
        """
        known = dict[tuple[Any, ...], tuple[Tensor, Tensor]]()

        def add(tensor: Tensor) -> None:
            if tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() in new:
                known.setdefault(identity(tensor), (tensor, tensor.detach()))

        apply_to_collection(collection if new else (), Tensor, add)
        return self._of(collection, known, ())

    def late(self, collection: Any, storages: Collection[int]) -> Any:
        """A collection with copies of its tensors; of those that lie in certain storages they are taken late.

        Args:
            collection: what is one tensor in it, and in others since :meth:`rewind`, stays one.
            storages: where the memory of those storages begins.
        """
        return self._of(collection, self._known, storages)

    def vector(self, tensors: list[Tensor], storages: Collection[int]) -> Tensor:
        """One vector of all elements of some tensors of one dtype.

        Args:
            tensors: on any device.
            storages: as for :meth:`late`.
        """
        lengths = [tensor.numel() for tensor in tensors]
        flat = self._memory(torch.empty(sum(lengths), dtype=tensors[0].dtype, device="meta"))
        for tensor, part in zip(tensors, flat.split(lengths), strict=True):
            self._fill(part.view(tensor.shape), tensor.detach(), storages)
        return flat

    def work(self) -> None:
        """Take the late copies, those first that the next step needs; on a thread, which comes last for the others."""
        self._work(self._left)
        come_last()
        self._work(self._lasting)

    def _work(self, pieces: deque[_Piece]) -> None:
        while pieces:
            if self._awaited:
                time.sleep(0.0005)
                continue
            with self._copying:
                self._take(pieces)
        with self._copying:  # or the training is in the midst of a piece
            pass

    def finish(self, lasting: bool = True) -> None:
        """Take what is left of the late copies: what they are of is about to change.

        Args:
            lasting: whether this goes for what only an exchange changes, too.
        """
        self._awaited = True
        try:
            with self._copying:  # or the thread is in the midst of a piece
                for pieces in (self._left, self._lasting) if lasting else (self._left,):
                    while pieces:
                        self._take(pieces)
        except BaseException:  # Ctrl+C, say: a piece may be lacking
            self.changed = True
            raise
        finally:
            self._awaited = False

    def _take(self, pieces: deque[_Piece]) -> None:
        if pieces:
            target, source, version = pieces.popleft()
            target.copy_(source)
            self.changed |= _version(source) != version

    def _of(
        self, collection: Any, known: dict[tuple[Any, ...], tuple[Tensor, Tensor]], storages: Collection[int]
    ) -> Any:
        def copy(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            if tensor.layout != torch.strided:
                return tensor.to("cpu", copy=True)
            key = identity(tensor)
            if key not in known or not tensor.numel():
                target = self._memory(tensor)
                self._fill(target, tensor, storages)
                known[key] = tensor, target
            return known[key][1]

        return apply_to_collection(collection, Tensor, copy)

    def _fill(self, target: Tensor, source: Tensor, storages: Collection[int]) -> None:
        if (
            not storages
            or source.device.type != "cpu"
            or (begins := source.untyped_storage().data_ptr()) not in storages
        ):
            target.copy_(source)
            return
        pieces = self._lasting if begins in self.lasting else self._left
        if target.is_contiguous() and source.is_contiguous():
            parts = zip(target.view(-1).split(PIECE), source.view(-1).split(PIECE), strict=True)
            pieces.extend(_Piece(one, other, _version(source)) for one, other in parts)
        else:
            pieces.append(_Piece(target, source, _version(source)))

    def _memory(self, like: Tensor) -> Tensor:
        index, self._next = self._next, self._next + 1
        if index == len(self._kept):
            self._kept.append(torch.empty_like(like, device="cpu"))
        elif self._kept[index].shape != like.shape or self._kept[index].dtype != like.dtype:
            self._kept[index] = torch.empty_like(like, device="cpu")
        return self._kept[index]


def _version(tensor: Tensor) -> int:
    """How often a tensor has been written to."""
    return tensor._version


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """The same for tensors that are the same part of the same memory, as tied weights are."""
    return tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride()
