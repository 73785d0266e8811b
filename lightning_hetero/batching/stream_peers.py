"""The other ranks, for a stream: what they have left, and whether they read the same samples."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hetero.batching.timer import StepTimer
from lightning_hetero.batching.weights import tensors_in
from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.failures import deadline
from lightning_hetero.comm.job import Job
from lightning_hetero.comm.progress import DataProgress, DataProgressTracker
from lightning_hetero.comm.retry import NumberedResults


class StepTally(NamedTuple):
    """Tally of a rank at one step of a stream, or its sums over ranks.

    Attributes:
        samples: samples in the batches; NaN if a rank could not tell.
        alive: ranks that still have data.
        empty: ranks that had no data at all.
    """

    samples: float
    alive: float
    empty: float

    @classmethod
    def over(cls, tallies: Iterable["StepTally"]) -> "StepTally":
        """The sums of some tallies."""
        return cls(*map(sum, zip(*tallies, strict=True)))


class StreamPeers:
    """The other ranks, which iterate over a stream at the same time, each over its own part.

    Args:
        job: with the view.
        timer: this rank's timer.
        length: batches of the longest stream of a rank; ``None``: nobody knows.
        number: of the stream, the same on every rank.

    Attributes:
        length: see above; also once that stream is lost, since the Trainer knows it.
    """

    def __init__(self, job: Job, timer: StepTimer, length: int | None, number: int) -> None:
        self._job, self._timer, self.length = job, timer, length
        self._compared = False
        self._ended = False  # this replica, in this pass
        self._lengthens = False  # whether epochs keep their length, although the longest stream may be lost
        self._results = NumberedResults()  # of the collectives of this replica
        self._progress: DataProgressTracker | None = None
        if job.view.count > 1 and length is None and job.view.is_leader:
            ids = [replica.id for replica in job.view.replicas]
            self._progress = DataProgressTracker(
                job.store(f"stream {number}"), ids, job.view.replica.id, job.timeout.total_seconds()
            )

    def for_survivors(self, former: "StreamPeers", kept: Sequence[int]) -> "StreamPeers":
        """Go on where others have stopped, of an earlier view, and return itself (collective over all ranks).

        One rank of a replica may have completed a collective that the others have not: they get its result.

        Args:
            former: of the earlier view.
            kept: of each rank that remains, its number before.
        """
        replica, results = self._job.view.replica.ranks, former._results
        everyone = gather(results.latest, "what ranks know of each other's streams")
        number, latest = max((everyone[rank] for rank in replica), key=lambda known: known[0])
        self._results.calls = results.calls
        if number >= 0:
            there = self._results.received if number >= results.calls else self._results.results
            there[number] = {rank: latest[kept[rank]] for rank in replica}
        self._compared, self._ended, self._lengthens = former._compared, former._ended, True
        if self._progress is not None and former._progress is not None:
            self._progress.continue_from(former._progress)
        return self

    def begin(self, number: int) -> None:
        """A pass over the data is about to begin, on all ranks; passes are counted from 1."""
        self._ended = False
        if self._progress is not None:
            self._progress.begin(number)

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

    def warn_of_unknown_size(self, problem: str) -> None:
        """Say once that a batch counts as many samples as that of every other rank, whatever it holds."""
        rank_zero_warn(
            f"The number of samples in a training batch is unknown: {problem}. Batches of all ranks count the same, as "
            "under ddp. Where they hold unequal numbers, say how much each weighs: define `batch_weight(batch)` on the "
            "LightningModule, or let all tensors have the batch as their first dimension."
        )

    def of_replica(self, tally: StepTally) -> dict[int, StepTally]:
        """The tally of each rank of this replica (collective over them)."""
        view = self._job.view
        ranks = view.replica.ranks

        def everyone() -> dict[int, StepTally]:
            rows = torch.zeros(len(ranks), len(tally), dtype=torch.float64)
            rows[ranks.index(view.rank)] = torch.tensor(tally, dtype=torch.float64)
            with self._timer.waiting(), deadline("exchange batch sizes"):
                if (group := self._job.small_group()) is not None:
                    dist.all_reduce(rows, group=group)
            return {rank: StepTally(*row) for rank, row in zip(ranks, rows.tolist(), strict=True)}

        return self._results.once(everyone)

    def of_all(self, tally: StepTally) -> StepTally:
        """The tallies of all ranks together (collective)."""
        with self._timer.waiting():
            return StepTally.over(gather(tally, "which ranks have data"))

    def another_batch(self, drawn: int, alive: bool) -> bool:
        """Whether all ranks run another batch in this pass, maybe a padding batch (collective over the replica).

        A replica that has no more data runs padding batches, but never more than the replica that has most. So an
        epoch has as many steps as the longest stream of a replica, and who has data never waits.

        Args:
            drawn: batches of this pass so far.
            alive: whether a rank of this replica has another one with data.
        """
        if self.length is not None and (self._lengthens or self._job.view.count > 1):
            return drawn < self.length
        if self._job.view.count == 1:
            return alive
        if alive or not self._ended:
            self._ended = not alive
            if self._progress is not None:
                self._progress.write(DataProgress(drawn + alive, self._ended))
        if alive:
            return True
        with self._timer.waiting():
            more = self._progress is not None and self._progress.beyond(drawn)
        return any(tally.samples for tally in self.of_replica(StepTally(float(more), 0.0, 0.0)).values())


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
