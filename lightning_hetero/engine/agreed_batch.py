"""Ranks agree on a batch after which all do something: save, stop, let others join."""

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median_low
from typing import NamedTuple

import torch.distributed as dist

from lightning_hetero.comm import failures
from lightning_hetero.comm.leaving import THREADS, close_at_exit
from lightning_hetero.errors import CommunicationError

_POLL = 0.25  # seconds between two looks at the store


class Ask(NamedTuple):
    """That a rank wants all to do something.

    Attributes:
        what: completes "could not agree on a step ...".
        notice: seconds until then, at least. If all answers are there by then, nobody waits for them. Without any
            notice all do it as soon as possible, and wait for each other.
    """

    what: str
    notice: float


class AgreedBatch:
    """Tells all ranks to do something after the same batch, once any of them asks for it.

    It asks through the job's key-value store, and a thread of each rank answers with the batch beyond which its rank
    will not go before it knows all answers. The latest of these batches is the one.

    Args:
        store: of the job, with keys of its own.
        asks: what this rank asks for, if anything; called again and again, on a thread.
        limit: longest wait for the other ranks' answers, seconds.
        done: batches that this rank has done, counted alike on all ranks.
        patience: gives the seconds for which ranks go on without an answer that does not come. Where they need not
            meet otherwise, a rank that is lost is known by then, and nobody has waited for it.
        changing: where lost ranks are survived: whether the ranks are about to agree on who remains. Those begin anew.
    """

    def __init__(
        self,
        store: dist.Store,
        asks: Callable[[], Ask | None],
        limit: float,
        done: int = 0,
        patience: Callable[[], float] = lambda: 0.0,
        changing: Callable[[], bool] | None = None,
    ) -> None:
        self._store, self._asks, self._limit, self._patience, self._changing = store, asks, limit, patience, changing
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._lock, self._closed, self._known = threading.Lock(), threading.Event(), threading.Event()
        self._done, self._round = done, 0  # the latest batch, and how often ranks have agreed
        self._silent: list[int] = []  # ranks that have not answered yet
        self._ended: float | None = None  # when the latest batch was done
        self._took = deque[float](maxlen=5)  # seconds of the latest batches; some of them are longer, as who saves is
        self._arm()
        self._thread = threading.Thread(target=self._listen, daemon=True, name=f"{THREADS}agreed-batch")
        self._thread.start()
        close_at_exit(self)

    def _arm(self) -> None:
        self._at: int | None = None  # the batch that all have agreed on
        self._bound: int | None = None  # how far this rank may go before it knows
        self._asked = Ask("", 0.0)
        self._known.clear()

    @property
    def asked(self) -> bool:
        """Whether this rank knows that one asks, and has answered."""
        return self._bound is not None

    def batch_ended(self, batch: int) -> bool:
        """Whether it is time, which stays so until :meth:`again`.

        Args:
            batch: the one that has ended.

        Raises:
            CommunicationError: the other ranks do not answer.
        """
        now = time.monotonic()
        with self._lock:
            if self._ended is not None:
                self._took.append(now - self._ended)
            self._done, self._ended = batch, now
            wait = self._bound is not None and self._done >= self._bound
        if wait:
            self._wait()
        return self._at is not None and self._done >= self._at

    def again(self) -> None:
        """It has been done, and ranks may ask for it again."""
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
                key = f"{self._round}/asked"
                if (own := self._asks()) is not None:
                    self._store.set(key, json.dumps(own))
                if self._store.check([key]):
                    self._agree(Ask(*json.loads(self._store.get(key))))
        except RuntimeError:  # the store has gone, and the job with it
            self._known.set()

    def _agree(self, asked: Ask) -> None:
        notice = max(asked.notice, self._patience())
        with self._lock:
            ahead = math.ceil(notice / max(median_low(self._took), 1e-4)) if self._took else 0
            self._bound, self._asked = self._done + 1 + ahead, asked
        keys = {rank: f"{self._round}/{rank}" for rank in range(self._world)}
        self._store.set(keys[self._rank], str(self._bound))
        silent = list(keys)
        while silent := [rank for rank in silent if not self._store.check([keys[rank]])]:
            self._silent = silent
            if self._closed.wait(0.05):
                return
        with self._lock:  # `again` must not come between
            self._at = max(int(self._store.get(key)) for key in keys.values())
            self._known.set()

    def _wait(self) -> None:
        """Wait for all answers, unless the ranks that remain after a loss begin anew."""
        until = time.monotonic() + self._limit
        while (seconds := until - time.monotonic()) > 0:
            if self._known.wait(min(seconds, _POLL)):
                return
            if self._changing is not None and self._changing():
                return
            lost = failures.first(0.0)  # it will not answer any more, unless it has
            if lost is not None and not self._known.wait(2 * _POLL):
                if self._changing is not None:
                    return
                raise self._error(f"{lost}")
        ranks = f"rank(s) {', '.join(map(str, self._silent))}" if self._silent else "a rank"
        raise self._error(f"no answer from {ranks} within {self._limit:.0f} s")

    def _error(self, why: str) -> CommunicationError:
        me = f"rank {self._rank} of {self._world}"
        return CommunicationError(f"{me} could not agree with the others on a step {self._asked.what}: {why}.")
