"""Points in time: as the host passes them, or as a device's stream of work passes them."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Points(Protocol):
    """Takes points in time, and tells the seconds between two of them."""

    def take(self) -> Any:
        """The point that is reached here: now, or when all work that has been given to the device is done."""

    def passed(self, point: Any) -> bool:
        """Whether it has been passed. Points are passed in the order in which they were taken."""

    def between(self, earlier: Any, later: Any) -> float:
        """Seconds between two points that have been passed."""


class HostPoints:
    """By the host's clock.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.take = clock

    def passed(self, point: float) -> bool:
        """Always: a point is taken when it is passed."""
        return True

    def between(self, earlier: float, later: float) -> float:
        """Seconds between two points."""
        return later - earlier


class StreamPoints:
    """By events in a device's current stream.

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


def points_of(device: torch.device, clock: Callable[[], float]) -> Points:
    """The points in time of work on a device: those of its stream, or the host's where it has none that can be timed.

    Args:
        device: where the model runs.
        clock: the host's; returns seconds.
    """
    if device.type == "cpu":
        return HostPoints(clock)
    stream = StreamPoints(device)
    try:
        first, second = stream.take(), stream.take()
        second.synchronize()
        stream.between(first, second)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):  # each kind of device has its own error
        return HostPoints(clock)
    return stream
