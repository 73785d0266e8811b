"""Snapshots: copies of the state in memory, for a writing thread or for ranks that join."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from lightning_hetero.comm.agreement import value_of_rank
from lightning_hetero.comm.failures import deadline
from lightning_hetero.comm.object_collectives import ObjectMessage
from lightning_hetero.errors import CheckpointError
from lightning_hetero.replicas.sharding import is_dtensor, local

_WEIGHTS = "state_dict"


class Snapshot:
    """Copies of tensors on the CPU, in the memory of the copies before where these had the same form."""

    def __init__(self) -> None:
        self._used: list[Tensor] = []
        self._spare: dict[Any, list[Tensor]] = {}  # of the snapshot before, by shape and dtype
        self._copies: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}  # a tensor, which so stays alive, and its copy

    def rewind(self) -> None:
        """The snapshot is complete; the next one overwrites it."""
        self._spare = {}
        for tensor in self._used:
            self._spare.setdefault((tensor.shape, tensor.dtype), []).append(tensor)
        self._used = []
        self._copies.clear()

    def of(self, collection: Any, owned: Iterable[Tensor] = ()) -> Any:
        """A collection with copies of its tensors; what is one tensor, in others since :meth:`rewind` too, stays one.

        Args:
            collection: its tensors may lie on any device. What this object has made itself is not copied again.
            owned: tensors that nobody else writes to. What lies in their memory is not copied, if it is on the CPU.
        """
        here = (tensor for tensor in (*self._used, *owned) if tensor.device.type == "cpu")
        storages = {tensor.untyped_storage().data_ptr() for tensor in here}

        def copied(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            if tensor.layout != torch.strided or is_dtensor(tensor):
                return tensor.to("cpu", copy=True)
            key = *identity(tensor), _version(tensor)
            if key not in self._copies or not tensor.numel():
                stays = tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in storages
                self._copies[key] = tensor, tensor if stays else self._room(tensor).copy_(tensor)
            return self._copies[key][1]

        return apply_to_collection(collection, Tensor, copied)

    def vector(self, tensors: Sequence[Tensor]) -> Tensor:
        """One vector of all elements of some tensors of one dtype, on any device."""
        flat, parts = self.room(tensors)
        for tensor, part in zip(tensors, parts, strict=True):
            part.copy_(tensor.detach())
        return flat

    def room(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """A vector that has yet to be written, with room for tensors of one dtype; and its parts in their shapes."""
        lengths = [tensor.numel() for tensor in tensors]
        flat = self._room(torch.empty(sum(lengths), dtype=tensors[0].dtype, device="meta"))
        return flat, [part.view(tensor.shape) for tensor, part in zip(tensors, flat.split(lengths), strict=True)]

    def _room(self, like: Tensor) -> Tensor:
        spare = self._spare.get((like.shape, like.dtype))
        self._used.append(spare.pop() if spare else torch.empty_like(like, device="cpu"))
        return self._used[-1]


def _version(tensor: Tensor) -> int:
    """Number of writes to a tensor; unknown of those that are made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """The same for tensors that are the same part of the same memory, as tied weights are."""
    return tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride()


class MemoryCheckpointIO(CheckpointIO):
    """Keeps a checkpoint in the memory of this process.

    It has two parts. What is a rank's own, or the same on all of them, is not sent to ranks that have it: the states of
    optimizers, and the values of parameters. The rest all ranks take from rank 0.

    Args:
        path: of the checkpoint.
        usual: reads and writes all other files.
        kept: names of what each rank keeps of its own; a new one takes that of a source.
        sources: the ranks from which new ones take it in turn: where the model is sharded, those of a whole replica.

    Attributes:
        loaded: names of the values of the model that were loaded from the checkpoint.
    """

    def __init__(
        self, path: str, usual: CheckpointIO, kept: Collection[str] = (), sources: Sequence[int] = (0,)
    ) -> None:
        self.path, self.usual, self._kept, self._sources = path, usual, kept, sources
        self.loaded: Collection[str] = ()
        self._weights: dict[str, Any] = {}
        self._own: ObjectMessage | None = None
        self._common: ObjectMessage | None = None

    def keep(
        self, state: Mapping[str, Any], parameters: Collection[str], new: Collection[Tensor] = ()
    ) -> dict[str, Any]:
        """A copy of the model's state, with this rank's shards of what is sharded.

        Args:
            state: of the model.
            parameters: names of the values that are the same on all ranks, or in the same shards on all replicas.
            new: tensors that nobody else writes to. What lies in them is not copied, if they are on the CPU.
        """
        result: Any = copy(state)  # with what it holds besides, such as the versions in a module's state
        result.update(Snapshot().of({name: local(value) for name, value in state.items()}, new))
        self._weights = {name: result[name] for name in parameters if isinstance(result.get(name), Tensor)}
        return result

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if path != self.path:
            self.usual.save_checkpoint(checkpoint, path, storage_options)
            return
        state = copy(checkpoint[_WEIGHTS])
        alike = [name for name, value in state.items() if value is self._weights.get(name, self)]
        state.update(dict.fromkeys(alike))
        own = {name: checkpoint[name] for name in self._kept if name in checkpoint}
        rest = {name: part for name, part in checkpoint.items() if name not in own}
        self._own = ObjectMessage.of((self._weights, own))
        self._common = ObjectMessage.of(({**rest, _WEIGHTS: state}, alike), copied=True)

    @override
    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if path != self.path:
            return self.usual.load_checkpoint(path, *args, **kwargs)
        if self._own is None or self._common is None:
            raise CheckpointError(f"nothing was saved as {self.path} yet.")
        (weights, own), (checkpoint, alike) = self._own.value, self._common.value
        checkpoint[_WEIGHTS].update({name: weights[name] for name in alike})
        self.loaded = list(checkpoint[_WEIGHTS])
        return {**checkpoint, **own}

    @override
    def remove_checkpoint(self, path: Any) -> None:
        self.usual.remove_checkpoint(path)

    def share(self, rank: int, before: int, world: int) -> None:
        """Give all ranks what they need of rank 0, and new ones what they need of their sources (collective).

        Args:
            rank: of this process.
            before: number of ranks that have files already; the others come after them.
            world: number of all ranks.
        """
        common, sources = value_of_rank((self._common, self._sources), 0)
        with deadline("receive the state of the job"):
            self._common = common.passed_on(range(world))
            for place, source in enumerate(sources if world > before else ()):
                own, ranks = value_of_rank(self._own, source), [source, *range(before + place, world, len(sources))]
                if rank in ranks:
                    self._own = own.passed_on(ranks)

    def clear(self) -> None:
        """Nobody begins again from here any more."""
        self._weights, self._own, self._common = {}, None, None
