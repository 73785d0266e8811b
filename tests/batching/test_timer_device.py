"""The stopwatch where a device runs behind the host: a simulation of the host and of the device's stream."""

import pytest
import torch
from test_timer import backward, lap

from lightning_hetero.batching import timer as module
from lightning_hetero.batching.timer import DeviceTimestamps, HostTimestamps, StepTimer, timestamps_of

FAKE = torch.device("cuda")


class Device:
    """Does what it is given, in order, behind the host's clock. Its events pass when it has got there."""

    def __init__(self, clock):
        self.clock, self.busy_until = clock, clock.now

    def compute(self, seconds, launch=0.0):
        """The host launches work, which takes some seconds of the device."""
        self.clock.spend(launch)
        self.busy_until = max(self.busy_until, self.clock.now) + seconds

    def wait_for(self, moment):
        """What comes after this in the stream begins when another rank has got there."""
        self.busy_until = max(self.busy_until, moment)

    def item(self):
        """The host waits until all is done, to read a number."""
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


def train(device, clock, *, look_every, steps=20, own=0.010, peer=0.040, launch=0.001):
    """Steps of a rank that averages with a slower one; the host looks at the loss now and then, or never."""
    timer, laps, begin = StepTimer(FAKE, clock), [], clock.now
    for step in range(steps):
        device.compute(own / 3, launch)  # forward
        backward(
            timer,
            own=lambda: device.compute(own * 2 / 3, launch),
            waiting=lambda step=step: device.wait_for(begin + (step + 1) * peer),
        )
        if look_every and step % look_every == 0:
            device.item()
        laps += timer.end_step(8)
    device.item()
    laps += timer.end_step(8)
    return laps[1:-1]


@pytest.mark.parametrize("look_every", [0, 1, 5])
def test_the_wait_for_a_peer_is_no_work_however_often_the_host_looks_at_the_loss(device, clock, look_every):
    laps = train(device, clock, look_every=look_every)
    assert len(laps) == 19
    for known in laps:
        # If the host has looked, the device is idle while the next step is launched: for 1 ms before its first work.
        assert 0.010 - 1e-9 <= known.work <= 0.012
        assert known.work + known.wait == pytest.approx(0.040)
    assert sum(known.work for known in laps) / len(laps) <= (0.0121 if look_every == 1 else 0.0105)


def test_the_hosts_clock_would_count_the_peer_as_own_work(device, clock, monkeypatch):
    monkeypatch.setattr(module, "timestamps_of", lambda *_: HostTimestamps(clock))
    for known in train(device, clock, look_every=1):
        assert known.work == pytest.approx(0.040)


def test_the_slow_rank_does_not_wait(device, clock):
    for known in train(device, clock, look_every=1, own=0.040, peer=0.010):
        assert known.work == pytest.approx(0.041)
        assert known.wait == pytest.approx(0.0)


def test_where_the_host_is_the_slower_one_its_launches_count(device, clock):
    timer = StepTimer(FAKE, clock)
    laps = []
    for _ in range(5):
        device.compute(0.001, launch=0.008)
        laps += timer.end_step(8)
    device.item()
    laps += timer.end_step(8)
    assert [known.work for known in laps[1:-1]] == pytest.approx([0.008] * 4)


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


def test_restarting_forgets_what_the_device_did(device, clock):
    timer = StepTimer(FAKE, clock)
    device.compute(50)
    with timer.waiting():
        device.compute(60)
    timer.restart()
    device.compute(2)
    device.item()
    assert lap(timer, 8) == [(8, pytest.approx(2), 0)]


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


def test_an_exchange_is_waiting_of_its_own_kind(timer, clock):
    with timer.waiting():
        clock.spend(1)
    with timer.waiting(exchange=True), timer.waiting():
        clock.spend(10)
    [known] = timer.end_step(8)
    assert (known.work, known.wait, known.exchange) == (0, 11, 10)


# -- which clock --------------------------------------------------------------------------------------------


class Event:
    """Of a backend whose events can be timed, if it says so."""

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


def test_milliseconds_become_seconds(monkeypatch):
    monkeypatch.setattr(torch, "Event", Event)
    points = DeviceTimestamps(torch.device("xpu"))
    assert points.between(points.take(), points.take()) == 1.5


@pytest.mark.parametrize("works", [True, False])
def test_a_device_without_a_clock_is_timed_by_the_host(monkeypatch, clock, works):
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(Event, "works", works)
    assert isinstance(timestamps_of(torch.device("xpu"), clock), DeviceTimestamps if works else HostTimestamps)


def test_a_cpu_has_the_hosts_clock(clock):
    assert isinstance(timestamps_of(torch.device("cpu"), clock), HostTimestamps)
