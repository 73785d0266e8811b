"""What saves beside the training, for the ranks that there are now."""

import time

import torch.distributed as dist

from lightning_hetero.engine.agreed_batch import AgreedBatch, Ask
from lightning_hetero.strategies.apart import Apart
from lightning_hetero.strategies.background import BackgroundFiles
from lightning_hetero.strategies.base import HeteroStrategy
from lightning_hetero.strategies.noted import possible

_NOTICE = 1.0  # seconds within which all ranks have normally answered, also on a busy machine


class Beside:
    """Writes files, and knows when it is time; until the ranks of the job are others.

    Args:
        strategy: in a fit.
        fit: a number that all ranks give the fit.
        background: whether files are written while training goes on.
        seconds: from one checkpoint to the next; ``None``: it does not go by time.
        owed: why something could not be written for the ranks that there were before, for the next save to tell.
        since: when the latest checkpoint by time was made, or training has begun, by ``time.monotonic()``; ``None``:
            now.

    Attributes:
        since: when the latest checkpoint by time was made, or training has begun.
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
        since: float | None = None,
    ) -> None:
        assert strategy.job is not None
        self.job = strategy.job
        store, limit = self.job.store(f"checkpoints of fit {fit}"), strategy.options.limit.total_seconds()
        self.files = BackgroundFiles(strategy.checkpoint_io, store, limit, owed)
        apart = background and possible(strategy)
        self.apart = Apart(strategy, self.files, dist.PrefixStore("apart", store), limit) if apart else None
        self._seconds, self.since = seconds, time.monotonic() if since is None else since
        self._agreed: AgreedBatch | None = None
        if seconds is not None:
            survival, batch = strategy.survival, strategy.trainer.fit_loop.epoch_loop.total_batch_idx
            self._agreed = AgreedBatch(
                dist.PrefixStore("batch", store),
                self._asks,
                limit,
                batch,
                # Ranks in lockstep wait for a lost one anyway.
                patience=(lambda: 0.0) if strategy.engine.lockstep else (lambda: survival.patience),
                changing=None if survival.growth is None else (lambda: survival.changing),
            )

    def _asks(self) -> Ask | None:
        """The first rank's clock counts, since clocks differ."""
        due = self._seconds is not None and time.monotonic() >= self.since + self._seconds
        return Ask("to save at", _NOTICE) if due and self.job.view.rank == 0 else None

    def due(self, batch: int) -> bool:
        """Whether it is time, after a batch that all ranks count alike; it stays so until :meth:`done`."""
        return self._agreed is not None and self._agreed.batch_ended(batch)

    def done(self) -> None:
        """What was due is saved, or left out."""
        self.since = time.monotonic()
        if self._agreed is not None:
            self._agreed.again()

    def close(self) -> BaseException | None:
        """End what runs, on this rank.

        Returns:
            Why it could not write something of its own that nobody has heard of yet.
        """
        if self._agreed is not None:
            self._agreed.close()
            self._agreed = None
        self.files.complete()
        return self.files.owed()
