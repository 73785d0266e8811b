"""Low-bit compression: encodings of vectors, error feedback, and sums of encoded vectors.

An :class:`Encoding` turns a vector into bytes, and tells what the bytes leave out. A :class:`Feedback` keeps that, so
that the next message makes up for it.
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_hetero.comm.staging import BufferPool
from lightning_hetero.errors import ConfigurationError, not_none

#: Values that are worked on at a time: 1 MiB, which stays in a core's cache. With fewer, calls cost more than the work.
CHUNK = 1 << 18
_ALIGNED = 4  # bytes; messages that lie one behind the other begin where an fp32 number may


class Encoding(ABC):
    """Turns fp32 vectors into bytes and back, chunk by chunk. One thread at a time may use an instance.

    Attributes:
        block: values that are encoded together. A chunk is a multiple of it; the last chunk is filled up with zeros.
        chunk: values of a chunk.
        decay: error feedback keeps this part of what earlier messages have left out.

    Example::

        import torch

        from lightning_hetero.comm.compression import encoding_of

        encoding, values = encoding_of("int8"), torch.randn(1000)
        message, arrived = torch.empty(encoding.bytes(1000), dtype=torch.uint8), torch.zeros(1000)
        rest = values.clone()
        encoding.encode(rest, message)  # now the message and the rest make up the values
        encoding.add(message, arrived)
        torch.testing.assert_close(arrived + rest, values)
    """

    block: int
    chunk: int = CHUNK
    decay: float = 1.0

    def __init__(self) -> None:
        self._pool = BufferPool()

    def bytes(self, length: int) -> int:
        """Bytes of the message that encodes a vector of a length; a multiple of 4."""
        full, rest = divmod(length, self.chunk)
        size = full * self._bytes(self.chunk) + (self._bytes(self._filled(rest)) if rest else 0)
        return -(-size // _ALIGNED) * _ALIGNED

    def encode(self, values: Tensor, message: Tensor) -> None:
        """Encode a vector. What the message leaves out remains in the vector.

        Args:
            values: a vector on the CPU, in fp32, finite.
            message: of :meth:`bytes` elements of dtype ``uint8``, aligned to 4 bytes.
        """
        for part, piece in self._pieces(values, message):
            whole = self._whole(part)
            if whole is not part:
                whole[: len(part)] = part
            self._encode(whole, piece)
            if whole is not part:
                part.copy_(whole[: len(part)])

    def add(self, message: Tensor, out: Tensor) -> None:
        """Add what a message says to a vector.

        Products are rounded before they are added, so that processors with and without fused operations agree bitwise.

        Args:
            message: of :meth:`encode`.
            out: a vector on the CPU, in fp32, of the length of the encoded one.
        """
        for part, piece in self._pieces(out, message):
            whole = self._whole(part)
            self._add(piece, whole)
            if whole is not part:
                part.add_(whole[: len(part)])

    def _pieces(self, values: Tensor, message: Tensor) -> list[tuple[Tensor, Tensor]]:
        pieces = zip(values.split(self.chunk), message.split(self._bytes(self.chunk)), strict=False)
        return list(pieces) if len(values) else []  # a shard may be empty

    def _filled(self, length: int) -> int:
        return -(-length // self.block) * self.block

    def _whole(self, part: Tensor) -> Tensor:
        """A chunk itself, or zeros of the size that it is filled up to."""
        size = self._filled(len(part))
        return part if size == len(part) else self._pool.vector("whole", size, torch.float32).zero_()

    @abstractmethod
    def _bytes(self, length: int) -> int:
        """Bytes of a chunk of some blocks."""

    @abstractmethod
    def _encode(self, values: Tensor, message: Tensor) -> None:
        """Encode a chunk of whole blocks; what the message leaves out remains in it."""

    @abstractmethod
    def _add(self, message: Tensor, out: Tensor) -> None:
        """Add a chunk of whole blocks."""


class Feedback:
    """Error feedback: what the low-bit messages of a replica have left out so far.

    There is a residual for each direction: for the replica's own values on their way to the others; and, with three or
    more replicas, for the part of the sum that this replica takes and sends back.

    Args:
        wire: low-bit wire of the messages.
        lengths: of each vector that is exchanged, how many of its values travel on the wire in each message. They are
            its first. The others, such as BatchNorm's variances, travel as they are.
        members: number of replicas.

    Attributes:
        wire: of the messages.
        sent: what the replica's own messages have left out.
        summed: what the messages with this replica's part of the sum have left out; empty vectors with two replicas,
            which need no sums from others.
    """

    def __init__(self, wire: str, lengths: Sequence[Sequence[int]], members: int) -> None:
        self.wire = wire
        self._parts = [[-(-each // members) if members > 2 else 0 for each in length] for length in lengths]
        self.sent = [torch.zeros(sum(length)) for length in lengths]
        self.summed = [torch.zeros(sum(part)) for part in self._parts]

    def part(self, vectors: slice) -> "Feedback":
        """The residuals of some of the vectors, in the same memory."""
        part = copy(self)
        part._parts, part.sent, part.summed = self._parts[vectors], self.sent[vectors], self.summed[vectors]
        return part

    def of_message(self, i: int, number: int, sent: Tensor) -> "Feedback":
        """The residuals of one message of a vector; of its sums in the same memory.

        Args:
            i: number of the vector.
            number: of the message.
            sent: what its messages have left out.
        """
        part = copy(self)
        part._parts, part.sent = [[self._parts[i][number]]], [sent]
        part.summed = [self.summed[i].split(self._parts[i])[number]]
        return part

    def state_dict(self) -> list[Tensor]:
        """The residuals."""
        return [*self.sent, *self.summed]

    def load_state_dict(self, state: Sequence[Tensor]) -> bool:
        """Continue from :meth:`state_dict`, if it has the same sizes.

        Returns:
            Whether it has. If not, the residuals stay as they are.
        """
        own = self.state_dict()
        if [len(value) for value in state] != [len(value) for value in own]:
            return False
        for value, saved in zip(own, state, strict=True):
            value.copy_(saved)
        return True


_HUGE = 3e38  # below the largest number in fp32; stands for the reciprocal of 0


class InBlocks(Encoding):
    """A few bits of each value, and fp16 numbers for each block, times an fp32 number for the chunk, its unit.

    Attributes:
        numbers: fp16 numbers of a block.
        per_byte: values in a byte.
    """

    numbers: int
    per_byte: int

    @override
    def _bytes(self, length: int) -> int:
        return 4 + 2 * self.numbers * (length // self.block) + length // self.per_byte

    def _parts(self, message: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """The unit, the numbers of the blocks, and the bytes of the values in rows of a block."""
        blocks = length // self.block
        body = 4 + 2 * self.numbers * blocks
        rows = message[body : self._bytes(length)].view(blocks, self.block // self.per_byte)
        return message[:4].view(torch.float32), message[4:body].view(torch.float16).view(blocks, self.numbers), rows


class Rounded(InBlocks):
    """Each value as a whole number from ``-levels`` to ``levels``, times the scale of its block.

    The scale of a block is an fp16 number from 0 to 1, times an fp32 number for the chunk. So values may be as large
    and as small as fp32 allows.

    Attributes:
        levels: whole numbers on each side of 0.
    """

    block, numbers = 256, 1
    levels: int

    @override
    def _encode(self, values: Tensor, message: Tensor) -> None:
        unit, scales, rows = self._parts(message, len(values))
        x = values.view(len(scales), self.block)
        work = self._pool.vector("work", len(values), torch.float32).view(x.shape)
        wanted = torch.maximum(x.amax(1, keepdim=True), x.amin(1, keepdim=True).neg_()).div_(self.levels)
        wanted.abs_()  # no -0, which has another reciprocal
        unit.copy_(wanted.max().clamp_(min=torch.finfo(torch.float32).tiny))
        scales.copy_(wanted / unit)
        scale = scales.float().mul_(unit)  # as it will be decoded: a little more or less than wanted, or 0
        factor = torch.maximum(scale, wanted).reciprocal_().clamp_(max=_HUGE)  # no number is beyond the levels
        torch.mul(x, factor, out=work).round_()
        self._pack(work, rows)
        x.sub_(work.mul_(scale))

    @override
    def _add(self, message: Tensor, out: Tensor) -> None:
        unit, scales, rows = self._parts(message, len(out))
        x = out.view(len(scales), self.block)
        work = self._pool.vector("work", len(out), torch.float32).view(x.shape)
        self._unpack(rows, work)
        x.add_(work.mul_(scales.float().mul_(unit)))

    @abstractmethod
    def _pack(self, numbers: Tensor, rows: Tensor) -> None:
        """Write whole numbers into bytes."""

    @abstractmethod
    def _unpack(self, rows: Tensor, numbers: Tensor) -> None:
        """Read whole numbers from bytes."""


class Int8(Rounded):
    """From -127 to 127: a quarter of fp32's bytes."""

    levels, per_byte = 127, 1

    @override
    def _pack(self, numbers: Tensor, rows: Tensor) -> None:
        rows.view(torch.int8).copy_(numbers)

    @override
    def _unpack(self, rows: Tensor, numbers: Tensor) -> None:
        numbers.copy_(rows.view(torch.int8))


class Int4(Rounded):
    """From -7 to 7: an eighth of fp32's bytes. A byte holds a value of a block's first half and one of its second."""

    levels, per_byte = 7, 2

    @override
    def _pack(self, numbers: Tensor, rows: Tensor) -> None:
        first, second = numbers.split(self.block // 2, dim=1)
        both = self._pool.vector("both", rows.numel(), torch.float32).view(rows.shape)
        rows.copy_(torch.add(first, second, alpha=16, out=both).add_(8 + 16 * 8))

    @override
    def _unpack(self, rows: Tensor, numbers: Tensor) -> None:
        first, second = numbers.split(self.block // 2, dim=1)
        half = self._pool.vector("half", rows.numel(), torch.uint8).view(rows.shape)
        first.copy_(torch.bitwise_and(rows, 15, out=half)).sub_(8)
        second.copy_(torch.bitwise_right_shift(rows, 4, out=half)).sub_(8)


class TwoBits(InBlocks):
    """Each value as one of four levels of its block: a sixteenth of fp32's bytes.

    Values are cut at their mean and at 0.98 standard deviations on both sides of it, which is best for a normal
    distribution (Max 1960, table 1, 4 levels). A level is the mean of the values between two cuts, so that a block
    keeps its mean. It is an fp16 number, times an fp32 number for the chunk.

    Args:
        block: values of a block, a multiple of 16. Its levels take 8 bytes.
    """

    CUTS = (-0.98, 0.0, 0.98)
    numbers = per_byte = 4

    def __init__(self, block: int = 4096) -> None:
        super().__init__()
        self.block = block

    @override
    def _encode(self, values: Tensor, message: Tensor) -> None:
        unit, levels, rows = self._parts(message, len(values))
        x = values.view(len(rows), self.block)
        unit.copy_(torch.maximum(values.max(), -values.min()).clamp_(min=torch.finfo(torch.float32).tiny))
        work = self._pool.vector("work", len(values), torch.float32).view(x.shape)
        above = self._pool.vector("above", len(values), torch.float32).view(x.shape)
        codes = self._pool.vector("codes", len(values), torch.uint8).view(x.shape).zero_()
        torch.div(x, unit, out=work)
        count, total = torch.full((len(x), 1), float(self.block)), work.sum(1, keepdim=True)
        counts, sums, mean = [count], [total], total / self.block
        torch.sub(work, mean, out=above)  # torch.std is ten times as slow
        deviation = torch.linalg.vector_norm(above, dim=1, keepdim=True).div_(self.block**0.5)
        for cut in self.CUTS:
            torch.gt(work, mean + cut * deviation, out=above)
            codes.add_(above.to(torch.uint8))
            counts.append(above.sum(1, keepdim=True))
            sums.append(above.mul_(work).sum(1, keepdim=True))
        n, total = (torch.cat([*column, torch.zeros_like(count)], 1).diff(dim=1).neg_() for column in (counts, sums))
        levels.copy_(total.div_(n.clamp_(min=1)))
        rows.copy_(codes.view(len(rows), 4, -1).mul_(_PLACES).sum(1, dtype=torch.uint8))
        x.sub_(self._decoded(levels, unit, rows, work))

    @override
    def _add(self, message: Tensor, out: Tensor) -> None:
        unit, levels, rows = self._parts(message, len(out))
        work = self._pool.vector("work", len(out), torch.float32).view(len(rows), self.block)
        out.view(work.shape).add_(self._decoded(levels, unit, rows, work))

    def _decoded(self, levels: Tensor, unit: Tensor, rows: Tensor, out: Tensor) -> Tensor:
        codes = torch.bitwise_and(rows.unsqueeze(1).bitwise_right_shift(_SHIFTS), 3).view(out.shape)
        return torch.gather(levels.float().mul_(unit), 1, codes.long(), out=out)


class Narrow(Encoding):
    """Each value in a dtype of 16 bits; those that are too large as the largest that there is.

    Args:
        dtype: of 16 bits.
    """

    block = 1

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    @override
    def _bytes(self, length: int) -> int:
        return 2 * length

    @override
    def _encode(self, values: Tensor, message: Tensor) -> None:
        short, most = message[: 2 * len(values)].view(self._dtype), torch.finfo(self._dtype).max
        values.sub_(short.copy_(values.clamp(-most, most)))

    @override
    def _add(self, message: Tensor, out: Tensor) -> None:
        out.add_(message[: 2 * len(out)].view(self._dtype))


_SHIFTS = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 4, 1)  # of the four values in a byte
_PLACES = torch.tensor([1, 4, 16, 64], dtype=torch.uint8).view(1, 4, 1)
_INDEX = 0xFF  # the bits of an index: groups of up to 256 values
_SIZE = 0x7FFFFFFF & ~_INDEX  # the bits of an fp32 number that say how large it is, without those of an index


class Largest(Encoding):
    """Of each group of values the one that is largest in size, in 4 or 2 bits, and its index in as many as it takes.

    A chunk is a matrix, and its columns are the groups. The bits of fp32 numbers, read as whole numbers, have the order
    of the sizes. With the row's number in their lowest bits, one maximum finds both the value and where it is; sizes
    that differ by less than a 32768th count as equal.

    Args:
        density: at most this part of the values is sent, from 1/256 to 1: one of each ``ceil(1 / density)``.
        bits: of a value, 4 or 2.
    """

    def __init__(self, density: float, bits: int = 4) -> None:
        super().__init__()
        self._values: Encoding = Int4() if bits == 4 else TwoBits(1024)
        together = self._values.block
        self.block = math.ceil(1 / density - 1e-9)
        self.chunk = self.block * max(CHUNK // self.block // together, 1) * together
        self._rows = torch.arange(self.block, dtype=torch.int32).view(-1, 1)
        self._places = np.arange((self.block - 1).bit_length(), dtype=np.uint8)  # of an index's bits

    @override
    def _bytes(self, length: int) -> int:
        groups = length // self.block
        return self._values.bytes(groups) + -(-groups * len(self._places) // 8)

    def _parts(self, message: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The bytes of the values, and those of the indices."""
        body = self._values.bytes(length // self.block)
        return message[:body], message[body : self._bytes(length)]

    @override
    def _encode(self, values: Tensor, message: Tensor) -> None:
        body, indices = self._parts(message, len(values))
        columns = values.view(self.block, -1)
        keys = self._pool.vector("keys", len(values), torch.int32).view(columns.shape)
        torch.bitwise_and(columns.view(torch.int32), _SIZE, out=keys)
        where = keys.bitwise_or_(self._rows).amax(0).bitwise_and_(_INDEX)
        bits = where.to(torch.uint8).numpy()[:, None] >> self._places & 1
        indices.copy_(torch.from_numpy(np.packbits(bits)))
        rows = where.long().unsqueeze(0)
        kept = columns.gather(0, rows)
        self._values.encode(kept.view(-1), body)
        columns.scatter_(0, rows, kept)

    @override
    def _add(self, message: Tensor, out: Tensor) -> None:
        body, indices = self._parts(message, len(out))
        kept = torch.zeros(len(out) // self.block)
        self._values.add(body, kept)
        bits = np.unpackbits(indices.numpy(), count=len(kept) * len(self._places)).reshape(len(kept), -1)
        rows = torch.from_numpy((bits << self._places).sum(1, dtype=np.int64)).unsqueeze(0)
        out.view(self.block, -1).scatter_add_(0, rows, kept.unsqueeze(0))


Wire = Literal["fp32", "bf16", "fp16"]
#: PyTorch 2.13 renames it. Unlike ``all_gather`` it allocates no memory.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
PIECE, AHEAD = 1 << 15, 4  # bytes of a message; messages under way in each direction: 128 KiB on the link
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def sum_over(group: dist.ProcessGroup | None, own: Tensor, pool: BufferPool) -> Tensor:
    """Sum a vector over a group (collective); blocks.

    An all-reduce in 16 bits would round every partial sum. So with three or more members each one sums one part of the
    vector in fp32, and sends the sum to the others. Each member sends ``2 (P - 1) / P`` times the vector, as in an
    all-reduce.

    Args:
        group: of ``P`` members.
        own: a vector on the CPU, in the format of the wire. It is overwritten.
        pool: gives memory. The sum may lie in it, until the next sum.

    Returns:
        The sum, bitwise the same on every member, in the same format.
    """
    members, narrow = dist.get_world_size(group), own.dtype
    if narrow.itemsize > 2 or members == 2:
        dist.all_reduce(own, group=group)
        return own
    length = -(-own.numel() // members)  # of a part, rounded up
    sent, received = (pool.vector(name, members * length, narrow) for name in ("sent", "received"))
    total, term = (pool.vector(name, length, torch.float32) for name in ("summed", "term"))
    part = pool.vector("part", length, narrow)
    sent[: own.numel()] = own
    swap_parts(group, sent.split(length), received.split(length))
    total.zero_()
    for other in received.view(members, length):
        total += term.copy_(other)  # adding another dtype directly would take new memory
    all_gather(sent, part.copy_(total), group=group)
    return sent[: own.numel()]


def swap_parts(group: dist.ProcessGroup | None, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
    """Give each member its part, one member after the other and in pieces (collective).

    Several flows over one slow link, or long messages to a member after a pause, overrun its queue and lose packets:
    sending all at once took 1.5 times as long on a link of 100 Mbit.

    Args:
        group: the members.
        sent: a vector for each member.
        received: of each member its vector for this one; this is written.
    """
    members, me = len(sent), dist.get_rank(group)
    ranks = dist.get_process_group_ranks(group)
    received[me].copy_(sent[me])
    under_way: deque[dist.Work] = deque()
    for step in range(1, members):
        to, source = (me + step) % members, (me - step) % members
        size = PIECE // sent[to].element_size()
        for own, other in zip(sent[to].split(size), received[source].split(size), strict=True):
            for work in (dist.isend(own, ranks[to], group), dist.irecv(other, ranks[source], group)):
                under_way.append(not_none(work, "the handle of a message to or from a member"))
            while len(under_way) >= 2 * AHEAD:
                under_way.popleft().wait()
    for work in under_way:
        work.wait()


#: Spellings of the low-bit wires; a number such as 0.05 may stand after the colon.
LOW_BIT = ("int8", "int4", "2bit", "topk:0.02")
KNOWN = ", ".join(map(repr, (*DTYPES, *LOW_BIT)))


def encoding_of(wire: str) -> Encoding | None:
    """Make the encoding of a wire; ``None`` for ``"fp32"``, ``"bf16"`` or ``"fp16"``, which have none.

    Args:
        wire: one of these, or of :func:`low_bit_encoding`.

    Raises:
        ConfigurationError: it is no wire.
    """
    return None if isinstance(wire, str) and wire in DTYPES else low_bit_encoding(wire)


def low_bit_encoding(wire: str) -> Encoding:
    """Make the encoding of a wire that has one.

    Args:
        wire: ``"int8"``, ``"int4"``, ``"2bit"``, ``"topk:0.02"`` (any density from 1/256 to 1) or ``"topk"``, which is
            the same. Settings may follow: ``:decay=0.95`` of any, ``:bits=2`` of ``"topk"``.

    Raises:
        ConfigurationError: it is no wire.
    """
    name, *parts = wire.split(":") if isinstance(wire, str) else [""]
    density = parts.pop(0) if name == "topk" and parts and "=" not in parts[0] else "0.02"
    given = dict(part.partition("=")[::2] for part in parts)
    decay = _number(wire, given.pop("decay", "1"), "decay", "above 0 and at most 1", lambda x: 0 < x <= 1)
    dense: dict[str, Callable[[], Encoding]] = {"int8": Int8, "int4": Int4, "2bit": TwoBits}
    encoding: Encoding | None = dense[name]() if name in dense else None
    if name == "topk":
        if (bits := given.pop("bits", "4")) not in ("4", "2"):
            raise ConfigurationError(f"wire={wire!r}: bits={bits} must be 4 or 2.")
        limits = "from 0.00390625 (1/256) to 1"
        encoding = Largest(_number(wire, density, "the density", limits, lambda x: 1 / 256 <= x <= 1), int(bits))
    if encoding is None or given or len({part.partition("=")[0] for part in parts}) < len(parts):
        raise ConfigurationError(
            f"wire={wire!r} must be one of {KNOWN}. Settings may follow a low-bit one, such as 'int4:decay=0.95' or "
            "'topk:0.02:bits=2'."
        )
    encoding.decay = decay
    return encoding


def _number(wire: str, spelled: str, what: str, limits: str, holds: Callable[[float], bool]) -> float:
    try:
        number = float(spelled)
    except ValueError:
        number = math.nan
    if not holds(number):  # NaN is within no limits
        raise ConfigurationError(f"wire={wire!r}: {what} is {spelled!r}, and must be a number {limits}.")
    return number


def check_wire(wire: str) -> None:
    """See that an option is a wire, low-bit wires among them.

    Raises:
        ConfigurationError: it is not.
    """
    encoding_of(wire)


def refuse_low_bit(wire: str, strategies: str) -> None:
    """See that an option is a wire of an algorithm that cannot take low-bit ones.

    Args:
        wire: the option.
        strategies: which cannot, and why; a clause for the message.

    Raises:
        ConfigurationError: it is not.
    """
    try:
        low = encoding_of(wire) is not None
    except ConfigurationError:
        raise ConfigurationError(f"wire={wire!r} must be one of {', '.join(map(repr, DTYPES))}.") from None
    if low:
        raise ConfigurationError(
            f"wire={wire!r}: {strategies}. Use one of {', '.join(map(repr, DTYPES))}; or hetero_node, hetero_daso, "
            "hetero_easgd, hetero_easgd_overlap, hetero_eamsgd, hetero_diloco or hetero_diloco_async, which also take "
            f"{', '.join(map(repr, LOW_BIT))}."
        )


def encoded_sum(
    group: dist.ProcessGroup | None, own: Tensor, encoding: Encoding, sent: Tensor, summed: Tensor, pool: BufferPool
) -> Tensor:
    """Sum a vector over a group (collective); blocks.

    Two members swap their messages. With more, each one sums one part of the vector in fp32, and sends the encoded sum
    to the others.

    Args:
        group: of ``P`` members.
        own: a vector on the CPU, in fp32. It is overwritten.
        encoding: of the messages.
        sent: what this member's messages have left out so far. It is added, and updated.
        summed: the same of its sums, with more than two members.
        pool: gives memory.

    Returns:
        ``own`` with the sum of what has arrived, bitwise the same on every member.
    """
    members, me = dist.get_world_size(group), dist.get_rank(group)
    sent.mul_(encoding.decay).add_(own)
    summed.mul_(encoding.decay)
    if members == 2:
        messages = _messages(encoding, "both", own.numel(), members, pool)
        encoding.encode(sent, messages[me])
        swap_parts(group, [messages[me]] * 2, messages)
        return _decoded(encoding, messages, [own.zero_()] * 2)
    length = -(-own.numel() // members)  # of a part, rounded up
    mine, others = (_messages(encoding, name, length, members, pool) for name in ("mine", "others"))
    filled = pool.vector("filled", members * length, torch.float32)
    parts = filled.split(length)
    filled.zero_()[: own.numel()] = sent
    for part, message in zip(parts, mine, strict=True):
        encoding.encode(part, message)
    sent.copy_(filled[: own.numel()])
    swap_parts(group, mine, others)
    encoding.encode(_decoded(encoding, others, [summed] * members), mine[me])
    everything = pool.vector("everything", members * len(mine[me]), torch.uint8)
    all_gather(everything, mine[me], group=group)
    _decoded(encoding, list(everything.split(len(mine[me]))), list(filled.zero_().split(length)))
    return own.copy_(filled[: own.numel()])


def _messages(encoding: Encoding, name: str, length: int, members: int, pool: BufferPool) -> list[Tensor]:
    size = encoding.bytes(length)
    return list(pool.vector(name, members * size, torch.uint8).split(size))


def _decoded(encoding: Encoding, messages: list[Tensor], out: list[Tensor]) -> Tensor:
    for message, vector in zip(messages, out, strict=True):
        encoding.add(message, vector)
    return out[0]


def bytes_sent(elements: int, size: int, wire: str, members: int) -> int:
    """Bytes that each member sends for a sum, without the headers of the network.

    Args:
        elements: length of the vector.
        size: bytes of an element in memory.
        wire: number format on the wire.
        members: number of members.
    """
    encoding = encoding_of(wire)
    if encoding is None:
        return round(2 * (members - 1) / members * elements * (size if DTYPES[wire] is None else 2))
    if members == 2:
        return encoding.bytes(elements)
    return 2 * (members - 1) * encoding.bytes(-(-elements // members))
