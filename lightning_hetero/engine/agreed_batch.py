"""Ranks agree on a batch after which all do something, at times that rank 0's clock gives."""

import math
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from lightning_hetero.comm import failures
from lightning_hetero.comm.leaving import THREADS, close_at_exit
from lightning_hetero.errors import CommunicationError

_POLL = 0.25  # seconds between two looks at the store
_NOTICE = 4 * _POLL  # within which all ranks have normally answered


class AgreedBatch:
    """Every so many seconds, tells all ranks to do something after the same batch; nobody waits for it.

    Clocks differ, so rank 0's counts. It asks through the job's key-value store, and a thread of each rank answers with
    the batch beyond which its rank will not go before it knows all answers: one far enough ahead that they are there
    by then. The latest of these batches is the one.

    Args:
        store: of the job, with keys of its own.
        seconds: from one time to the next.
        limit: longest wait for the other ranks' answers, seconds.
        patience: gives the seconds for which ranks go on without an answer that does not come. Where they need not
            meet otherwise, a rank that is lost is known by then, and nobody has waited for it.
    """

    def __init__(
        self, store: dist.Store, seconds: float, limit: float, patience: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._store, self._seconds, self._limit, self._patience = store, seconds, limit, patience
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._lock, self._closed, self._known = threading.Lock(), threading.Event(), threading.Event()
        self._done = self._round = 0  # the latest batch, and how often ranks have agreed
        self._silent: list[int] = []  # ranks that have not answered yet
        self._began = time.monotonic()
        self._pace = math.inf  # seconds that a batch takes
        self._arm()
        self._thread = threading.Thread(target=self._listen, daemon=True, name=f"{THREADS}agreed-batch")
        self._thread.start()
        close_at_exit(self)

    def _arm(self) -> None:
        self._at: int | None = None  # the batch that all have agreed on
        self._bound: int | None = None  # how far this rank may go before it knows
        self._due = time.monotonic() + self._seconds
        self._known.clear()

    def batch_ended(self, batch: int) -> bool:
        """Whether it is time, which stays so until :meth:`done`.

        Args:
            batch: the one that has ended, counted alike on all ranks.

        Raises:
            CommunicationError: the other ranks do not answer.
        """
        now = time.monotonic()
        with self._lock:
            self._done = batch
            self._pace, self._began = min(now - self._began, 2 * self._pace), now
            wait = self._bound is not None and self._done >= self._bound
        if wait:
            self._wait()
        return self._at is not None and self._done >= self._at

    def done(self) -> None:
        """It has been done; the time begins anew."""
        with self._lock:
            self._round += 1
            self._arm()

    def close(self) -> None:
        """End the thread; idempotent."""
        self._closed.set()
        self._thread.join(2.0)  # a thread within the store would break the process's end off

    def _listen(self) -> None:
        try:
            while not self._closed.wait(_POLL):
                if self._at is not None:
                    continue
                asked = f"{self._round}/asked"
                if self._rank == 0 and time.monotonic() >= self._due:
                    self._store.set(asked, "1")
                if self._store.check([asked]):
                    self._agree()
        except RuntimeError:  # the store has gone, and the job with it
            self._known.set()

    def _agree(self) -> None:
        notice = max(_NOTICE, self._patience())
        with self._lock:
            ahead = 0 if math.isinf(self._pace) else math.ceil(notice / max(self._pace, 1e-4))
            self._bound = self._done + 1 + ahead
        keys = {rank: f"{self._round}/{rank}" for rank in range(self._world)}
        self._store.set(keys[self._rank], str(self._bound))
        silent = list(keys)
        while silent := [rank for rank in silent if not self._store.check([keys[rank]])]:
            self._silent = silent
            if self._closed.wait(0.05):
                return
        with self._lock:  # `done` must not come between
            self._at = max(int(self._store.get(key)) for key in keys.values())
            self._known.set()

    def _wait(self) -> None:
        until, lost = time.monotonic() + self._limit, None
        while lost is None and (seconds := until - time.monotonic()) > 0:
            if self._known.wait(min(seconds, _POLL)):
                return
            lost = failures.first(0.0)  # it will not answer any more
        if lost is not None:
            self._known.wait(2 * _POLL)  # unless it has answered; whether the fit can go on is for others to say
            return
        raise CommunicationError(
            f"rank {self._rank} of {self._world} could not agree with the others on a step to save at: no answer from "
            f"rank(s) {self._silent} within {self._limit:.0f} s."
        )
