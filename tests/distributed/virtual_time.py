"""Time that only tests move, so that measured speeds are exact on a busy machine, too."""

import time as real
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from lightning_hetero.batching.timer import StepTimer
from lightning_hetero.callbacks import emulation, monitor


class VirtualTime(ModuleType):
    """Stands for the module ``time``: only ``sleep`` moves this rank's clock, and it does so at once.

    Waiting for other ranks, communication and real computing take no time.
    """

    def __init__(self) -> None:
        super().__init__("time")
        self.now = 0.0
        self.thread_time, self.process_time = real.thread_time, real.process_time

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        return self.now


@contextmanager
def virtual_time(*modules: ModuleType) -> Iterator[VirtualTime]:
    """In this block, strategies, callbacks and ``modules``, which import ``time``, measure virtual time."""
    clock = VirtualTime()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepTimer.__init__, "__defaults__", (clock.perf_counter,))
        for module in (emulation, monitor, *modules):
            patch.setattr(module, "time", clock)
        yield clock
