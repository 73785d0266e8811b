"""The wires between replicas."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.deadline import deadline
from lightning_hetero.comm.wire import Sum, Wire


class ReplicaLinks:
    """Lets replicas combine vectors: their leaders (lowest ranks) exchange, and each tells its own replica.

    Args:
        rank: this process's.
        replicas: the ranks of each replica.
        timeout: longest wait for another replica.
    """

    def __init__(self, rank: int, replicas: Sequence[Sequence[int]], timeout: timedelta) -> None:
        self.index = next(i for i, ranks in enumerate(replicas) if rank in ranks)
        self.count = len(replicas)
        self.leads = rank == replicas[self.index][0]
        self._leader, self._size = replicas[self.index][0], len(replicas[self.index])
        # Groups of their own: gloo runs the work of a group in order. Every process takes part in making each.
        self._leaders = dist.new_group([ranks[0] for ranks in replicas], timeout=timeout, backend="gloo")
        inner = [dist.new_group(list(ranks), timeout=timeout, backend="gloo") for ranks in replicas]
        self._inner = inner[self.index]
        # Global group i holds one rank of each replica: its member i, modulo its size.
        self.turns = max(len(ranks) for ranks in replicas)
        self._active = [[ranks[i % len(ranks)] for ranks in replicas] for i in range(self.turns)]
        self._global = [dist.new_group(ranks, timeout=timeout, backend="gloo") for ranks in self._active]
        self._rank = rank

    def takes_turn(self, turn: int) -> bool:
        """Whether this rank is its replica's member of global group ``turn``."""
        return self._rank in self._active[turn]

    def begin_sum(self, turn: int, flats: Sequence[Tensor], wire: Wire) -> Sum:
        """Start to sum vectors over global group ``turn``, in the background; for its members only."""
        return Sum(flats, self._global[turn], wire)

    def tell_replica(self, turn: int, flats: Sequence[Tensor]) -> None:
        """Give all ranks of the replica the vectors of its member of global group ``turn``, in place."""
        if self._size > 1:
            with deadline("receive from the replica's active rank"):
                for flat in flats:
                    dist.broadcast(flat, self._active[turn][self.index], group=self._inner)

    def gather(self, value: Any) -> list[Any]:
        """One value per rank (collective over all ranks)."""
        return gather(value, "what the replicas have")

    def average(self, flats: Sequence[Tensor], weights: Sequence[float]) -> list[Tensor]:
        """Weighted mean over replicas of the leaders' vectors, on every rank (collective over all ranks).

        Args:
            flats: floating vectors, the same on all ranks of a replica.
            weights: one per replica, at least 0, not all 0.

        Returns:
            Vectors of the same dtypes, on the CPU; bitwise the same on every rank.
        """
        share = weights[self.index] / sum(weights)
        mean = [flat.to("cpu", torch.promote_types(flat.dtype, torch.float32), copy=True) for flat in flats]
        with deadline("average with the other replicas"):
            for flat in mean:
                if self.leads and self.count > 1:
                    dist.all_reduce(flat.mul_(share), group=self._leaders)
                if self._size > 1:
                    dist.broadcast(flat, self._leader, group=self._inner)
        return [result.to(flat.dtype) for result, flat in zip(mean, flats, strict=True)]
