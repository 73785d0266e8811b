"""Compressed gradients between the ranks of a replica: in few bits, or as matrices of low rank."""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from typing_extensions import override

from lightning_hetero.comm.compression import (
    DTYPES,
    KNOWN,
    LOW_BIT,
    Feedback,
    encoded_sum,
    encoding_of,
    low_bit_encoding,
)
from lightning_hetero.comm.staging import BufferPool, pinned, stage_of
from lightning_hetero.comm.threads import Worker
from lightning_hetero.errors import ConfigurationError, UnsupportedError

POWER_SGD = "powersgd"
#: Spellings of all wires of gradients; other numbers may stand after a colon.
GRADIENT_WIRES = (*DTYPES, *LOW_BIT, f"{POWER_SGD}:4")


def rank_of(wire: str) -> int | None:
    """The rank of the matrices that stand for gradients on a wire such as ``"powersgd:4"``; ``None`` on other wires.

    Raises:
        ConfigurationError: what stands after the colon is no rank.
    """
    name, colon, rank = wire.partition(":") if isinstance(wire, str) else ("", "", "")
    if name != POWER_SGD:
        return None
    if not colon or not (rank.isascii() and rank.isdigit()) or int(rank) < 1:
        raise ConfigurationError(
            f"wire={wire!r}: give the rank of the matrices that stand for gradients after a colon, a "
            "whole number of at least 1, such as 'powersgd:4'."
        )
    return int(rank)


def check_gradient_wire(wire: str) -> None:
    """See that an option is a wire of gradients.

    Raises:
        ConfigurationError: it is not.
    """
    if rank_of(wire) is not None:
        return
    try:
        encoding_of(wire)
    except ConfigurationError as error:
        known = ", ".join(map(repr, GRADIENT_WIRES))
        raise ConfigurationError(str(error).replace(KNOWN, known)) from None


#: Values after which a bundle is full: 4 MiB of fp32. A parameter is never cut.
FULL = 1 << 20


@dataclass(frozen=True)
class Bundle:
    """Some parameters of which the gradients travel together, one behind the other.

    Bundles depend on the model only. DDP's buckets depend on the link, too, and change after the first step; what is
    left out of messages would not fit them any more.

    Attributes:
        names: of the parameters.
        parameters: the parameters.
    """

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]

    @property
    def shapes(self) -> list[torch.Size]:
        """Of the parameters."""
        return [p.shape for p in self.parameters]

    @property
    def length(self) -> int:
        """Number of values."""
        return sum(p.numel() for p in self.parameters)

    @property
    def dtype(self) -> torch.dtype:
        """Of the smallest precision, at least fp32, that holds all of the gradients."""
        dtype = torch.float32
        for p in self.parameters:
            dtype = torch.promote_types(dtype, p.dtype)
        return dtype

    def parts(self, values: Tensor) -> list[Tensor]:
        """The part of each parameter in a vector of the bundle."""
        return list(values.split([p.numel() for p in self.parameters]))


def bundles_of(named: Iterable[tuple[str, nn.Parameter]]) -> list[Bundle]:
    """Put trainable parameters into bundles, from the model's end, of which the gradients come first.

    Args:
        named: the model's parameters with their names, in its order.
    """
    bundles, open_ = [], list[tuple[str, nn.Parameter]]()
    for name, p in reversed([pair for pair in named if pair[1].requires_grad]):
        open_.append((name, p))
        if sum(p.numel() for _, p in open_) >= FULL:
            bundles.append(open_)
            open_ = []
    return [Bundle(*zip(*pairs, strict=True)) for pairs in (*bundles, open_) if pairs]


class GradientMean(ABC):
    """Takes the means of a bundle's gradients, step after step, and keeps what messages leave out for the next one."""

    @abstractmethod
    def take(self, own: Tensor) -> None:
        """Take the mean over all ranks (collective); blocks.

        Args:
            own: this rank's gradients, a vector on the CPU. It is overwritten by the mean, the same on every rank.
        """

    @abstractmethod
    def state(self) -> list[Tensor]:
        """State that goes from step to step, in the memory in which it is kept."""

    @abstractmethod
    def reset(self) -> None:
        """Begin again."""


class EncodedMean(GradientMean):
    """A mean of encoded gradients; see :mod:`lightning_hetero.comm.compression`.

    Args:
        wire: a low-bit one.
        length: number of values.
        group: the ranks.
        pool: gives memory.
    """

    def __init__(self, wire: str, length: int, group: dist.ProcessGroup, pool: BufferPool) -> None:
        self._encoding, self._group, self._pool = low_bit_encoding(wire), group, pool
        self._feedback = Feedback(wire, [[length]], dist.get_world_size(group))

    @override
    def take(self, own: Tensor) -> None:
        own.div_(dist.get_world_size(self._group))
        feedback = self._feedback
        encoded_sum(self._group, own, self._encoding, feedback.sent[0], feedback.summed[0], self._pool)

    @override
    def state(self) -> list[Tensor]:
        return self._feedback.state_dict()

    @override
    def reset(self) -> None:
        for residual in self.state():
            residual.zero_()


class LowRankMean(GradientMean):
    r"""A mean of matrices of low rank, as in PowerSGD (Vogels et al. 2019, algorithms 1 and 2).

    With the gradient :math:`M_w` of rank w, to which its residual has been added, and Q of the step before:

    .. math::
        P = \text{orthogonal}(\text{mean}_w M_w Q), \quad Q_w = M_w^T P, \quad Q = \text{mean}_w Q_w

    The mean is :math:`P Q^T`, and the new residual :math:`M_w - P Q_w^T`. Tensors with more than two dimensions are
    matrices with a row for each index of the first one. Those with one dimension, and all others to which this would
    give no fewer bytes, travel as they are.

    Args:
        rank: of the matrices.
        shapes: of the gradients.
        dtype: of the gradients.
        group: the ranks.
        seed: of the first Q; the same on all ranks.
    """

    def __init__(
        self, rank: int, shapes: Sequence[Sequence[int]], dtype: torch.dtype, group: dist.ProcessGroup, seed: int
    ) -> None:
        self._group, self._seed = group, seed
        self._sizes = [int(torch.Size(shape).numel()) for shape in shapes]
        self._matrices: list[tuple[int, int, int] | None] = []  # rows, columns, rank; None: travels as it is
        for shape, size in zip(shapes, self._sizes, strict=True):
            rows = shape[0] if len(shape) > 1 and size else 1
            columns = size // rows
            least = min(rank, rows, columns)
            smaller = len(shape) > 1 and least * (rows + columns) < size
            self._matrices.append((rows, columns, least) if smaller else None)
        self._residual = torch.zeros(sum(self._sizes), dtype=dtype)
        self._q = [torch.empty(m[1], m[2], dtype=dtype) for m in self._matrices if m is not None]
        self.reset()

    @override
    def reset(self) -> None:
        self._residual.zero_()
        generator = torch.Generator().manual_seed(self._seed)
        for q in self._q:
            q.copy_(torch.randn(q.shape, generator=generator, dtype=torch.float64))

    @override
    def state(self) -> list[Tensor]:
        return [self._residual, *self._q]

    @override
    def take(self, own: Tensor) -> None:
        matrices, others = self._views(self._residual.add_(own))
        ps = [m @ q for m, q in zip(matrices, self._q, strict=True)]
        *means, plain = self._means([*ps, torch.cat([*others, own[:0]])])
        bases = [torch.linalg.qr(mean).Q for mean in means]
        qs = [m.T @ p for m, p in zip(matrices, bases, strict=True)]
        for m, p, q in zip(matrices, bases, qs, strict=True):
            m.addmm_(p, q.T, alpha=-1)
        for other in others:
            other.zero_()
        for kept, mean in zip(self._q, self._means(qs), strict=True):
            kept.copy_(mean)
        matrices, others = self._views(own)
        for m, p, q in zip(matrices, bases, self._q, strict=True):
            torch.mm(p, q.T, out=m)
        for other, mean in zip(others, plain.split([len(other) for other in others]), strict=True):
            other.copy_(mean)

    def _views(self, vector: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients in a vector: those that are matrices, and the others."""
        found = list(zip(vector.split(self._sizes), self._matrices, strict=True))
        return [part.view(shape[:2]) for part, shape in found if shape], [part for part, shape in found if not shape]

    def _means(self, own: Sequence[Tensor]) -> list[Tensor]:
        """The means of some tensors, in one message."""
        if not own:
            return []
        message = torch.cat([tensor.reshape(-1) for tensor in own])
        dist.all_reduce(message, group=self._group)
        message.div_(dist.get_world_size(self._group))
        parts = message.split([tensor.numel() for tensor in own])
        return [part.view(tensor.shape) for part, tensor in zip(parts, own, strict=True)]


log = logging.getLogger("lightning_hetero")


class _PendingBucket:
    """A bucket of DDP that waits for means.

    Args:
        bucket: with the gradients of this rank.

    Attributes:
        stage: copies the gradients to the host and back, beside the rest of the backward pass.
        ready: an event that passes once the gradients are there.
    """

    def __init__(self, bucket: dist.GradBucket) -> None:
        self.buffer, self.parameters, self.gradients = bucket.buffer(), bucket.parameters(), bucket.gradients()
        self.stage = stage_of(self.buffer.device)
        self.ready = self.stage.ready()
        self._future: Future[Any] = Future(devices=[self.buffer.device] if self.stage.has_streams else [])
        self.future: Future[Tensor] = self._future.then(self._outcome)
        self.missing: set[int] = set()  # bundles

    def end(self, error: BaseException | None) -> None:
        """Let DDP go on: the means are on their way in the current stream, or there will be none."""
        self._error = error
        self._future.set_result(self.buffer)

    def _outcome(self, future: Future[Any]) -> Tensor:
        if self._error is not None:  # a future with an error of Python's own is a mere value to DDP
            raise self._error
        return future.value()


class GradientWire:
    """Takes the means of gradients in the background, while the backward pass goes on.

    All collectives of a step run one after the other, in an order that is the same on every rank. The bundles in which
    gradients travel depend on the model only; so do the means, whatever the size of DDP's buckets.

    Args:
        wire: a low-bit one, or ``"powersgd:4"``.
        model: of which the gradients travel.
        group: the ranks, over gloo. Nobody else may use it.

    Raises:
        UnsupportedError: a parameter is complex.
    """

    def __init__(self, wire: str, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.wire, self._group = wire, group
        self.bundles = bundles_of(model.named_parameters())
        rank, pool = rank_of(wire), BufferPool()
        self._means: list[GradientMean] = []
        self._values: list[Tensor] = []  # on the host; pinned, if gradients are on a device
        self._copied: Any = None  # an event that passes once the gradients so far are in there; None: they are
        on_device = any(p.device.type != "cpu" for p in model.parameters())
        for number, bundle in enumerate(self.bundles):
            if bundle.dtype.is_complex:
                raise UnsupportedError(
                    f"wire={wire!r}: one of {', '.join(bundle.names)} is complex. Hold it as two real ones "
                    "(torch.view_as_real), or use wire='fp32'."
                )
            dtype = torch.float32 if rank is None else bundle.dtype
            memory = pinned(bundle.length, dtype) if on_device else torch.empty(bundle.length, dtype=dtype)
            self._values.append(memory.zero_())
            self._means.append(
                EncodedMean(wire, bundle.length, group, pool)
                if rank is None
                else LowRankMean(rank, bundle.shapes, dtype, group, seed=number)
            )
        self._places = {
            id(p): (number, part)
            for number, (bundle, values) in enumerate(zip(self.bundles, self._values, strict=True))
            for p, part in zip(bundle.parameters, bundle.parts(values), strict=True)
        }
        self._lock = threading.Lock()
        self._waiting: list[_PendingBucket] = []  # buckets
        self._absent: list[int] = []  # of each bundle, gradients that have yet to come
        self._errors: list[BaseException] = []  # of this backward pass
        self._worker = Worker("gradients")
        self._not_finite: set[int] = set()  # bundles
        self.used = False  # whether anything may have been left out

    def hook(self, _: object, bucket: dist.GradBucket) -> Future[Tensor]:
        """Take the means of a bucket's gradients; DDP calls this as soon as they are ready.

        Raises:
            UnsupportedError: they are sparse.
        """
        if bucket.buffer().is_sparse:
            raise UnsupportedError(
                f"wire={self.wire!r}: a gradient is sparse. Use sparse=False in the model's embeddings, or wire='fp32'."
            )
        if bucket.index() == 0:
            self._begin()
        waiting, ready = _PendingBucket(bucket), []
        with waiting.stage.after(waiting.ready):
            for p, gradient in zip(waiting.parameters, waiting.gradients, strict=True):
                number, part = self._places[id(p)]
                part.copy_(gradient.reshape(-1).to(part.dtype), non_blocking=waiting.stage.has_streams)
                waiting.missing.add(number)
                self._absent[number] -= 1
                if not self._absent[number]:
                    ready.append(number)
            self._copied = waiting.stage.ready()
        with self._lock:
            self._waiting.append(waiting)
        for number in ready:
            self._start(number)
        return waiting.future

    def _begin(self) -> None:
        """A backward pass begins."""
        self._absent = [len(bundle.parameters) for bundle in self.bundles]
        self._errors, self._waiting, self.used = [], [], True
        if self._not_finite:
            for number in self._not_finite:
                self._means[number].reset()
            self._not_finite.clear()
            self.say_dropped("a gradient was not finite")

    def _start(self, number: int) -> None:
        """Take the means of a bundle, after those that were started before; none after one that has failed."""
        errors, copied = self._errors, self._copied

        def take() -> None:
            try:
                if not errors:
                    if copied is not None:
                        copied.synchronize()
                    self._take(number)
            except BaseException as error:
                errors.append(error)
            self._arrived(number, errors[0] if errors else None)

        self._worker.call(take)

    @torch.no_grad()
    def _take(self, number: int) -> None:
        values = self._values[number]
        self._means[number].take(values)
        if not bool(values.sum().isfinite()):  # the same on every rank
            self._not_finite.add(number)

    @torch.no_grad()
    def _arrived(self, number: int, error: BaseException | None) -> None:
        """Let go the buckets that have all their means, or of which one will not come."""
        with self._lock:
            done = []
            for waiting in self._waiting:
                if number in waiting.missing:
                    waiting.missing.discard(number)
                    if error is not None or not waiting.missing:
                        done.append(waiting)
            self._waiting = [waiting for waiting in self._waiting if waiting not in done]
        for waiting in done:
            with waiting.stage.after(waiting.ready):
                if error is None:
                    for p, gradient in zip(waiting.parameters, waiting.gradients, strict=True):
                        mean = self._places[id(p)][1].view(gradient.shape)
                        gradient.copy_(mean, non_blocking=waiting.stage.has_streams)
                waiting.end(error)

    # -- what goes from step to step -----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Error feedback of this rank's messages, and all else that goes from step to step."""
        means = [mean.state() for mean in self._means]
        return {"wire": self.wire, "members": dist.get_world_size(self._group), "means": means}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from :meth:`state_dict`; if it does not fit, error feedback begins again, with a warning."""
        own = self.state_dict()
        means = [] if state is None else state["means"]
        if state is None or _sizes(state) != _sizes(own):
            self.say_dropped("the checkpoint was saved with another wire, another model or another number of ranks")
            return
        for kept, saved in zip(chain(*own["means"]), chain(*means), strict=True):
            kept.copy_(saved)

    def say_dropped(self, why: str) -> None:
        """Say on one rank that what messages have left out is dropped."""
        if dist.get_rank() == 0:
            log.warning(
                f"wire={self.wire!r}: {why}, so what earlier messages have left out is dropped. Error feedback begins "
                "again, from 0."
            )


def _sizes(state: Mapping[str, Any]) -> tuple[Any, ...]:
    means = [[tuple(tensor.shape) for tensor in mean] for mean in state["means"]]
    return state["wire"], state["members"], means
