"""Work for a thread in the background, while the training goes on."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Runs a function on a thread of its own.

    The thread dies with the process: a network that no longer answers does not keep a failed rank from ending.

    Args:
        function: takes no arguments; must not write what others read meanwhile.

    Attributes:
        seconds: how long the function took, once it has ended.
        waited: of these, seconds for which :meth:`result` has had to wait.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._value: T
        self._error: BaseException | None = None
        self.seconds = self.waited = 0.0
        self._thread = threading.Thread(target=self._run, name="hetero-exchange", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error
        self.seconds = time.perf_counter() - began

    def result(self, seconds: float | None = None) -> T:
        """Wait for the function to end; its value, or the error that it raised.

        Args:
            seconds: longest wait; default: none.

        Raises:
            TimeoutError: the function goes on for longer than that.
        """
        began = time.perf_counter()
        self._thread.join(seconds)
        self.waited += time.perf_counter() - began
        if self._thread.is_alive():
            raise TimeoutError(f"no result within {seconds:g} s")
        if self._error is not None:
            raise self._error
        return self._value
