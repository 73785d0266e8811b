"""The stopwatch against a clock that stands still unless the test moves it."""

import time

import pytest
import torch

from lightning_hetero.workload.timer import StepTimer

CPU = torch.device("cpu")


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def spend(self, seconds):
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timer(clock):
    return StepTimer(CPU, clock)


def lap(timer, samples):
    """The laps known by now: samples, work, wait."""
    return [known[:3] for known in timer.lap(samples)]


class Slow(torch.autograd.Function):
    """Identity, of which the backward pass takes some time of this rank's own."""

    @staticmethod
    def forward(ctx, x, spend):
        ctx.spend = spend
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.spend()
        return grad, None


def backward(timer, own, waiting, layers=1, fail=False):
    """A backward pass like DDP's: once the last gradient is there, a callback waits for the other ranks."""
    weight = torch.ones(1, requires_grad=True)
    queued = []

    def others():
        if fail:
            raise RuntimeError("another rank has gone")
        waiting()

    def gradient_ready(grad):
        queued.append(True)
        torch.autograd.Variable._execution_engine.queue_callback(others)

    weight.register_hook(gradient_ready)
    loss = weight
    for _ in range(layers):
        loss = Slow.apply(loss, own)
    loss = loss.sum()
    timer.watch(loss)
    loss.backward()
    timer.backward_done()
    assert queued
    assert weight.grad.item() == 1


# -- blocks ------------------------------------------------------------------------------------------


def test_a_step_without_waiting_is_all_work(timer, clock):
    clock.spend(3)
    assert lap(timer, 8) == [(8, 3, 0)]


def test_waiting_is_not_work(timer, clock):
    clock.spend(1)
    with timer.waiting():
        clock.spend(10)
    clock.spend(2)
    with timer.waiting():
        clock.spend(20)
    clock.spend(4)
    assert lap(timer, 8) == [(8, 7, 30)]


def test_nested_waiting_counts_once(timer, clock):
    clock.spend(1)
    with timer.waiting():
        clock.spend(10)
        with timer.waiting():
            clock.spend(20)
            with timer.waiting():
                clock.spend(40)
        clock.spend(80)
    clock.spend(2)
    assert lap(timer, 8) == [(8, 3, 150)]


def test_after_an_error_while_waiting_work_goes_on(timer, clock):
    def fail():
        clock.spend(10)
        raise KeyError

    with pytest.raises(KeyError), timer.waiting():
        fail()
    clock.spend(2)
    assert lap(timer, 8) == [(8, 2, 10)]


def test_laps_follow_each_other(timer, clock):
    laps = []
    for n, (work, wait) in enumerate([(1, 10), (2, 20), (4, 0)]):
        clock.spend(work)
        with timer.waiting():
            clock.spend(wait)
        laps += timer.lap(n)
    assert [lap[:3] for lap in laps] == [(0, 1, 10), (1, 2, 20), (2, 4, 0)]
    assert [lap.began for lap in laps] == [100, 111, 133]
    assert clock.now == 100 + sum(lap.work + lap.wait for lap in laps)  # no time is lost, none counted twice


def test_restarting_forgets_the_running_step(timer, clock):
    clock.spend(50)
    with timer.waiting():
        clock.spend(60)
    timer.restart()
    clock.spend(1)
    assert lap(timer, 8) == [(8, 1, 0)]


# -- the backward pass -----------------------------------------------------------------------------------


def test_the_backward_pass_is_work_and_what_comes_after_it_is_waiting(timer, clock):
    clock.spend(1)  # forward
    backward(timer, own=lambda: clock.spend(2), waiting=lambda: clock.spend(500))
    clock.spend(4)  # optimizer
    assert lap(timer, 8) == [(8, 7, 500)]


def test_the_slowest_rank_does_not_wait(timer, clock):
    backward(timer, own=lambda: clock.spend(500), waiting=lambda: None, layers=3)
    assert lap(timer, 8) == [(8, 1500, 0)]


def test_ranks_that_all_read_the_same_time_are_told_apart():
    # As in a job: whoever is fast waits for the slow one, so that both have spent 25 at the end of backward.
    laps = []
    for own in (5, 25):
        clock = Clock()
        timer = StepTimer(CPU, clock)
        backward(timer, own=lambda own=own, clock=clock: clock.spend(own), waiting=lambda c=clock: c.spend(125 - c.now))
        assert clock.now == 125
        laps += lap(timer, 8)
    assert laps == [(8, 5, 20), (8, 25, 0)]


def test_several_backward_passes_in_a_step_add_up(timer, clock):
    for _ in range(3):  # accumulation, or several losses
        clock.spend(1)
        backward(timer, own=lambda: clock.spend(2), waiting=lambda: clock.spend(500))
    assert lap(timer, 8) == [(8, 9, 1500)]


def test_a_loss_that_is_watched_twice_counts_once(timer, clock):
    weight = torch.ones(1, requires_grad=True)
    loss = Slow.apply(weight, lambda: clock.spend(2)).sum()
    for _ in range(2):  # `retain_graph=True`, and again
        timer.watch(loss)
        loss.backward(retain_graph=True)
        clock.spend(30)  # not known to be waiting until it has returned
        timer.backward_done()
    assert lap(timer, 8) == [(8, 4, 60)]


def test_waiting_blocks_around_a_backward_pass_add_up(timer, clock):
    with timer.waiting():
        clock.spend(10)
    backward(timer, own=lambda: clock.spend(2), waiting=lambda: clock.spend(500))
    with timer.waiting():
        clock.spend(20)
    assert lap(timer, 8) == [(8, 2, 530)]


def test_a_loss_without_gradients_and_a_pass_that_was_not_watched_are_work(timer, clock):
    timer.watch(torch.ones(1))
    clock.spend(3)
    timer.backward_done()
    assert lap(timer, 8) == [(8, 3, 0)]


def test_restarting_forgets_a_backward_pass_that_never_returned(timer, clock):
    with pytest.raises(RuntimeError, match="has gone"):
        backward(timer, own=lambda: clock.spend(2), waiting=None, fail=True)
    clock.spend(1000)
    timer.restart()
    backward(timer, own=lambda: clock.spend(3), waiting=lambda: clock.spend(5))
    assert lap(timer, 8) == [(8, 3, 5)]


def test_with_a_real_clock():
    timer = StepTimer(CPU)
    backward(timer, own=lambda: time.sleep(0.01), waiting=lambda: time.sleep(1.0))
    ((samples, work, wait),) = lap(timer, 8)
    assert samples == 8
    assert 0.01 <= work < 1.0  # or it would hold the waiting
    assert wait >= 1.0


# -- a device that runs behind the host --------------------------------------------------------------------


class Device:
    """Has a clock of its own; its events pass when the test says so."""

    def __init__(self):
        self.now, self.reached = 0.0, 0.0

    def event(self):
        return Event(self)


class Event:
    def __init__(self, device):
        self.device, self.at = device, device.now

    def query(self):
        return self.at <= self.device.reached

    def elapsed_time(self, end):
        return 1000.0 * (end.at - self.at)  # milliseconds, as in CUDA


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(StepTimer, "_record", staticmethod(device.event))
    return device


@pytest.mark.parametrize(("host", "on_device", "work"), [(1, 8, 8), (8, 1, 8), (3, 3, 3)])
def test_on_a_device_work_is_the_greater_of_both_clocks(device, clock, host, on_device, work):
    timer = StepTimer(torch.device("cuda"), clock)
    clock.spend(host / 2)
    device.now += on_device / 2
    with timer.waiting():
        clock.spend(30)
        device.now += 40  # an all-reduce
    clock.spend(host / 2)
    device.now += on_device / 2
    device.reached = device.now
    ((samples, measured, wait),) = lap(timer, 8)
    assert (samples, wait) == (8, 30)
    assert measured == pytest.approx(work)


def test_laps_come_when_the_device_has_got_there_oldest_first(device, clock):
    timer = StepTimer(torch.device("cuda"), clock)
    known = []
    for n in range(4):
        clock.spend(1)
        device.now += 10  # far behind the host
        device.reached = device.now - 15  # one and a half steps behind
        known.append(timer.lap(n))
    assert [[lap.samples for lap in laps] for laps in known] == [[], [], [0], [1]]
    assert [lap.work for laps in known for lap in laps] == pytest.approx([10, 10])


def test_restarting_forgets_what_the_device_did(device, clock):
    timer = StepTimer(torch.device("cuda"), clock)
    device.now += 50
    with timer.waiting():
        device.now += 60
    timer.restart()
    device.now += 2
    device.reached = device.now
    assert lap(timer, 8) == [(8, pytest.approx(2), 0)]


def test_fetching_is_work_but_for_what_is_waited_meanwhile(timer, clock):
    clock.spend(1)
    timer.fetching()
    clock.spend(5)
    with timer.waiting():
        clock.spend(30)
    timer.fetched()
    clock.spend(2)
    [known] = timer.lap(8)
    assert (known.work, known.wait, known.data, known.exchange) == (8, 30, 5, 0)
    assert known.began == 100


def test_fetching_that_began_before_a_restart_does_not_count(timer, clock):
    timer.fetching()
    clock.spend(5)
    timer.restart()
    timer.fetched()
    clock.spend(2)
    [known] = timer.lap(8)
    assert (known.work, known.data, known.began) == (2, 0, 105)


def test_an_exchange_is_waiting_of_its_own_kind(timer, clock):
    with timer.waiting():
        clock.spend(1)
    with timer.waiting(exchange=True), timer.waiting():
        clock.spend(10)
    [known] = timer.lap(8)
    assert (known.work, known.wait, known.exchange) == (0, 11, 10)
