"""The stopwatch where a device runs behind the host."""

import pytest
import torch
from test_timer import lap

from lightning_hetero.workload.timer import StepTimer

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
