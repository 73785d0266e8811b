"""Emulation of devices of unequal speed on one machine."""

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from typing_extensions import override

from lightning_hetero.batching.passes import batches_of
from lightning_hetero.batching.shares import Cost, row_of
from lightning_hetero.batching.timer import after_own_backward
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.strategies.base import HeteroStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl

#: What a device is said to take: ``(a, k)``, a cost, or a function that gives the seconds of so many samples.
Device = tuple[float, float] | Cost | Callable[[int], float]


class EmulatedSpeed(Callback):
    """Emulation: makes each rank as slow as a device that needs ``a + k * n`` or other seconds for ``n`` samples.

    A rank sleeps, so that forward and backward together take that long: a third of it in the forward pass, two thirds
    in the backward pass, where each gradient is ready as late as it would be on such a device. So gradients that
    travel during the backward pass find the time that they would have. (The very first batch is an exception: all its
    sleep comes before the backward pass.) A sleep uses no core, so a few cores emulate many devices, as long as their
    real work fits in. Only training is slowed down; the optimizer, data loading and communication take the time they
    really take. For ranks on CPUs: the queue of a GPU is not waited for. Works with every strategy, Lightning's too.

    Args:
        costs: ``(a, k)`` of each rank, in seconds and seconds per sample, or a
            :class:`~lightning_hetero.batching.shares.Cost`; ``(0, 0)`` leaves a rank as fast as it is. For a device
            that is no straight line, give a function that takes the number of samples and returns seconds. Define it at
            the top of a module, so that it can be sent to other processes.
        change_at: other costs from a batch on, counted from 0 over all epochs: a device that slows down, say.

    Raises:
        ConfigurationError: a cost is negative or not finite, or there is not one per rank. What a function returns is
            checked when it is called, in training.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import EmulatedSpeed

        slow = EmulatedSpeed([(0.01, 0.002), (0.01, 0.008)])  # the second rank takes four times as long for a sample
        trainer = Trainer(strategy="hetero_ddp", accelerator="cpu", devices=2, callbacks=[slow])


        def flat_until_full(samples: int) -> float:  # as a GPU: up to 16 samples take as long as one
            return 0.064 + 0.004 * max(0, samples - 16)


        slow = EmulatedSpeed([flat_until_full, (0.01, 0.002)])
    """

    #: So many batches in a row must overrun before that is no mere hiccup.
    OVERRUNS = 5
    #: The backward pass computes two gradients, of weights and of inputs, where the forward pass computes one output.
    BACKWARD = 2 / 3

    def __init__(
        self,
        costs: Sequence[Device],
        change_at: Mapping[int, Sequence[Device]] | None = None,
    ) -> None:
        schedule = {0: costs, **(change_at or {})}
        for row in schedule.values():
            if len(row) == 0 or not all(
                callable(cost) or isinstance(cost, Cost) or (hasattr(cost, "__len__") and len(cost) == 2)
                for cost in row
            ):
                raise ConfigurationError(
                    f"costs={row!r}: give the (a, k) of each rank: seconds per batch, and per sample."
                )
        self._costs = {
            batch: [cost if callable(cost) else Cost(*cost) for cost in row] for batch, row in schedule.items()
        }
        for batch, found in self._costs.items():
            lines = [cost for cost in found if isinstance(cost, Cost)]
            if not all(0 <= x < math.inf for cost in lines for x in row_of(cost)):
                raise ConfigurationError(f"costs from batch {batch} on: {found}: seconds are finite and at least 0.")
            if len(found) != len(costs):
                raise ConfigurationError(
                    f"{len(found)} costs from batch {batch} on, {len(costs)} before: one per rank."
                )
        self._strategy: Any = None  # of the running Trainer
        self._backward = StretchedBackward(self._clock)
        self._began: float | None = None  # the running batch, until its backward pass
        self._samples = 0
        self._overruns, self._warned = 0, False

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """See that there is one cost per rank."""
        self._strategy = trainer.strategy
        if len(self._costs[0]) != trainer.world_size:
            raise ConfigurationError(
                f"EmulatedSpeed has {len(self._costs[0])} costs for {trainer.world_size} ranks: give one each."
            )

    @override
    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        self._strategy = None

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """The emulated device starts here."""
        self._passes = [extract_batch_size(one) for one in batches_of(batch)]
        self._samples = sum(self._passes)
        self._began = self._clock()

    @override
    def on_before_backward(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", loss: Tensor) -> None:
        """Sleep for as long as the emulated device would still compute when the real one is done."""
        strategy = self._strategy
        if self._began is None or (isinstance(strategy, HeteroStrategy) and strategy.accounting.idle):
            return  # another backward pass of a batch that has been slowed down already, or nothing is computed
        batch = trainer.fit_loop.epoch_loop.total_batch_idx
        cost = self._costs[max(start for start in self._costs if start <= batch)][trainer.global_rank]
        forward = self._clock() - self._began
        seconds, real = self._seconds(cost, trainer.global_rank), forward + self._backward.real
        backward = max(self.BACKWARD * seconds, self._backward.real) if self._backward.known else 0.0
        pause = seconds - backward - forward
        if pause > 0:
            time.sleep(pause)
        self._check(seconds, real, trainer.global_rank)
        self._began = None
        self._backward.stretch(loss, pl_module.parameters(), min(backward, seconds - forward))

    def _clock(self) -> float:
        """In seconds; it stands still while the step does no work, such as waiting for an exchange."""
        strategy = self._strategy
        waited = strategy.accounting.timer.waited if isinstance(strategy, HeteroStrategy) else 0.0
        return time.perf_counter() - waited

    def _seconds(self, cost: Cost | Callable[[int], float], rank: int) -> float:
        if isinstance(cost, Cost):
            return sum(cost.seconds(samples) for samples in self._passes)
        seconds = sum(cost(samples) for samples in self._passes)
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ConfigurationError(
                f"costs[{rank}] gives {seconds!r} for {self._samples} samples: seconds are finite and at least 0."
            )
        return seconds

    def _check(self, seconds: float, real: float, rank: int) -> None:
        self._overruns = self._overruns + 1 if 0 < seconds < real else 0
        if self._overruns == self.OVERRUNS and not self._warned:
            self._warned = True
            warnings.warn(
                f"EmulatedSpeed on rank {rank}: {self._samples} samples really take {1e3 * real:.1f} ms, more than the "
                f"emulated {1e3 * seconds:.1f} ms. Emulate slower devices, or run fewer ranks per core.",
                stacklevel=2,
            )


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
