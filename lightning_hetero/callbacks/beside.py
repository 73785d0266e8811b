"""What saves beside the training, for the ranks that there are now."""

import torch.distributed as dist

from lightning_hetero.engine.agreed_batch import AgreedBatch
from lightning_hetero.strategies.apart import Apart
from lightning_hetero.strategies.background import BackgroundFiles
from lightning_hetero.strategies.base import HeteroStrategy
from lightning_hetero.strategies.noted import possible


class Beside:
    """Writes files, and knows when it is time; until the ranks of the job are others.

    Args:
        strategy: in a fit.
        fit: a number that all ranks give the fit.
        background: whether files are written while training goes on.
        seconds: from one checkpoint to the next; ``None``: it does not go by time.
        owed: why something could not be written for the ranks that there were before, for the next save to tell.

    Attributes:
        job: of these ranks.
        files: writes.
        apart: where ranks need not wait for each other to save, else ``None``.
    """

    def __init__(
        self,
        strategy: HeteroStrategy,
        fit: int,
        background: bool,
        seconds: float | None,
        owed: BaseException | None = None,
    ) -> None:
        assert strategy.job is not None
        self.job = strategy.job
        store, limit = self.job.store(f"checkpoints of fit {fit}"), strategy.options.limit.total_seconds()
        self.files = BackgroundFiles(strategy.checkpoint_io, store, limit, owed)
        apart = background and possible(strategy)
        self.apart = Apart(strategy, self.files, dist.PrefixStore("apart", store), limit) if apart else None
        # Ranks in lockstep wait for a lost one anyway.
        patience = (lambda: 0.0) if strategy.engine.lockstep else (lambda: strategy.survival.patience)
        batch = dist.PrefixStore("batch", store)
        self._clock = None if seconds is None else AgreedBatch(batch, seconds, limit, patience)

    def due(self, batch: int) -> bool:
        """Whether it is time, after a batch that all ranks count alike; it stays so until :meth:`done`."""
        return self._clock is not None and self._clock.batch_ended(batch)

    def done(self) -> None:
        """What was due is saved, or left out."""
        if self._clock is not None:
            self._clock.done()

    def close(self) -> BaseException | None:
        """End what runs, on this rank.

        Returns:
            Why it could not write something of its own that nobody has heard of yet.
        """
        if self._clock is not None:
            self._clock.close()
            self._clock = None
        self.files.complete()
        return self.files.owed()
