"""A stopwatch for a rank's own work, which stands still while the rank waits for others."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class Lap(NamedTuple):
    """One step of this rank.

    Attributes:
        samples: samples that it processed, a padding batch included.
        work: seconds of its own work: loading data, forward, backward, optimizer, callbacks.
        wait: seconds in which it could only wait for other ranks.
        data: of the work, seconds in which the next batch was fetched.
        exchange: of the wait, seconds that an exchange between replicas took from the training thread.
        began: when the step began, by the timer's clock.
        padding: whether the samples are only padding, because the rank had none of the batch.
    """

    samples: int
    work: float
    wait: float
    data: float
    exchange: float
    began: float
    padding: bool = False


class StepTimer:
    """Tells a rank's own work from waiting.

    At the end of a data-parallel backward pass every rank reads the same time, because all wait for the slowest. The
    work ends earlier: when the rank's last own gradient is ready.

    On CUDA the host runs ahead of the device, so each span of work is also bracketed by events; the work of a step is
    the greater of both clocks' sums. Such laps come out a few steps late, when their events have passed.

    Args:
        device: where the model runs.
        clock: returns seconds; for tests.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._depth = 0
        self._ready: float | None  # when the own work of the running backward pass was done
        self.move_to(device)

    def move_to(self, device: torch.device) -> None:
        """Measure what runs on this device from here on, and forget all else."""
        self._cuda = device.type == "cuda"
        self._pending: deque[tuple[Lap, list[tuple[torch.cuda.Event, torch.cuda.Event]]]] = deque()
        self.restart()

    def restart(self) -> None:
        """Begin a step here: forget what has been measured of the running one."""
        self._work = self._wait = self._data = self._exchange = 0.0
        self._ready = None
        self._loading: tuple[float, float] | None = None  # when fetching began, and what had been waited until then
        self._spans = []
        self._resume()
        self._began = self._since

    @contextmanager
    def waiting(self, exchange: bool = False) -> Iterator[None]:
        """Time in this block is waiting for others, or goes to an ``exchange`` between replicas."""
        if self._depth == 0:
            self._pause()
        self._depth += 1
        began = self._clock()
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                seconds = self._clock() - began
                self._wait += seconds
                self._exchange += seconds if exchange else 0.0
                self._resume()

    @property
    def waited(self) -> float:
        """Seconds that the running step has waited so far, but for a backward pass that has not returned."""
        return self._wait

    def fetching(self) -> None:
        """The next batch is being fetched from here on: this rank's own work, but for what it waits meanwhile."""
        self._loading = self._clock(), self._wait

    def fetched(self) -> None:
        """The next batch is here."""
        if self._loading is not None:  # or the step has been restarted meanwhile
            began, waited = self._loading
            self._data += self._clock() - began - (self._wait - waited)
            self._loading = None

    def watch(self, loss: Tensor) -> None:
        """Note when the backward pass of ``loss`` has done all of this rank's own work."""
        if loss.requires_grad:
            after_own_backward(loss, self._own_work_done)

    def backward_done(self) -> None:
        """The backward pass has returned: all since the own work was done was waiting."""
        if self._ready is not None:
            self._wait += self._clock() - self._ready
            self._ready = None
            self._resume()

    def lap(self, samples: int, padding: bool = False) -> list[Lap]:
        """End a step of ``samples`` samples here and begin the next.

        Args:
            samples: that the rank processed.
            padding: whether they count for nothing.

        Returns:
            The laps known by now, oldest first.
        """
        self._pause()
        self._pending.append(
            (Lap(samples, self._work, self._wait, self._data, self._exchange, self._began, padding), self._spans)
        )
        self.restart()
        known = []
        while self._pending and all(end.query() for _, end in self._pending[0][1]):
            lap, spans = self._pending.popleft()
            on_device = sum(start.elapsed_time(end) for start, end in spans) / 1e3
            known.append(lap._replace(work=max(lap.work, on_device)))
        return known

    def _own_work_done(self) -> None:
        if self._ready is None and self._depth == 0:
            self._pause()
            self._ready = self._clock()

    def _pause(self) -> None:
        self._work += self._clock() - self._since
        if self._cuda:
            self._spans.append((self._event, self._record()))

    def _resume(self) -> None:
        self._since = self._clock()
        if self._cuda:
            self._event = self._record()

    @staticmethod
    def _record() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def after_own_backward(loss: Tensor, callback: Callable[[], None]) -> None:
    """Call a function when the backward pass of a loss has done this rank's own work, before it waits for others.

    Autograd runs callbacks that a pass has queued once all gradients are ready, in order. This one is queued when the
    pass begins, and so comes before that in which DDP waits.
    """
    loss.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(callback))
