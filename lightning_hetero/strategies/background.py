"""Writes checkpoints beside the training, from copies."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from lightning_hetero._lightning import WrappingCheckpointIO
from lightning_hetero.comm import failures
from lightning_hetero.comm.background import Background
from lightning_hetero.errors import CheckpointError


class BackgroundFiles(WrappingCheckpointIO):
    """Takes copies of what it is to write, and writes them on a thread, the checkpoint itself last.

    Lightning's ``AsyncCheckpointIO`` does not suit: before 2.6 it takes no copy, so that training changes what is
    being written; it queues without a limit; and rank 0 may have written the checkpoint before the others have
    written their shards.

    Args:
        files: writes them.
        store: of the job, with keys of its own.
        limit: longest wait for another rank, seconds.
    """

    def __init__(self, files: CheckpointIO, store: dist.Store, limit: float) -> None:
        # One thread is enough.
        super().__init__(files.checkpoint_io if isinstance(files, AsyncCheckpointIO) else files)
        self._store, self._limit = store, limit
        self._copies = Copies()
        self._jobs: list[tuple[Any, ...]] = []  # what is to be written
        self._number = 0  # of saves, the same on every rank
        self._running: Background[None] | None = None
        self.seconds = 0.0  # that the latest save has taken

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self.complete()
        if not self._jobs:
            self._copies.rewind()
        self._jobs.append((self._copies.of(checkpoint), path, storage_options))

    def launch(self, then: Callable[[], Any]) -> None:
        """Begin to write what has been given since the last time; on all ranks.

        Args:
            then: called on rank 0 once all of it is written, on all ranks.
        """
        jobs, self._jobs, self._number = self._jobs, [], self._number + 1
        number = self._number
        self._running = Background(lambda: self._write(jobs, number, then))

    @property
    def busy(self) -> bool:
        """Whether this rank still writes."""
        return self._running is not None and self._running.running

    def complete(self) -> None:
        """Wait until this rank has written all that it was given; its error stays for :meth:`problem`."""
        if self._running is not None:
            self._running.wait()

    def problem(self) -> BaseException | None:
        """Why this rank could not write, if it could not."""
        return None if self._running is None or self._running.running else self._running.error

    def _write(self, jobs: list[tuple[Any, ...]], number: int, then: Callable[[], Any]) -> None:
        began, first = time.perf_counter(), dist.get_rank() == 0
        assert self.checkpoint_io is not None
        text = ""
        try:
            for checkpoint, path, options in jobs[: len(jobs) - first]:
                self.checkpoint_io.save_checkpoint(checkpoint, path, options)
        except BaseException as error:
            text = str(error) or type(error).__name__
            raise
        finally:
            self._store.set(f"{number}/{dist.get_rank()}", text or "written")
        if first:
            self._wait_for_others(number)
            checkpoint, path, options = jobs[-1]
            self.checkpoint_io.save_checkpoint(checkpoint, path, options)
            then()
        self.seconds = time.perf_counter() - began

    def _wait_for_others(self, number: int) -> None:
        until, others = time.monotonic() + self._limit, [f"{number}/{rank}" for rank in range(1, dist.get_world_size())]
        while not all(self._store.check([other]) for other in others):
            if failures.first(0.0) is not None or time.monotonic() > until:
                raise CheckpointError("another rank has not written its part of the checkpoint. Nothing was replaced.")
            time.sleep(0.02)
        for rank, other in enumerate(others, 1):
            if (text := self._store.get(other).decode()) != "written":
                raise CheckpointError(f"rank {rank} could not save: {text}")


class Copies:
    """Copies tensors to the CPU, into the memory of the copies before where these had the same form."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._next = 0

    def rewind(self) -> None:
        """Nobody needs the copies any more."""
        del self._kept[self._next :]
        self._next = 0

    def of(self, collection: Any) -> Any:
        """A collection with copies of its tensors; what is one tensor in it stays one."""
        known: dict[tuple[Any, ...], Tensor] = {}

        def copy(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            if tensor.layout != torch.strided:
                return tensor.to("cpu", copy=True)
            key = tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride()
            if key not in known or not tensor.numel():
                known[key] = self._copy(tensor)
            return known[key]

        return apply_to_collection(collection, Tensor, copy)

    def _copy(self, tensor: Tensor) -> Tensor:
        index, self._next = self._next, self._next + 1
        if index == len(self._kept):
            self._kept.append(tensor.to("cpu", copy=True))
        elif self._kept[index].shape == tensor.shape and self._kept[index].dtype == tensor.dtype:
            self._kept[index].copy_(tensor)
        else:
            self._kept[index] = tensor.to("cpu", copy=True)
        return self._kept[index]
