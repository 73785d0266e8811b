"""Mean training loss over ranks, and the first step at which it was not finite."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.comm.retry import collective
from lightning_hetero.comm.staging import pinned, stage_of

_TOGETHER = 256  # losses that are copied to the host together


class LossTracker:
    """Training loss since it was last read, and the first step at which it was not finite.

    Losses stay on their device, and are copied to the host many at a time: nothing waits in a step. Only who asks does.
    """

    def __init__(self) -> None:
        self._total = self._samples = 0.0  # the sum of losses times samples, and that of samples
        self._nonfinite_step: int | None = None
        self._losses: list[Tensor] = []  # on the device
        self._counts: list[tuple[float, int]] = []  # samples and step of each
        #: Losses on their way to the host, an event that passes once they are there, and their counts.
        self._copied: tuple[Tensor, Any, list[tuple[float, int]]] | None = None

    def take(self, loss: Tensor, samples: float, step: int) -> None:
        """Take in the loss of a batch.

        Args:
            loss: mean over the batch, not changed in place later on.
            samples: of the batch; a padding batch, which has none, does not count.
            step: optimizer steps taken before.
        """
        if not samples:
            return
        self._losses.append(loss.detach().reshape(()))
        self._counts.append((samples, step))
        if len(self._losses) == _TOGETHER:
            self._copy()

    def _copy(self) -> None:
        """Begin to copy the losses to the host, when those before are there, as they are after so many steps."""
        self._add_copied()
        losses, counts = torch.stack(self._losses), self._counts
        stage = stage_of(losses.device)
        host = pinned(len(losses), losses.dtype) if stage.has_streams else losses
        self._copied = host.copy_(losses, non_blocking=stage.has_streams), stage.ready(), counts
        self._losses, self._counts = [], []

    def _add_copied(self) -> None:
        copied, self._copied = self._copied, None
        if copied is None:
            return
        losses, ready, counts = copied
        if ready is not None:
            ready.synchronize()
        for loss, (samples, step) in zip(losses.tolist(), counts, strict=True):
            if math.isfinite(loss):
                self._total += loss * samples
                self._samples += samples
            elif self._nonfinite_step is None:
                self._nonfinite_step = step + 1

    def _add(self) -> None:
        """Add all losses to the sums, which waits for the device."""
        if self._losses:
            self._copy()
        self._add_copied()

    @property
    def nonfinite_step(self) -> int | None:
        """The optimizer step of the first loss that was not finite."""
        self._add()
        return self._nonfinite_step

    def mean_over_ranks(self) -> float:
        """The mean over the samples of all ranks since the last look (collective); NaN if there were none."""
        self._add()
        own = torch.tensor([self._total, self._samples], dtype=torch.float64)

        def total() -> list[float]:
            everyone = own.clone()
            dist.all_reduce(everyone)
            return everyone.tolist()

        weighted, samples = collective("average the loss", total)
        self._total = self._samples = 0.0  # only now: a collective that breaks is called again
        return weighted / samples if samples else math.nan

    def state_dict(self) -> list[float]:
        """Builtins only."""
        self._add()
        return [self._total, self._samples]

    def load_state_dict(self, state: Sequence[float]) -> None:
        """Continue from :meth:`state_dict`."""
        self._total, self._samples = state
        self._losses, self._counts, self._copied = [], [], None
