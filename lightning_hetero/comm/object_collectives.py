"""Collectives of Python objects: nothing leaves a process but CPU tensors and builtins.

Another process may not have the device on which a tensor lies: a CPU rank cannot make a ``cuda`` tensor, nor a host
with two GPUs one on ``cuda:7``. So whatever is sent to other ranks goes through :func:`all_gather`, :func:`gather` or
:func:`broadcast`, and whatever is written to a file through :func:`portable`.
"""

import hashlib
import io
import pickle
import zlib
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_hetero.comm import waits
from lightning_hetero.errors import DisagreementError

#: For tensors that have been on no device that another rank could have, or need not be on one.
CPU = torch.device("cpu")
#: Bytes of a message that travel by way of one rank. PyTorch gathers objects with two tensors around a ring: with eight
#: ranks that are 14 hops, one after the other, and it takes several times as long.
HEAD = 1024
#: Bytes from which the content of a tensor is no part of what pickle writes; see :class:`ObjectMessage`.
LONG = 1 << 16
#: Bytes that a rank receives before it passes them on.
PIECE = 1 << 24
_TAG = 8  # bytes that say which collective a rank is in
CALL_ON_ALL = "Was one of them called on one rank only? Call collectives on every rank, in the same order."


def portable(value: Any) -> Any:
    """The same value with all of its tensors on the CPU, for a file that any machine can read.

    Args:
        value: tensors in dictionaries, lists and tuples, to any depth. What other objects hold is not looked at.

    Returns:
        The value itself if nothing of it was elsewhere. What shares memory still does.

    Example::

        checkpoint = portable({"weights": model.state_dict(), "step": 3})
    """
    return _portable(value, {})


def on_device_of(value: Any, there: Any) -> Any:
    """A value that has come from elsewhere, on the device of what it takes the place of.

    Args:
        value: tensors in dictionaries, lists and tuples; or anything else, which is returned as it is.
        there: the former value; if its tensors are not all on one device, the value stays where it is.
    """
    devices = {leaf.device for leaf in tree_leaves(there) if isinstance(leaf, Tensor)}
    return tree_map_only(Tensor, lambda tensor: tensor.to(*devices), value) if len(devices) == 1 else value


def _portable(value: Any, copies: dict[Any, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return value if _anywhere(value.device) else _shared(value, copies)
    if isinstance(value, dict):
        parts = {key: _portable(part, copies) for key, part in value.items()}
        if all(part is value[key] for key, part in parts.items()):
            return value
        result = copy(value)  # with what it holds besides, such as the versions in a module's state
        result.update(parts)
        return result
    if isinstance(value, list | tuple):
        items = [_portable(item, copies) for item in value]
        if all(item is old for item, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _shared(tensor: Tensor, copies: dict[Any, Tensor]) -> Tensor:
    """A copy on the CPU, the same for tensors that are the same part of the same memory, as tied weights are."""
    if tensor.layout != torch.strided:
        return tensor.detach().cpu()
    where = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    key = where if tensor.numel() else id(tensor)
    if key not in copies:
        copies[key] = tensor.detach().cpu()
    return copies[key]


def _anywhere(device: torch.device) -> bool:
    """Whether every machine has such a device."""
    return device.type in ("cpu", "meta")


# -- between ranks ---------------------------------------------------------------------------------


def all_gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """One value per rank, in the order of ranks (collective). Their tensors arrive on the CPU.

    Args:
        value: this rank's; anything that can be pickled.
        group: the ranks. Default: all.

    Raises:
        DisagreementError: on every rank, if one of them is in another collective.
    """
    message = pack_value(value)
    heads, sizes = _heads(message, group)
    rests = torch.zeros(len(sizes), max(*sizes, HEAD) - HEAD, dtype=torch.uint8)
    if rests.numel():
        dist.all_gather(list(rests), _row(message[HEAD:], rests.shape[1]), group=group)
    return _values(heads, rests, sizes)


def gather(value: Any) -> list[Any] | None:
    """One value per rank, on rank 0; ``None`` on the others (collective). Their tensors arrive on the CPU."""
    message, here = pack_value(value), dist.get_rank() == 0
    heads, sizes = _heads(message, None)
    rests = torch.zeros(len(sizes) if here else 1, max(*sizes, HEAD) - HEAD, dtype=torch.uint8)
    if rests.numel():
        dist.gather(_row(message[HEAD:], rests.shape[1]), list(rests) if here else None, 0)
    return _values(heads, rests, sizes) if here else None


def _values(heads: Tensor, rests: Tensor, sizes: Sequence[int]) -> list[Any]:
    """The values in the ranks' messages."""
    rows = torch.cat([heads, rests], 1).numpy()
    return [unpack_value(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _heads(message: bytes, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """The first bytes of each rank's message, and its size, by way of the group's first rank (collective)."""
    what, _ = waits.here()
    size = torch.tensor([len(message)]).view(torch.uint8)
    rows = _by_way_of_one(torch.cat([size, _row(_tag(what), _TAG), _row(message[:HEAD], HEAD)]), group)
    if len(rows[:, 8 : 8 + _TAG].unique(dim=0)) > 1:
        _raise_where_all_are(group)
    return rows[:, 8 + _TAG :], rows[:, :8].contiguous().view(torch.int64).flatten().tolist()


def _by_way_of_one(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    first = 0 if group is None else dist.get_global_rank(group, 0)
    rows = torch.zeros(dist.get_world_size(group), len(own), dtype=torch.uint8)
    dist.gather(own, list(rows) if dist.get_rank() == first else None, first, group=group)
    dist.broadcast(rows, first, group=group)
    return rows


def _tag(what: str) -> bytes:
    return hashlib.sha256(what.encode()).digest()[:_TAG]


def check_sum(summed: float, own: int, group: dist.ProcessGroup | None) -> None:
    """Check that all ranks' :func:`collective_number` are that of one collective (collective over the group if not).

    Raises:
        DisagreementError: on every rank, if one of them is in another collective.
    """
    if summed != own * dist.get_world_size(group):
        _raise_where_all_are(group)


def collective_number(what: str, group: dist.ProcessGroup | None) -> int:
    """A number for a collective, so small that the sum of all ranks' numbers is exact in fp32."""
    return zlib.crc32(what.encode()) % (1 << max(24 - dist.get_world_size(group).bit_length(), 1))


def _raise_where_all_are(group: dist.ProcessGroup | None) -> None:
    """The ranks of a group have met in different collectives (collective over it)."""
    rows = _by_way_of_one(_row(" to ".join(reversed(waits.here())).encode()[:HEAD], HEAD), group)
    texts = [row.numpy().tobytes().rstrip(b"\0").decode(errors="ignore") for row in rows]
    ranks = range(len(texts)) if group is None else dist.get_process_group_ranks(group)
    everyone = ", ".join(f"rank {rank} is in {text}" for rank, text in zip(ranks, texts, strict=True))
    error = DisagreementError(f"the ranks are in different collectives: {everyone}. {CALL_ON_ALL}")
    raise error.of_all() if group is None else error


def _row(message: bytes, length: int) -> Tensor:
    """A message as a tensor, with zeros behind it."""
    return torch.frombuffer(bytearray(message.ljust(length, b"\0")), dtype=torch.uint8)


def broadcast(message: bytes, source: int) -> bytes:
    """The message of one rank, on every rank (collective).

    Args:
        message: of :func:`pack_value`; that of the source counts.
        source: its rank.

    Raises:
        DisagreementError: on a rank that waits for another message than the source sends.
    """
    what, call = waits.here()
    box = [(what, call, message) if dist.get_rank() == source else None]
    dist.broadcast_object_list(box, source)
    theirs, there, message = box[0]  # type: ignore[misc]
    if theirs != what:
        me = dist.get_rank()
        raise DisagreementError(
            f"the ranks are in different collectives: rank {source} is in {there} to {theirs}, rank {me} is in {call} "
            f"to {what}. {CALL_ON_ALL}"
        )
    return message


def pack_value(value: Any, home: torch.device = CPU) -> bytes:
    """A message with a value; plain tensors as arrays, since PyTorch pickles them as for files, which is slow.

    Args:
        value: anything that can be pickled. Tensors may be anywhere in it, also in objects of a user's classes.
        home: the device on which this rank computes. A tensor from there arrives on that of the receiver, where the
            receiver names one; all others arrive on the CPU.
    """
    file = io.BytesIO()
    _Packer(file, home).dump(value)
    return file.getvalue()


def unpack_value(message: bytes, home: torch.device = CPU) -> Any:
    """The value in a message of :func:`pack_value`.

    Args:
        message: from a rank of this job.
        home: where to put the tensors that were on the device on which the sender computes.
    """
    return _Unpacker(io.BytesIO(message), home).load()


class ObjectMessage(NamedTuple):
    """A value for other ranks, whose long tensors stay in their own memory until they are sent.

    Attributes:
        head: what pickle has written.
        parts: the contents of the long tensors, as vectors of bytes.
    """

    head: bytes
    parts: list[Tensor]

    @classmethod
    def of(cls, value: Any, copied: bool = False) -> "ObjectMessage":
        """The message with a value.

        Args:
            value: anything that can be pickled; as for :func:`pack_value`.
            copied: take copies of long tensors on the CPU. Else the message changes with them.
        """
        file, parts = io.BytesIO(), list[Tensor]()

        def short(buffer: pickle.PickleBuffer) -> bool:
            if (content := buffer.raw()).nbytes < LONG:
                return True
            parts.append(torch.frombuffer(bytearray(content) if copied else content, dtype=torch.uint8))
            return False

        _Packer(file, CPU, short).dump(value)
        return cls(file.getvalue(), parts)

    @property
    def value(self) -> Any:
        """The value of the message, with new containers; its long tensors are in the memory of the message."""
        return _Unpacker(io.BytesIO(self.head), CPU, [part.numpy() for part in self.parts]).load()

    def passed_on(self, ranks: Sequence[int]) -> "ObjectMessage":
        """The message of the first of some ranks, on all of them (collective over these ranks).

        Each rank passes on what it receives, so that many ranks take hardly longer than one.

        Args:
            ranks: in the order in which they receive it. The others have messages with the same head, and parts of the
                same sizes, whose contents do not count.
        """
        me, sent = ranks.index(dist.get_rank()), []
        parts = self.parts if me == 0 else [torch.empty_like(part, device=CPU) for part in self.parts]
        for piece in (piece for part in parts for piece in part.split(PIECE)):
            if me > 0:
                dist.recv(piece, ranks[me - 1])
            if me + 1 < len(ranks):
                sent.append(dist.isend(piece, ranks[me + 1]))
        for work in sent:
            if work is not None:
                work.wait()
        return self._replace(parts=parts)

    def __reduce__(self) -> Any:
        """Other ranks get the head, and the sizes of the parts."""
        return _announced, (self.head, [part.numel() for part in self.parts])


def _announced(head: bytes, sizes: Sequence[int]) -> ObjectMessage:
    return ObjectMessage(head, [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes])


class _Packer(pickle.Pickler):
    def __init__(
        self, file: io.BytesIO, home: torch.device, short: Callable[[pickle.PickleBuffer], bool] | None = None
    ) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL, buffer_callback=short)
        self._home = home

    def reducer_override(self, obj: Any) -> Any:
        """The recipe for an object that is no builtin; pickle keeps what is one object one."""
        if isinstance(obj, torch.device) and not _anywhere(obj):
            return _device, (obj == self._home,)
        if not isinstance(obj, Tensor):
            return NotImplemented
        plain = _plain(obj)
        if not plain and _anywhere(obj.device):
            return NotImplemented
        here = obj.detach().cpu()
        content = here.contiguous().view(-1).view(torch.uint8).numpy() if plain else here
        kind = obj.dtype, tuple(obj.shape), obj.requires_grad, isinstance(obj, nn.Parameter)
        return _tensor, (obj.device == self._home, content, *kind)


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, home: torch.device, parts: Sequence[Any] = ()) -> None:
        super().__init__(file, buffers=parts)
        self._home = home

    def find_class(self, module: str, name: str) -> Any:
        """A class or function that is named in a message; ours are told where they are."""
        found = super().find_class(module, name)
        return partial(found, self._home) if found in (_device, _tensor) else found


def _device(home: torch.device, at_home: bool) -> torch.device:
    """A device for one that only the sender may have."""
    return home if at_home else CPU


def _tensor(
    home: torch.device, at_home: bool, content: Any, dtype: torch.dtype, shape: Sequence[int], *kind: bool
) -> Tensor:
    """A tensor that has arrived, by its bytes, or for no plain array by one on the CPU; ``home``: the receiver's."""
    trained, parameter = kind
    tensor = torch.from_numpy(content).view(dtype).view(shape) if isinstance(content, np.ndarray) else content
    tensor = tensor.to(home) if at_home else tensor
    if parameter:
        return nn.Parameter(tensor, trained)
    return tensor.requires_grad_(trained) if trained else tensor


def _plain(tensor: Tensor) -> bool:
    """Whether a tensor is an array of numbers, and nothing else."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or vars(tensor))
    )


def finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all elements of all tensors are finite.

    A sum is much cheaper than a look at every element. Only if the sum is not finite, which may be an overflow, are the
    elements looked at one by one.
    """
    return all(bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all()) for tensor in tensors)
