"""How ranks with data of their own run the same number of steps, without waiting for each other at every step."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils._pytree import tree_leaves

from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.deadline import deadline
from lightning_hetero.comm.progress import Count, Progress
from lightning_hetero.engine.job import Job
from lightning_hetero.workload.stream import Tally
from lightning_hetero.workload.timer import StepTimer


class StreamPeers:
    """The other ranks, for a stream; see :class:`~lightning_hetero.workload.stream.Peers`.

    Args:
        job: with the view.
        timer: this rank's stopwatch.
        length: batches of the longest stream of a rank; ``None``: nobody knows.
        number: of the stream, the same on every rank.
    """

    def __init__(self, job: Job, timer: StepTimer, length: int | None, number: int) -> None:
        self._job, self._timer, self._length = job, timer, length
        self._compared = False
        self._ended = False  # this replica, in this pass
        self._progress: Progress | None = None
        if job.view.count > 1 and length is None and job.view.leads:
            ids = [replica.id for replica in job.view.replicas]
            self._progress = Progress(
                job.store(f"stream {number}"), ids, job.view.replica.id, job.timeout.total_seconds()
            )

    def begin(self) -> None:
        """A pass over the data is about to begin, on all ranks."""
        self._ended = False
        if self._progress is not None:
            self._progress.begin()

    def compare(self, batch: Any) -> None:
        """Warn if ranks were given the same first batch (collective, the first time)."""
        if self._compared:
            return
        self._compared = True
        with self._timer.waiting():
            seen = gather(_fingerprint(batch), "whether ranks have the same samples")
        same = [rank for rank, own in enumerate(seen) if own is not None and seen.count(own) > 1]
        if same:
            rank_zero_warn(
                f"The first batch is the same on ranks {same}. If every rank reads the same samples, each counts "
                f"{len(same)} times. Let the iterable dataset yield another part of the data on each rank, or wrap it "
                "in lightning_hetero.SharedStream."
            )

    def tell_of_unknown(self, problem: str) -> None:
        """Say once that a batch counts as many samples as that of every other rank, whatever it holds."""
        rank_zero_warn(
            f"The number of samples in a training batch is unknown: {problem}. Batches of all ranks count the same, as "
            "under ddp. Where they hold unequal numbers, say how much each weighs: define `batch_weight(batch)` on the "
            "LightningModule, or let all tensors have the batch as their first dimension."
        )

    def sum(self, tally: Tally) -> Tally:
        """The tallies of the ranks of this replica together (collective over them)."""
        row = torch.tensor(tally, dtype=torch.float64)
        with self._timer.waiting(), deadline("exchange batch sizes"):
            if (group := self._job.small_group()) is not None:
                dist.all_reduce(row, group=group)
        return Tally(*row.tolist())

    def sum_all(self, tally: Tally) -> Tally:
        """The tallies of all ranks together (collective)."""
        row = torch.tensor(tally, dtype=torch.float64)
        with self._timer.waiting(), deadline("learn which ranks have data"):
            dist.all_reduce(row)
        return Tally(*row.tolist())

    def goes_on(self, drawn: int, alive: bool) -> bool:
        """Whether all ranks run another batch in this pass (collective over the replica).

        A replica that has no more data runs padding batches, but never more than the replica that has most. So an
        epoch has as many steps as the longest stream of a replica, and who has data never waits.
        """
        if self._job.view.count == 1:
            return alive
        if self._length is not None:
            return drawn < self._length
        if alive or not self._ended:
            self._ended = not alive
            if self._progress is not None:
                self._progress.write(Count(drawn + alive, self._ended))
        if alive:
            return True
        with self._timer.waiting():
            more = self._progress is not None and self._progress.beyond(drawn)
        return self.sum(Tally(float(more), 0.0, 0.0)).samples > 0


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch, in its order; collections of any kind, and dataclasses, are opened."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):  # such as a UserDict
            yield from tensors_in(list(leaf.values()))
        elif isinstance(leaf, Sequence) and not isinstance(leaf, str | bytes):
            yield from tensors_in(list(leaf))
        elif is_dataclass(leaf):
            yield from tensors_in([getattr(leaf, field.name) for field in fields(leaf)])


def samples_in(batch: Any) -> float:
    """The first dimension that all tensors of a batch share.

    Raises:
        ValueError: there is none, or the tensors differ.
    """
    sizes = {tensor.size(0) for tensor in tensors_in(batch) if tensor.ndim > 0}
    if len(sizes) != 1:
        differ = f"its tensors have first dimensions {sorted(sizes)}"
        raise ValueError(differ if sizes else f"no tensors are found in it (a {type(batch).__name__})")
    return float(sizes.pop())


def _fingerprint(batch: Any) -> str | None:
    """Tells batches apart; ``None`` where there is nothing to tell them by."""
    leaves = [leaf for leaf in tensors_in(batch) if not (leaf.is_nested or leaf.is_quantized)]
    dense = [leaf for leaf in leaves if leaf.layout == torch.strided]  # others have no bytes
    tensors = [leaf.detach().cpu().resolve_conj().contiguous() for leaf in dense if leaf.numel() > 1]
    if not any((tensor != tensor.flatten()[0]).any() for tensor in tensors):
        return None  # none at all, or constant ones
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
