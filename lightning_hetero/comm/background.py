"""Runs work in a background thread while the training goes on."""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

_LATER = 15  # how nice a thread is that comes last: the kernel gives it a thirtieth of a contested core


def keeping_device(function: Callable[[], T]) -> Callable[[], T]:
    """A function for another thread, with the accelerator's device that is current here.

    A thread begins on the first device, and would take memory of it as soon as it asks for anything. A process that has
    not used its accelerator keeps away from it.
    """
    for name in ("cuda", "xpu", torch._C._get_privateuse1_backend_name()):
        module = getattr(torch, name, None)
        if module is not None and module.is_available() and module.is_initialized():
            device = module.current_device()

            def on_device(module: Any = module, device: Any = device) -> T:
                module.set_device(device)
                return function()

            return on_device
    return function


class Background(Generic[T]):
    """Runs a function in a thread of its own.

    The thread dies with the process, so a network that no longer answers does not keep a failed rank from ending.

    Args:
        function: takes no arguments, and must not write what others read meanwhile.

    Attributes:
        seconds: how long the function took, once it has ended.
        error: that has ended the function, if one has.
        waited: seconds for which :meth:`result` has waited for it.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = keeping_device(function)
        self._value: T
        self.error: BaseException | None = None
        self.seconds = self.waited = 0.0
        self._thread = threading.Thread(target=self._run, name="hetero-exchange", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            self._value = self._function()
        except BaseException as error:
            self.error = error
        del self._function  # and what it holds
        self.seconds = time.perf_counter() - began

    @property
    def running(self) -> bool:
        """Whether the function has not ended yet."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the function to end, with a value or an error."""
        self._thread.join()

    def result(self, seconds: float | None = None) -> T:
        """Wait for the function to end, and return its value or raise its error.

        Args:
            seconds: longest wait. Default: no limit.

        Raises:
            TimeoutError: the function has not ended by then.
        """
        began = time.perf_counter()
        self._thread.join(seconds)
        self.waited += time.perf_counter() - began
        if self._thread.is_alive():
            raise TimeoutError(f"no result within {seconds:g} s")
        if self.error is not None:
            raise self.error
        return self._value


def come_last() -> None:
    """From now on let other threads come before this one where there are not cores enough for all; on Linux."""
    if sys.platform == "linux":  # elsewhere it would count for the whole process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LATER)
