"""Step timer: the seconds of a rank's own work, without those in which it waits for others."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor


class HostTimestamps:
    """Timestamps of the host's clock, and the seconds between them.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.take = clock

    def passed(self, point: float) -> bool:
        """Always: a point is taken when it is passed."""
        return True

    def between(self, earlier: float, later: float) -> float:
        """Seconds between two points."""
        return later - earlier


class DeviceTimestamps:
    """Timestamps of a device's current stream: its events, which are passed in the order in which they were recorded.

    The host runs ahead of a device, until something waits for it: ``loss.item()``, or a progress bar. What the host
    then spends may be the wait for another rank, which a collective in the stream contains. Only the device knows.

    Args:
        device: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self) -> torch.Event:
        """An event, recorded here."""
        if self._device.type == "cuda":
            event: Any = torch.cuda.Event(enable_timing=True)
        else:
            event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def passed(self, point: torch.Event) -> bool:
        """Whether the device has done all that came before."""
        return point.query()

    def between(self, earlier: torch.Event, later: torch.Event) -> float:
        """Seconds between two events, by the device's own clock."""
        return earlier.elapsed_time(later) / 1e3


def timestamps_of(device: torch.device, clock: Callable[[], float]) -> HostTimestamps | DeviceTimestamps:
    """The points in time of work on a device: those of its stream, or the host's where it has none that can be timed.

    Args:
        device: where the model runs.
        clock: the host's; returns seconds.
    """
    if device.type == "cpu":
        return HostTimestamps(clock)
    stream = DeviceTimestamps(device)
    try:
        first, second = stream.take(), stream.take()
        second.synchronize()
        stream.between(first, second)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):  # each kind of device has its own error
        return HostTimestamps(clock)
    return stream


class StepTiming(NamedTuple):
    """Timing of one step of this rank.

    Attributes:
        samples: samples that it processed, a padding batch included.
        work: seconds of its own work: loading data, forward, backward, optimizer, callbacks.
        wait: seconds in which it could only wait for other ranks.
        data: of the work, seconds in which the next batch was fetched.
        exchange: of the wait, seconds that an exchange between replicas took from the training thread.
        began: when the step began, by the timer's clock.
        padding: whether the samples are only padding, because the rank had none of the batch.
        compiled: whether ``torch.compile`` was at work in the step, which says nothing of the steps to come.
        cost: of these samples, where a mean one costs 1; 0: nobody has said what they cost.
        passes: in which the rank has run them.
    """

    samples: float
    work: float
    wait: float
    data: float
    exchange: float
    began: float
    padding: bool = False
    compiled: bool = False
    cost: float = 0.0
    passes: int = 1

    def of_a_pass(self) -> "StepTiming":
        """The timing of a pass, the mean over those of the step."""
        samples, work, wait, cost = (x / self.passes for x in (*self[:3], self.cost))
        return self._replace(samples=samples, work=work, wait=wait, cost=cost, passes=1)


class Activity(Enum):
    """Activity of a rank at a time."""

    WORK, WAIT, EXCHANGE = range(3)


class StepTimer:
    """Timer of steps, which tells a rank's own work from waiting.

    At the end of a data-parallel backward pass every rank reads the same time, because all wait for the slowest. The
    work ends earlier: when the rank's last own gradient is ready.

    On a device with streams, such as a GPU, the device's own clock counts alone. Laps then come out a few steps late,
    when their events have passed. Fetching data is timed by the host, which does it.

    Args:
        device: where the model runs.
        clock: the host's, returns seconds; for tests.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._depth = self._graphs = 0
        self.move_to(device)

    @property
    def compiles(self) -> bool:
        """Whether ``torch.compile`` has captured graphs in this process by the end of the latest step."""
        return self._graphs > 0

    def move_to(self, device: torch.device) -> None:
        """Measure what runs on this device from here on, and forget all else."""
        self._points = timestamps_of(device, self._clock)
        self._pending: deque[tuple[StepTiming, list[tuple[Activity, Any]]]] = deque()
        self.restart()

    def restart(self) -> None:
        """Begin a step here: forget what has been measured of the running one."""
        self._begin((Activity.WORK, self._points.take()))

    def _begin(self, first: tuple[Activity, Any]) -> None:
        self._spans = [first]  # what the rank does from which point on
        self._data = self._waited = 0.0
        self._after_backward = False  # whether the running backward pass only waits any more
        self._loading: tuple[float, float] | None = None  # when fetching began, and what had been waited until then
        self._began = self._since = self._clock()

    @contextmanager
    def waiting(self, exchange: bool = False) -> Iterator[None]:
        """Time in this block is waiting for others, or goes to an ``exchange`` between replicas."""
        before = self._doing
        if self._depth == 0:
            self._turn_to(Activity.EXCHANGE if exchange else Activity.WAIT)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._turn_to(before)

    @contextmanager
    def in_other_stream(self) -> Iterator[None]:
        """A block in which waiting happens in another CUDA stream, beside the work that is measured."""
        self._depth += 1  # blocks of `waiting` within take no timestamps
        try:
            yield
        finally:
            self._depth -= 1

    @property
    def is_waiting(self) -> bool:
        """Whether a block of :meth:`waiting` is open."""
        return self._depth > 0

    @property
    def waited(self) -> float:
        """Seconds of the host that the running step has waited so far, without a wait that goes on."""
        return self._waited

    def works(self) -> bool:
        """Whether this rank does work of its own right now; may be asked on another thread."""
        return self._doing is Activity.WORK

    def fetching(self) -> None:
        """The next batch is being fetched from here on: this rank's own work, except for what it waits meanwhile."""
        self._loading = self._clock(), self._waited

    def fetched(self) -> None:
        """The next batch is here."""
        if self._loading is not None:  # or the step has been restarted meanwhile
            began, waited = self._loading
            self._data += self._clock() - began - (self._waited - waited)
            self._loading = None

    def watch(self, loss: Tensor) -> None:
        """Note when the backward pass of ``loss`` has done all of this rank's own work."""
        if loss.requires_grad:
            after_own_backward(loss, self._own_work_done)

    def backward_done(self) -> None:
        """The backward pass has returned: all since the own work was done was waiting."""
        if self._after_backward:
            self._after_backward = False
            self._turn_to(Activity.WORK)

    def end_step(self, samples: int, padding: bool = False, cost: float = 0.0, passes: int = 1) -> list[StepTiming]:
        """End a step of ``samples`` samples here and begin the next.

        Args:
            samples: that the rank processed.
            padding: whether they count for nothing.
            cost: of these samples; 0 if nobody has said.
            passes: in which the rank has run them.

        Returns:
            The timings known by now, oldest first.
        """
        self._turn_to(Activity.WORK)
        before, self._graphs = self._graphs, compiled_graphs()
        compiled = self._graphs > before
        timing = StepTiming(samples, 0.0, 0.0, self._data, 0.0, self._began, padding, compiled, cost, passes)
        self._pending.append((timing, self._spans))
        self._begin(self._spans[-1])
        known = []
        while self._pending and self._points.passed(self._pending[0][1][-1][1]):
            known.append(self._timed(*self._pending.popleft()))
        return known

    def _timed(self, timing: StepTiming, spans: list[tuple[Activity, Any]]) -> StepTiming:
        seconds = dict.fromkeys(Activity, 0.0)
        for (doing, start), (_, end) in pairwise(spans):
            seconds[doing] += self._points.between(start, end)
        work, exchange = seconds[Activity.WORK], seconds[Activity.EXCHANGE]
        return timing._replace(
            work=work, wait=seconds[Activity.WAIT] + exchange, exchange=exchange, data=min(timing.data, work)
        )

    @property
    def _doing(self) -> Activity:
        return self._spans[-1][0]

    def _turn_to(self, doing: Activity) -> None:
        now = self._clock()
        if self._doing is not Activity.WORK:
            self._waited += now - self._since
        self._since = now
        self._spans.append((doing, self._points.take()))

    def _own_work_done(self) -> None:
        if self._doing is Activity.WORK:
            self._turn_to(Activity.WAIT)
            self._after_backward = True


def compiled_graphs() -> int:
    """Number of graphs that ``torch.compile`` has captured in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # of which only those know who compile
    return 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]


def after_own_backward(loss: Tensor, callback: Callable[[], None]) -> None:
    """Call a function when the backward pass of a loss has done this rank's own work, before it waits for others.

    Autograd runs callbacks that a pass has queued once all gradients are ready, in order. This one is queued when the
    pass begins, and so comes before that in which DDP waits.
    """
    loss.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(callback))
