"""Tries training steps on this rank alone, to see whether they fit into its memory; nothing of them stays."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_hetero.comm.solitude import alone
from lightning_hetero.engine.footprint import Footprint
from lightning_hetero.engine.untouched import untouched

_OUT_OF_MEMORY = (getattr(torch, "OutOfMemoryError", None) or torch.cuda.OutOfMemoryError, MemoryError)
_SAYS_SO = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "can't allocate memory", "not enough memory")


class Trials:
    """Tries batches, each with a forward and a backward pass.

    Gradients and the optimizers' state are there meanwhile, as from the second training step on: the forward pass of a
    step begins while the gradients of the step before still exist.

    Args:
        module: to be trained.
        optimizers: that are to train it.
        device: of the module.
        limit: bytes that a step may take on the device; ``None``: what the device has.
    """

    def __init__(
        self, module: nn.Module, optimizers: Sequence[Optimizer], device: torch.device, limit: int | None
    ) -> None:
        self._module, self._optimizers, self._device, self._limit = module, optimizers, device, limit
        self._ready = False
        # Counts the memory of the device, if it has any of its own.
        self._memory: Any = None if device.type == "cpu" else getattr(torch, device.type, None)

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Try batches in this block. After it, all is as it was before."""
        try:
            with untouched(self._module, *self._optimizers, device=self._device), alone(), torch.enable_grad():
                self._ready = not self._runs_out(self._fill)
                yield
        finally:
            self._free()

    def fits(self, step: Callable[[], None]) -> bool:
        """Whether a step fits: a forward and a backward pass."""
        if not self._ready:
            return False
        footprint = None
        if hasattr(self._memory, "reset_peak_memory_stats"):
            self._memory.reset_peak_memory_stats(self._device)
            ran_out = self._runs_out(step)
        else:
            footprint = Footprint(self._resident())
            with footprint:
                ran_out = self._runs_out(step)
        if ran_out:
            self._free()
            return False
        peak = self._memory.max_memory_allocated(self._device) if footprint is None else footprint.peak
        return self._limit is None or peak <= self._limit

    def _fill(self) -> None:
        """Make the gradients, and let the optimizers make their state."""
        for parameter in self._module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        for optimizer in self._optimizers:
            if not optimizer.state:
                for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
                    vars(optimizer).get(hooks, {}).clear()
                optimizer.step(lambda: torch.zeros(()))  # type: ignore[arg-type, return-value]

    def _resident(self) -> Iterator[Tensor]:
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            yield tensor
            if tensor.is_leaf and tensor.grad is not None:
                yield tensor.grad
        for optimizer in self._optimizers:
            yield from (leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor))

    def _runs_out(self, action: Callable[[], None]) -> bool:
        """Whether an action runs out of memory; other errors are raised."""
        try:
            action()
            if self._memory is not None:
                self._memory.synchronize()
        except Exception as error:
            if isinstance(error, _OUT_OF_MEMORY) or any(words in str(error) for words in _SAYS_SO):
                return True  # the error, which holds what the step had made, ends here
            raise
        return False

    def _free(self) -> None:
        gc.collect()
        if self._memory is not None:
            self._memory.empty_cache()
