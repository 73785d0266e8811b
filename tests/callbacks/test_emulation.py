"""EmulatedSpeed: a step takes the time of the emulated device, under any strategy, and uses no CPU time for it."""

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import run
from tasks import EvaluatedNet, GanLike, Net, dataset, train
from torch.utils.data import DataLoader
from virtual_time import virtual_time

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.batching.shares import Cost
from lightning_hetero.callbacks.emulation import EmulatedSpeed, StretchedBackward
from lightning_hetero.callbacks.monitor import HeteroMonitor
from lightning_hetero.errors import ConfigurationError


class Clock(pl.Callback):
    """Seconds from a batch's start to the end of its backward pass, and of this process's CPU in it."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.ends: list[float] = []
        self.cpu: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._began, self._cpu = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())
        self.steps.append(self.ends[-1] - self._began)
        self.cpu.append(time.process_time() - self._cpu)


def _fit(emulated: EmulatedSpeed, module: pl.LightningModule | None = None, **options: Any) -> Clock:
    clock, data = Clock(), DataLoader(dataset(120), batch_size=10)
    train(module or Net(), "auto", data, callbacks=[clock, emulated], **{"devices": 1, **options})
    return clock


@pytest.mark.clock
@pytest.mark.parametrize("module", [Net, GanLike], ids=lambda module: module.__name__)
def test_a_step_takes_as_long_as_the_emulated_device(module: type[pl.LightningModule]) -> None:
    clock = _fit(EmulatedSpeed([(0.1, 0.01)]), module())  # the second backward pass of a step is not slowed again
    spent = median(clock.cpu)  # outside of the emulation, such as in the optimizer: more on a busy machine
    assert 0.19 < median(clock.steps) < 0.21 + 2 * spent
    assert spent < 0.5 * 0.2


class Waits(torch.autograd.Function):
    """Waits for others in the backward pass, as the gradients of gathered samples do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wait: Callable[[], None]) -> torch.Tensor:
        ctx.wait = wait
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.wait()
        return gradient, None


def test_a_device_that_waits_in_its_backward_pass_still_has_its_own_work_to_do() -> None:
    weight, waited = torch.ones(3, requires_grad=True), [0.0]
    with virtual_time() as clock:

        def wait() -> None:
            clock.now += 5.0
            waited[0] += 5.0

        backward = StretchedBackward(lambda: clock.now - waited[0])
        for seconds in (0.0, 2.0):  # it learns from the first pass
            began = clock.now
            loss = Waits.apply(weight, wait).sum()
            backward.stretch(loss, [weight], seconds)
            loss.backward()
            assert clock.now - began == pytest.approx(5.0 + seconds)
    assert backward.real == 0.0


def test_validation_is_not_slowed() -> None:
    module = EvaluatedNet()
    data = DataLoader(dataset(10), batch_size=10), DataLoader(dataset(40), batch_size=10)
    with virtual_time() as clock:
        train(module, "auto", *data, callbacks=[EmulatedSpeed([(1.0, 0.0)])], devices=1)
    assert clock.now == 1.0
    assert len(module.evaluated) >= 40


def test_warns_once_if_the_real_work_takes_longer() -> None:
    with pytest.warns(
        UserWarning, match=r"rank 0: 10 samples really take .* ms, more than the emulated 0\.0 ms"
    ) as seen:
        _fit(EmulatedSpeed([(1e-9, 0.0)]))
    assert sum("EmulatedSpeed" in str(warning.message) for warning in seen) == 1


def test_zero_cost_leaves_a_rank_alone() -> None:
    with virtual_time() as clock:
        _fit(EmulatedSpeed([(0.0, 0.0)]))
    assert clock.now == 0.0


@pytest.mark.parametrize(
    ("costs", "change_at", "message"),
    [
        ([], None, r"costs=\[\]: give the"),
        ("fast", None, "costs='fast': give the"),
        ([(0.1, 0.0)], {5: [(0.1,)]}, r"costs=\[\(0\.1,\)\]: give the"),
        ([(-0.1, 0.0)], None, "batch 0 on.*at least 0"),
        ([(0.1, float("nan"))], None, "finite"),
        ([(0.1, 0.0)], {5: [(0.1, float("inf"))]}, "batch 5 on"),
        ([(0.1, 0.0)], {5: [(0.1, 0.0), (0.1, 0.0)]}, "2 costs from batch 5 on, 1 before"),
    ],
)
def test_impossible_costs_are_refused(costs: Any, change_at: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        EmulatedSpeed(costs, change_at)


def _staircase(samples: int) -> float:
    return 0.02 * -(-samples // 8)


def test_costs_are_any_function_of_the_number_of_samples_and_change_at_a_batch() -> None:
    with virtual_time(sys.modules[__name__]):
        emulated = EmulatedSpeed([_staircase], change_at={4: [(0.06, 0.0)], 8: [(0.02, 0.001)]})
        steps = _fit(emulated).steps
    assert steps == pytest.approx([0.04] * 4 + [0.06] * 4 + [0.03] * 4)


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ([lambda samples: -0.1 * samples], r"costs\[0\] gives -1.0 for 10 samples"),
        ([(0.1, 0.0), (0.1, 0.0)], "2 costs for 1 ranks"),
    ],
)
def test_costs_that_do_not_fit_the_job_are_refused(costs: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        _fit(EmulatedSpeed(costs))


def _in_virtual_time() -> list[tuple[int, ...]]:
    with virtual_time():
        monitor = HeteroMonitor(report=None)
        emulated = EmulatedSpeed([(0.005, 0.001), (0.005, 0.004)], {40: [(0.005, 0.004), (0.005, 0.001)]})
        data = DataLoader(dataset(400), batch_size=20)  # 10 steps of 40 samples an epoch
        train(Net(), HeteroDDPStrategy(), data, devices=2, max_epochs=8, callbacks=[monitor, emulated])
        return [record.shares for record in monitor.history]


@pytest.mark.long
def test_hetero_ddp_finds_the_split_and_follows_a_change() -> None:
    # The best split of 40 is 32 and 8 (37 ms); when both devices change places, 8 and 32.
    first, second = run(_in_virtual_time, 2)
    assert first == second
    assert first[8] == (32, 8)
    assert first[-1] == (8, 32)


def test_a_cost_is_taken_as_it_is() -> None:
    curve = Cost(0.01, 0.001, ((4.0, 0.002),))
    assert EmulatedSpeed([curve, (0.01, 0.004)])._costs[0] == [curve, Cost(0.01, 0.004)]
    with pytest.raises(ConfigurationError, match="finite"):
        EmulatedSpeed([Cost(0.01, 0.001, ((4.0, float("nan")),))])
