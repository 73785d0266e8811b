"""Retry of collectives after a rank was lost: among the ranks that remain, or with the results of those ahead."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from lightning_hetero.comm.failures import deadline, is_communication_error, wait_for_news

T = TypeVar("T")

_current_repeater: "CollectiveRetry | None" = None  # of the fit in which lost ranks are survived


def collective(what: str, operation: Callable[[], T]) -> T:
    """Run a collective over all ranks of the job.

    Args:
        what: completes "rank 1 of 4 could not ...".
        operation: takes no arguments, has the same result on every rank, and may be called again: after a rank was
            lost there are fewer ranks, with other numbers.

    Raises:
        CommunicationError: another rank did not take part in time, or has ended, and that ends the fit.
    """
    if _current_repeater is not None:
        return _current_repeater.run(what, operation)
    with deadline(what):
        return operation()


def set_repeater(repeater: "CollectiveRetry | None") -> None:
    """From now on let an object repeat what breaks; ``None``: nothing is repeated."""
    global _current_repeater
    _current_repeater = repeater
    wait_for_news(repeater is None)


class NumberedResults:
    """Results of the latest collectives of some ranks, for those who have missed one.

    These ranks run the same collectives in the same order, so a collective is known by its number. A rank can be one
    ahead: an all-reduce may succeed on one rank and fail on another. What the latest ones have returned is kept, so
    that those who missed it get it from those who have it.

    Attributes:
        calls: collectives completed.
        results: of the latest collectives, by their numbers, for ranks that have missed them.
        received: results that others have completed, by their numbers.
    """

    #: Results that are kept. A rank cannot be further ahead than broadcasts run ahead of who receives them.
    KEPT = 32

    def __init__(self) -> None:
        self.calls = 0
        self.results: dict[int, Any] = {}
        self.received: dict[int, Any] = {}

    @property
    def latest(self) -> tuple[int, Any]:
        """The latest result that is known here, after its number; -1: there is none yet."""
        return max({**self.results, **self.received}.items(), key=lambda known: known[0], default=(-1, None))

    def once(self, operation: Callable[[], T]) -> T:
        """The result of the next collective: what was received of it, or that of an operation, if it succeeds."""
        result = self.received.pop(self.calls) if self.calls in self.received else operation()
        self.results[self.calls] = result
        self.results.pop(self.calls - self.KEPT, None)
        self.calls += 1
        return result


class CollectiveRetry(NumberedResults):
    """Retry of collectives over all ranks, among the ranks that remain.

    Args:
        recover: joins the ranks that remain (collective over them), given when what has broken began; raises an error
            if this rank must end.
    """

    def __init__(self, recover: Callable[[float], Any]) -> None:
        super().__init__()
        self.recover = recover
        self._plain = 0  # depth of blocks in which nothing is repeated

    @contextmanager
    def plain(self) -> Iterator[None]:
        """In this block collectives that break are not repeated one by one: the whole block is, as a training step."""
        self._plain += 1
        try:
            yield
        finally:
            self._plain -= 1

    def run(self, what: str, operation: Callable[[], T]) -> T:
        """The result of a collective over all ranks, or over those that remain; see :func:`collective`."""
        if self._plain:
            with deadline(what):
                return operation()
        while True:
            began = time.monotonic()
            try:
                with self.plain(), deadline(what):
                    return self.once(operation)
            except RuntimeError as error:
                if not is_communication_error(error):
                    raise
                self.recover(began)
