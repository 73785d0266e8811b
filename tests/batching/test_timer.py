"""The stopwatch against a clock that tests move, and where a device runs behind the host: simulated host and stream."""

import pytest
import torch

from lightning_hetero.batching import timer as module
from lightning_hetero.batching.timer import DeviceTimestamps, HostTimestamps, StepTimer, timestamps_of

CPU = torch.device("cpu")


def lap(timer, samples):
    """End a step; the known laps: samples, work, wait."""
    return [known[:3] for known in timer.end_step(samples)]


class Slow(torch.autograd.Function):
    """Identity; the backward pass takes some time of this rank's own."""

    @staticmethod
    def forward(ctx, x, spend):
        ctx.spend = spend
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.spend()
        return grad, None


def backward(timer, own, waiting, layers=1, fail=False):
    """Run a backward pass like DDP's: after the last gradient a callback waits for the other ranks."""
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


def test_laps_follow_each_other(timer, clock):
    laps = []
    for n, (work, wait) in enumerate([(1, 10), (2, 20), (4, 0)]):
        clock.spend(work)
        with timer.waiting():
            clock.spend(wait)
        laps += timer.end_step(n)
    assert [lap[:3] for lap in laps] == [(0, 1, 10), (1, 2, 20), (2, 4, 0)]
    assert [lap.began for lap in laps] == [100, 111, 133]
    assert clock.now == 100 + sum(lap.work + lap.wait for lap in laps)  # no time is lost, none counted twice


# -- the backward pass -----------------------------------------------------------------------------------


def test_ranks_that_all_read_the_same_time_are_told_apart(clock):
    # As in a job: the fast rank waits for the slow one, so that for both the backward pass ends after 25.
    laps = []
    for own in (5, 25):
        clock.now = 100.0
        timer = StepTimer(CPU, clock)
        backward(timer, own=lambda own=own, clock=clock: clock.spend(own), waiting=lambda c=clock: c.spend(125 - c.now))
        assert clock.now == 125
        laps += lap(timer, 8)
    assert laps == [(8, 5, 20), (8, 25, 0)]


def test_a_loss_that_is_watched_twice_counts_once(timer, clock):
    weight = torch.ones(1, requires_grad=True)
    loss = Slow.apply(weight, lambda: clock.spend(2)).sum()
    for _ in range(2):  # `retain_graph=True`, and again
        timer.watch(loss)
        loss.backward(retain_graph=True)
        clock.spend(30)  # not known to be waiting until it has returned
        timer.backward_done()
    assert lap(timer, 8) == [(8, 4, 60)]


def test_restarting_forgets_a_backward_pass_that_never_returned(timer, clock):
    with pytest.raises(RuntimeError, match="has gone"):
        backward(timer, own=lambda: clock.spend(2), waiting=None, fail=True)
    clock.spend(1000)
    timer.restart()
    backward(timer, own=lambda: clock.spend(3), waiting=lambda: clock.spend(5))
    assert lap(timer, 8) == [(8, 3, 5)]


FAKE = torch.device("cuda")


class Device:
    """A device that works in order, behind the host's clock. An event has passed when the device has reached it."""

    def __init__(self, clock):
        self.clock, self.busy_until = clock, clock.now

    def compute(self, seconds, launch=0.0):
        """Launch work from the host, which takes some seconds of the device."""
        self.clock.spend(launch)
        self.busy_until = max(self.busy_until, self.clock.now) + seconds

    def item(self):
        """Let the host wait until all is done, as to read a number."""
        self.clock.now = max(self.clock.now, self.busy_until)

    # -- as points in time

    def take(self):
        return max(self.busy_until, self.clock.now)

    def passed(self, point):
        return point <= self.clock.now

    def between(self, earlier, later):
        return later - earlier


@pytest.fixture
def device(clock, monkeypatch):
    device = Device(clock)
    monkeypatch.setattr(module, "timestamps_of", lambda *_: device)
    return device


def test_where_the_host_is_the_slower_one_its_launches_count(device, clock):
    timer = StepTimer(FAKE, clock)
    laps = []
    for _ in range(5):
        device.compute(0.001, launch=0.008)
        laps += timer.end_step(8)
    device.item()
    laps += timer.end_step(8)
    assert [known.work for known in laps[1:-1]] == pytest.approx([0.008] * 4)


def test_laps_come_when_the_device_has_got_there_oldest_first(device, clock):
    timer = StepTimer(FAKE, clock)
    known = []
    for n in range(4):
        device.compute(0.010, launch=0.001)  # far behind the host
        if n >= 2:
            clock.now = device.busy_until - 0.015  # one and a half steps behind
        known.append(timer.end_step(n))
    assert [[lap.samples for lap in laps] for laps in known] == [[], [], [0], [1]]
    assert [lap.work for laps in known for lap in laps] == pytest.approx([0.011, 0.010])


def test_an_exchange_on_the_host_is_told_from_work_of_the_device(device, clock):
    timer = StepTimer(FAKE, clock)
    device.compute(3)
    with timer.waiting(exchange=True):
        device.item()  # the values are copied to the host: until then the device computes
        clock.spend(10)
    device.compute(2)
    device.item()
    [known] = timer.end_step(8)
    assert (known.work, known.wait, known.exchange) == (5, 10, 10)


def test_fetching_is_work_but_for_what_is_waited_meanwhile(timer, clock):
    clock.spend(1)
    timer.fetching()
    clock.spend(5)
    with timer.waiting():
        clock.spend(30)
    timer.fetched()
    clock.spend(2)
    [known] = timer.end_step(8)
    assert (known.work, known.wait, known.data, known.exchange) == (8, 30, 5, 0)
    assert known.began == 100


def test_fetching_that_began_before_a_restart_does_not_count(timer, clock):
    timer.fetching()
    clock.spend(5)
    timer.restart()
    timer.fetched()
    clock.spend(2)
    [known] = timer.end_step(8)
    assert (known.work, known.data, known.began) == (2, 0, 105)


# -- which clock --------------------------------------------------------------------------------------------


class Event:
    """An event of a backend; whether events can be timed is an attribute."""

    works = True

    def __init__(self, device, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        if not self.works:
            raise RuntimeError("fake backend doesn't support elapsedTime.")
        return 1500.0


@pytest.mark.parametrize("works", [True, False])
def test_a_device_without_a_clock_is_timed_by_the_host(monkeypatch, clock, works):
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(Event, "works", works)
    assert isinstance(timestamps_of(torch.device("xpu"), clock), DeviceTimestamps if works else HostTimestamps)


def test_after_an_error_while_waiting_work_goes_on(timer, clock):
    def fail():
        clock.spend(10)
        raise KeyError

    with pytest.raises(KeyError), timer.waiting():
        fail()
    clock.spend(2)
    assert lap(timer, 8) == [(8, 2, 10)]


def test_a_loss_without_gradients_and_a_pass_that_was_not_watched_are_work(timer, clock):
    timer.watch(torch.ones(1))
    clock.spend(3)
    timer.backward_done()
    assert lap(timer, 8) == [(8, 3, 0)]


def test_fetching_takes_no_more_than_the_work(device, clock):
    timer = StepTimer(FAKE, clock)
    device.compute(0.05)
    timer.fetching()
    clock.spend(0.04)  # while the device computes
    timer.fetched()
    device.compute(0.01)
    device.item()
    [known] = timer.end_step(8)
    assert (known.work, known.data) == (pytest.approx(0.06), pytest.approx(0.04))


def test_an_exchange_is_waiting_of_its_own_kind(timer, clock):
    with timer.waiting():
        clock.spend(1)
    with timer.waiting(exchange=True), timer.waiting():
        clock.spend(10)
    [known] = timer.end_step(8)
    assert (known.work, known.wait, known.exchange) == (0, 11, 10)
