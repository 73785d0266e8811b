"""A small all-gather in the background, after which all ranks act on the same numbers at the same step."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_hetero.comm.deadline import deadline


class AsyncAllGather:
    """Gathers one row of numbers from each rank in the background.

    Args:
        group: a process group for CPU tensors that nothing else uses, since collectives of one group run in order.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._work: dist.Work | None = None
        self._rows: list[torch.Tensor] = []

    @property
    def in_flight(self) -> bool:
        """Whether a gather has been launched and not yet collected."""
        return bool(self._rows)

    def launch(self, row: Sequence[float]) -> None:
        """Begin to gather. All ranks launch at the same step.

        Args:
            row: this rank's numbers, sent as float64.
        """
        mine = torch.tensor(row, dtype=torch.float64)
        self._rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        with deadline("send its row to all ranks"):
            self._work = dist.all_gather(self._rows, mine, group=self._group, async_op=True)

    def forget(self) -> None:
        """Drop what is in flight: a rank was lost."""
        self._rows, self._work = [], None

    def collect(self) -> list[list[float]]:
        """The rows of all ranks, in their order. Waits until all ranks have launched."""
        with deadline("receive the rows of all ranks"):
            if self._work is not None:
                self._work.wait()
        rows, self._rows, self._work = [row.tolist() for row in self._rows], [], None
        return rows
