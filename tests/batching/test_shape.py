"""When a rank's times are taken for a curve, against devices of which the truth is known."""

import random

import pytest
from simulation import Cluster, by_row, by_time, gaussian, traces

from lightning_hetero.batching.cost import CurveEstimator, SpeedEstimator
from lightning_hetero.batching.shares import Cost, Curve, makespan


def flat(samples):
    """Up to 16 samples 64 ms, then 4 ms each."""
    return 0.064 + 0.004 * max(0, samples - 16)


def staircase(samples):
    """20 ms for each 8 samples."""
    return 0.020 * -(-samples // 8)


def line(samples):
    return 0.010 + 0.002 * samples


def shape():
    return CurveEstimator(
        SpeedEstimator.SECONDS, SpeedEstimator.STATE, SpeedEstimator.CHANGE, SpeedEstimator.LEAST_NOISE
    )


def seen(device, sizes, times=8, noise=0.0, seed=0, into=None):
    """A shape that has seen each size so many times, stretches of 0.1 s at least."""
    found, rng = into or shape(), random.Random(seed)
    for n in sizes:
        for _ in range(times):
            work = device(n) * max(0.2, rng.gauss(1, noise))
            found.observe(n, work, max(0.0, 0.11 - work))
    return found


# -- a line or a curve -------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [line, lambda n: 0.002 * n, lambda n: 0.05], ids=["a + k n", "k n", "constant"])
def test_a_straight_line_stays_one(device):
    assert seen(device, [16, 24, 32, 8, 40]).curve() is None


@pytest.mark.parametrize("noise", [0.03, 0.1, 0.3])
def test_noise_makes_no_curve_of_it(noise):
    curves = [seen(line, [16, 24, 20, 32, 8], noise=noise, times=20, seed=seed).curve() for seed in range(50)]
    assert curves == [None] * 50


@pytest.mark.parametrize("name", ["quiet", "one_busy", "two_busy", "bursts"])
@pytest.mark.parametrize("by", [by_time, by_row])
def test_nor_does_that_of_real_machines(name, by):
    noise, found, now, curves = by(traces(name)), shape(), 0.0, 0
    rng = random.Random(0)
    for step in range(4000):
        if step % 200 == 0:
            n = rng.choice([16, 20, 24, 28, 32, 36, 40])
        work = noise(step, 0, now, line(n) / 10)
        now += work
        found.observe(n, work, 0.0)
        curves += found.curve() is not None
    assert curves <= 0.02 * 4000


def test_a_device_that_is_flat_until_it_is_full_is_a_curve():
    curve = seen(flat, [32, 24, 16, 8]).curve()
    for n in (1, 8, 12, 16, 20, 24, 32, 64):
        assert curve.seconds(n) == pytest.approx(flat(n), rel=1e-3)


def test_so_it_is_under_noise_once_enough_has_been_measured():
    curve = seen(flat, [32, 24, 16, 8], noise=0.03, times=40).curve()
    for n in (8, 16, 24, 32):
        assert curve.seconds(n) == pytest.approx(flat(n), rel=0.05)


def test_two_sizes_are_enough_if_a_line_would_take_no_time_for_no_samples():
    curve = seen(flat, [40, 20]).curve()  # 160 and 80 ms are in proportion
    assert curve is None
    curve = seen(lambda n: 0.02 if n <= 16 else 0.02 + 0.004 * (n - 16), [16, 24]).curve()
    assert curve.seconds(20) == pytest.approx(0.036)
    assert 0 < curve.seconds(1) < 0.02


def test_one_stall_is_no_curve():
    found = seen(line, [16, 24])
    found.observe(20, 3.0, 0.0)
    assert found.curve() is None


# -- changes of speed --------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.25, 0.5, 2.0, 4.0])
def test_what_was_before_a_change_of_speed_is_forgotten(factor):
    found = seen(line, [32, 16])
    seen(lambda n: factor * line(n), [16, 24], times=3, into=found)
    assert found.curve() is None
    assert [p.samples for p in found.points()] == [16, 24]


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_also_if_each_size_has_been_measured_only_once_since(factor):
    found = seen(line, [32, 16, 24])
    seen(lambda n: factor * line(n), [24, 16, 40, 40], times=1, into=found)
    assert found.curve() is None
    assert [p.samples for p in found.points()] == [40]


@pytest.mark.parametrize("factor", [0.4, 4.0])
def test_two_long_steps_are_enough(factor):
    found = seen(line, [32, 16])
    for _ in range(2):
        found.observe(16, factor * line(16), 0.0)
    assert found.points() == []
    found = seen(line, [32, 16])
    for n, times in ((16, factor), *[(16, 1)] * 9, (16, factor)):  # hiccups
        found.observe(n, times * line(n), 0.0)
    assert [p.samples for p in found.points()] == [16, 32]


def test_a_slow_drift_moves_what_is_known_of_other_sizes():
    found = seen(flat, [32, 16, 24], times=40)
    for step in range(1000):  # to twice the time, and no two measurements differ by more than 0.1%
        found.observe(24, 2 ** (step / 999) * flat(24), 0.05)
    known = {p.samples: p.seconds for p in found.points()}
    assert known[16] / known[24] == pytest.approx(flat(16) / flat(24), rel=0.02)
    assert known[24] == pytest.approx(2 * flat(24), rel=0.03)


def test_memory_is_bounded():
    found = seen(line, range(1, 400), times=2)
    assert len(found.points()) <= CurveEstimator.SIZES
    assert all(p.stretches <= CurveEstimator.EACH for p in seen(line, [16, 32], times=100).points())
    for n in range(1000):  # none of them long enough to count
        found.observe(n + 1, 1e-4, 0.0)
    assert len(found._open) <= CurveEstimator.SIZES


# -- bumps -------------------------------------------------------------------------------------------


def test_where_times_bend_down_the_curve_is_below_them_and_it_is_said():
    found = seen(staircase, [24, 32, 33, 40])  # 60, 80, 100, 100 ms: down after 33
    curve = found.curve()
    assert [curve.seconds(n) for n in (24, 32, 40)] == pytest.approx([0.060, 0.080, 0.100], rel=1e-3)
    assert found.bump() == (33, pytest.approx(0.100))


def test_a_convex_device_has_no_bump_and_neither_has_noise():
    assert seen(flat, [32, 24, 16, 8]).bump() == (0.0, 0.0)
    for seed in range(50):
        assert seen(line, [16, 24, 20, 32, 8], noise=0.1, seed=seed).bump() == (0.0, 0.0)


# -- resuming ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_an_assumed_curve_is_used_at_the_speed_that_is_measured(factor):
    found = shape()
    found.assume(Curve(0.064, 1e-9, ((16.0, 0.004),)))
    assert found.curve() is None  # nothing has been measured yet
    seen(lambda n: factor * flat(n), [24], times=2, into=found)
    for n in (8, 16, 24, 32):
        assert found.curve().seconds(n) == pytest.approx(factor * flat(n), rel=1e-3)


def test_an_assumed_curve_gives_way_to_what_is_measured():
    found = shape()
    found.assume(Curve(0.064, 1e-9, ((16.0, 0.004),)))
    seen(line, [24, 16, 32, 8], times=20, into=found)
    for n in (8, 16, 24, 32):
        assert (found.curve() or Cost(0.010, 0.002)).seconds(n) == pytest.approx(line(n), rel=0.02)


# -- shares ------------------------------------------------------------------------------------------


class Device:
    """A cost that the simulation knows and the planner does not."""

    def __init__(self, seconds):
        self.seconds = seconds


def optimum(devices, total):
    """Seconds of the best split of two devices, by trying all."""
    first, second = devices
    return min(max(first.seconds(n), second.seconds(total - n)) for n in range(1, total))


def affine(fixed, per_sample):
    return lambda n: fixed + per_sample * n


DEVICES = {
    "flat": ([lambda n: 0.020 + 0.004 * max(0, n - 16), affine(0.010, 0.004)], 32),
    "flat, larger batch": ([lambda n: 0.016 + 0.004 * max(0, n - 16), affine(0.010, 0.001)], 96),
    "flat, slow beside it": ([lambda n: 0.016 + 0.004 * max(0, n - 16), affine(0.010, 0.004)], 48),
    "staircases": ([staircase, lambda n: 2 * staircase(n)], 24),
    "staircases, larger batch": ([lambda n: 0.4 * staircase(n), lambda n: 0.8 * staircase(n)], 48),
}


def late(devices, total, noise=None):
    """How much longer than the best possible the last steps of 300 take."""
    cluster = Cluster(devices, total, noise=noise, planners=1)
    return sum(cluster.run(300)[-100:]) / 100 / optimum(devices, total)


@pytest.mark.parametrize("name", DEVICES)
def test_shares_come_within_5_percent_of_the_optimum_where_a_line_loses_more_than_10(name, monkeypatch):
    seconds, total = DEVICES[name]
    devices = [Device(function) for function in seconds]
    assert late(devices, total) <= 1.05
    monkeypatch.setattr(CurveEstimator, "curve", lambda self: None)
    assert late(devices, total) > 1.10


def test_so_they_do_under_a_little_noise():
    seconds, total = DEVICES["flat"]
    devices = [Device(function) for function in seconds]
    assert sorted(late(devices, total, gaussian(0.02, seed)) for seed in range(9))[4] <= 1.05


def test_the_makespan_of_a_curve_is_what_its_device_takes():
    assert makespan([24, 8], [Curve(0.064, 1e-9, ((16.0, 0.004),)), Cost(0.010, 0.002)]) == pytest.approx(flat(24))
