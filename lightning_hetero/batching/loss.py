"""Mean training loss over ranks, and the first step at which it was not finite."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.comm.retry import collective

_STACKED = 256  # losses that are put into one tensor, of a few bytes each


class LossTracker:
    """Training loss since it was last read, and the first step at which it was not finite.

    Losses stay on their device until somebody asks: neither the host nor the device waits for the other in a step.
    """

    def __init__(self) -> None:
        self._total = self._samples = 0.0  # the sum of losses times samples, and that of samples
        self._nonfinite_step: int | None = None
        self._losses: list[Tensor] = []  # on the device: those that the sums do not have yet
        self._stacked: list[Tensor] = []  # the older ones of these
        self._counts: list[tuple[float, int]] = []  # samples and step of each

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
        if len(self._losses) == _STACKED:
            self._stack()

    def _stack(self) -> None:
        if self._losses:
            self._stacked.append(torch.stack(self._losses))
            self._losses = []

    def _add(self) -> None:
        """Add the losses on the device to the sums, which waits for it."""
        self._stack()
        stacked, self._stacked = self._stacked, []
        counts, self._counts = self._counts, []
        losses = [loss for part in stacked for loss in part.tolist()]
        for loss, (samples, step) in zip(losses, counts, strict=True):
            if math.isfinite(loss):
                self._total += loss * samples
                self._samples += samples
            elif self._nonfinite_step is None:
                self._nonfinite_step = step + 1

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
        self._total = self._samples = 0.0  # now: it is asked again if the collective breaks
        return weighted / samples if samples else math.nan

    def state_dict(self) -> list[float]:
        """Builtins only."""
        self._add()
        return [self._total, self._samples]

    def load_state_dict(self, state: Sequence[float]) -> None:
        """Continue from :meth:`state_dict`."""
        self._total, self._samples = state
        self._losses, self._stacked, self._counts = [], [], []
