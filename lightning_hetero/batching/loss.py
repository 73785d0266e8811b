"""Mean training loss over ranks, and the first step at which it was not finite."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.comm.retry import collective
from lightning_hetero.comm.topology import widest_float


class LossTracker:
    """Training loss since it was last read, and the first step at which it was not finite.

    Nothing here waits for the device until somebody asks; a number that was copied to it would.
    """

    def __init__(self) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64)  # of loss times samples, and of samples
        self._broken = torch.tensor(-1)

    def take(self, loss: Tensor, samples: float, step: int) -> None:
        """Take in the loss of a batch.

        Args:
            loss: mean over the batch.
            samples: of the batch; a padding batch, which has none, does not count.
            step: optimizer steps taken before.
        """
        if not samples:
            return
        value = loss.detach().to(widest_float(loss.device))
        finite = value.isfinite()
        row = torch.stack([value * samples, value.new_full((), samples)])
        self._sums = self._sums.to(value.device, value.dtype) + torch.where(finite, row, 0.0)
        broken = self._broken.to(value.device)
        self._broken = torch.where((broken < 0) & ~finite, step + 1, broken)

    @property
    def nonfinite_step(self) -> int | None:
        """The optimizer step of the first loss that was not finite."""
        step = int(self._broken)
        return None if step < 0 else step

    def mean_over_ranks(self) -> float:
        """The mean over the samples of all ranks since the last look (collective); NaN if there were none."""
        sums = self._sums.cpu().double()

        def total() -> list[float]:
            everyone = sums.clone()
            dist.all_reduce(everyone)
            return everyone.tolist()

        weighted, samples = collective("average the loss", total)
        self._sums = torch.zeros(2, dtype=torch.float64)  # now: it is asked again if the collective breaks
        return weighted / samples if samples else math.nan

    def state_dict(self) -> list[float]:
        """Builtins only."""
        return self._sums.tolist()

    def load_state_dict(self, state: Sequence[float]) -> None:
        """Continue from :meth:`state_dict`."""
        self._sums = torch.tensor(state, dtype=torch.float64)
