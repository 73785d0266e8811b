"""Memory of the host: what goes between a device and the network is copied through it, pinned; and buffers are kept."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

PIECE = 4 << 20  # bytes that are copied, and sent, at a time: while one piece travels, the next one is copied


def no_wait() -> None:
    """For where a function that waits for a copy is asked for, and there is none under way."""


@contextmanager
def as_vector(tensor: Tensor) -> Iterator[Tensor]:
    """The values of a dense tensor as a vector, in the order of its indices whatever its memory format is.

    Ranks may hold it in different ones, such as ``channels_last``. What is written to the vector is in the tensor after
    this block.
    """
    own = tensor.detach()
    vector = own.reshape(-1)
    yield vector
    if not own.is_contiguous():
        with torch.no_grad():
            own.copy_(vector.view(own.shape))


class HostStage:
    """Lets functions work on the host's copies of a device's tensors.

    The copies lie in pinned memory, where the device has that, and are made in a stream of their own, so that they wait
    for nothing but the tensor itself, and overlap with what the device computes meanwhile.

    Args:
        device: where tensors are; on a CPU they are not copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = getattr(torch, device.type)
        needed = ("Stream", "stream", "current_stream", "Event")
        self.has_streams = device.type != "cpu" and all(hasattr(self._module, name) for name in needed)
        self._stream: Any = self._module.Stream(device) if self.has_streams else None
        self._buffers: dict[torch.dtype, Tensor] = {}
        self._copied: Any = None  # an event that passes once the latest copies of `copy_beside` are there
        # Memory of `upload`, with an event that passes once the device has read it: one is filled, the other one read.
        self._uploads: list[tuple[Tensor, Any]] = [(torch.empty(0), None)] * 2

    def ready(self) -> Any:
        """An event that passes when all that the device has been given by now is done; ``None`` without streams."""
        if not self.has_streams:
            return None
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event

    @contextmanager
    def after(self, event: Any) -> Iterator[None]:
        """Work of the device in this block begins after an event, and beside all other work.

        Args:
            event: of :meth:`ready`.
        """
        if event is None:
            yield
            return
        with self._module.stream(self._stream):
            self._stream.wait_event(event)
            yield

    @torch.no_grad()
    def copy_beside(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], object]:
        """Begin to copy tensors of the device into pinned memory, beside what the device computes next.

        Call :meth:`before_overwrite` before the device is told to change them.

        Args:
            pairs: a tensor, and the vector to which its values go.

        Returns:
            A function that waits until all values are there, on any thread.
        """
        with self.after(self.ready()):
            for tensor, place in pairs:
                place.copy_(tensor.detach().reshape(-1), non_blocking=self.has_streams)
            self._copied = self.ready()
        return no_wait if self._copied is None else self._copied.synchronize

    @property
    def copies(self) -> bool:
        """Whether copies of :meth:`copy_beside` may be under way."""
        return self._copied is not None

    def before_overwrite(self) -> None:
        """Let what the device is told to do from now on begin after the copies of :meth:`copy_beside`."""
        copied, self._copied = self._copied, None
        if copied is not None:
            self._module.current_stream(self._device).wait_event(copied)

    @torch.no_grad()
    def through(self, tensor: Tensor, use: Callable[[Tensor], object]) -> None:
        """Let a function change a tensor's values on the host; blocks.

        Args:
            tensor: on the device.
            use: is given vectors on the CPU, pieces of the tensor in their order, or a sparse tensor as a whole. It may
                change them in place.
        """
        if tensor.is_sparse:
            host = tensor.detach().cpu()
            use(host)
            if host is not tensor:
                tensor.copy_(host)
            return
        with as_vector(tensor) as flat:
            self._through(flat, use)

    def _through(self, flat: Tensor, use: Callable[[Tensor], object]) -> None:
        size = max(PIECE // flat.element_size(), 1)
        if self._device.type == "cpu":
            for piece in flat.split(size):
                use(piece)
            return
        parts = list(zip(flat.split(size), self._buffer(flat).split(size), strict=True))
        copied = []
        for own, host in parts:
            host.copy_(own, non_blocking=self.has_streams)
            copied.append(self.ready())
        for (own, host), event in zip(parts, copied, strict=True):
            if event is not None:
                event.synchronize()
            use(host)
            own.copy_(host, non_blocking=self.has_streams)

    @torch.no_grad()
    def upload(self, parts: Sequence[Tensor], dtype: torch.dtype, most: int) -> list[Tensor]:
        """Copies on the device of tensors that lie in pageable memory of the host, or have another dtype.

        They go through pinned memory: else the host waits for each, and the device gets them several times slower.

        Args:
            parts: on the host.
            dtype: of the copies.
            most: number of values that calls usually copy at most.
        """
        sizes = [part.numel() for part in parts]
        (memory, is_read), other = self._uploads
        if is_read is not None:
            is_read.synchronize()
        if memory.dtype != dtype or len(memory) < sum(sizes):
            memory = pinned(max(sum(sizes), most), dtype)
        used = memory[: sum(sizes)]
        for place, part in zip(used.split(sizes), parts, strict=True):
            place.copy_(part.reshape(-1))
        there = used.to(self._device, non_blocking=self.has_streams)
        self._uploads = [other, (memory, self.ready())]
        return [own.view(part.shape) for own, part in zip(there.split(sizes), parts, strict=True)]

    def _buffer(self, like: Tensor) -> Tensor:
        kept = self._buffers.get(like.dtype)
        if kept is None or len(kept) < len(like):
            kept = pinned(len(like), like.dtype) if self.has_streams else torch.empty(len(like), dtype=like.dtype)
            self._buffers[like.dtype] = kept
        return kept[: len(like)]


@cache
def stage_of(device: torch.device) -> HostStage:
    """The stage of a device, for copies of which one is made at a time."""
    return HostStage(device)


def memory_like(vector: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory of a vector's length on the host, pinned where the vector is.

    Args:
        vector: on the host.
        dtype: of the memory. Default: the vector's.
    """
    dtype = dtype or vector.dtype
    # To ask whether the vector is pinned would begin CUDA, on a rank that computes on its CPU.
    if torch.cuda.is_available() and not torch.cuda.is_initialized():
        return torch.empty(len(vector), dtype=dtype)
    return pinned(len(vector), dtype) if vector.is_pinned() else torch.empty(len(vector), dtype=dtype)


_pageable = False  # whether the user knows that memory could not be pinned


def pinned(length: int, dtype: torch.dtype) -> Tensor:
    """A vector in pinned memory, with which a device exchanges values while the host goes on.

    Where the system allows no more of it, the vector is in pageable memory, and a warning says once what that costs.
    """
    global _pageable
    try:
        return torch.empty(length, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        if getattr(torch, "accelerator", torch.cuda).is_available() and not _pageable:  # from 2.6 on
            _pageable = True
            with suppress(UserWarning):  # also where warnings are errors
                warnings.warn(
                    f"{length * dtype.itemsize >> 20} MiB of memory could not be pinned "
                    f"({str(error).splitlines()[0]}). Copies between the device and the host now go through pageable "
                    "memory, which is several times slower, and the host waits for each. Free memory of the host, or "
                    "raise the limit of locked memory (`ulimit -l`).",
                    stacklevel=2,
                )
        return torch.empty(length, dtype=dtype)


class BufferPool:
    """Gives the same vector at each request. New pages of memory cost far more than the arithmetic on them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def vector(self, name: str, length: int, dtype: torch.dtype) -> Tensor:
        """A vector on the CPU. It contains what was last written to it, or anything.

        Args:
            name: requests with the same name, length and dtype get the same memory.
            length: number of elements.
            dtype: of the elements.
        """
        key = name, length, dtype
        if key not in self._kept:
            self._kept[key] = torch.zeros(length, dtype=dtype)
        return self._kept[key]
