"""Makes a backward pass last as long as that of a slower device."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median
from typing import Any

from torch import Tensor

from lightning_hetero.workload.timer import after_own_backward


class StretchedBackward:
    """Sleeps within backward passes, so that each gradient is ready as late as a slower device would have it.

    When in a pass a gradient is ready is learned from the pass before, in CPU time, which does not depend on what else
    the machine does. So gradients that travel during a backward pass find the time there that they would have.

    Args:
        clock: in seconds; it stands still while the rank waits for others, as for gradients of gathered samples.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._real: deque[float] = deque(maxlen=5)  # seconds of passes without sleeps; the first is out of line
        self._course: dict[int, float] = {}  # for each gradient, what part of the last pass had been done
        self._hooks: list[Any] = []
        self._began = self._cpu = self._slept = self._seconds = 0.0
        self._seen: dict[int, float] = {}

    @property
    def real(self) -> float:
        """Seconds that a real backward pass takes; 0 before the first."""
        return median(self._real) if self._real else 0.0

    @property
    def known(self) -> bool:
        """Whether there has been a pass to learn from."""
        return bool(self._course)

    def stretch(self, loss: Tensor, parameters: Iterable[Tensor], seconds: float) -> None:
        """Let the backward pass of ``loss``, which is about to begin, take so many seconds.

        Args:
            loss: of any shape.
            parameters: with gradients that are to be late.
            seconds: for the pass; it takes as long as it really does if that is longer, or if it is the first.
        """
        self._remove_hooks()  # of a pass that has failed
        if not loss.requires_grad:
            return
        learned = [p for p in parameters if p.requires_grad]
        # Hooks on parameters run before DDP hears of the gradient.
        self._hooks = [p.register_hook(partial(self._gradient_ready, i)) for i, p in enumerate(learned)]
        after_own_backward(loss, self._done)
        self._seen, self._slept, self._seconds = {}, 0.0, seconds if self.known else 0.0
        self._began, self._cpu = self._clock(), time.thread_time()

    def _gradient_ready(self, index: int, _: Tensor) -> None:
        self._seen[index] = time.thread_time() - self._cpu
        self._sleep_until(self._course.get(index, 0.0))

    def _done(self) -> None:
        self._sleep_until(1.0)
        cpu = max(time.thread_time() - self._cpu, 1e-9)
        self._course = {index: min(seconds / cpu, 1.0) for index, seconds in self._seen.items()}
        self._real.append(self._clock() - self._began - self._slept)
        self._remove_hooks()

    def _sleep_until(self, part: float) -> None:
        """Sleep until so much of the pass would be done."""
        now = self._clock()
        pause = self._began + part * self._seconds - now
        if pause > 0:
            time.sleep(pause)
            self._slept += self._clock() - now

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
