"""Cost models of a rank's times, a line or a curve, against devices of which the truth is known."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import by_row, by_time, traces

from lightning_hetero.batching.cost import CostModel, CurveEstimator
from lightning_hetero.batching.shares import Cost

measurements = st.lists(st.tuples(st.integers(1, 512), st.floats(1e-6, 1e4)), max_size=60)


def learned(points):
    """A model that has seen the given (samples, seconds)."""
    model = CostModel()
    for samples, seconds in points:
        model.observe(samples, seconds)
    return model


def at(samples, fixed=0.010, per_sample=0.002, times=1):
    """Exact measurements of a device."""
    return [(samples, fixed + per_sample * samples)] * times


def settled():
    """A model that knows ``a = 10 ms``, ``k = 2 ms`` from two sizes, and has last seen 16 samples."""
    return learned([*at(16, times=20), *at(32, times=20), *at(16, times=20)])


# -- what is learned ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("fixed", "per_sample", "noise"),
    [(0.010, 0.002, 0.03), (0.010, 0.008, 0.10), (0.200, 0.0005, 0.03), (0.0, 0.001, 0.05)],
)
def test_noisy_measurements_give_a_and_k_as_well_as_least_squares_does(fixed, per_sample, noise, seed):
    rng = random.Random(seed)
    sizes = [rng.randint(4, 96) for _ in range(300)]
    points = [(n, (fixed + per_sample * n) * rng.gauss(1, noise)) for n in sizes]
    model = learned(points)
    times = np.array([t for _, t in points])
    # The best any method could do: relative least squares over all points at once.
    design = np.stack([1 / times, np.array(sizes) / times], axis=1)
    best_fixed, best_per_sample = np.linalg.lstsq(design, np.ones(len(points)), rcond=None)[0]
    for n in (8, 32, 96):
        truth = fixed + per_sample * n
        best = abs(best_fixed + best_per_sample * n - truth) / truth
        assert abs(model.predict(n) - truth) / truth < best + noise
    assert model.cost.fixed == pytest.approx(fixed, abs=0.15 * (fixed + 32 * per_sample))


def test_a_first_guess_gives_most_of_the_time_to_the_samples():
    # After one size only, the model must say that more samples take longer, though by how much is not known yet.
    model = learned(at(16, times=10))
    assert model.predict(16) == pytest.approx(0.042)
    assert 0.042 < model.predict(32) < 0.084
    assert model.error(32) > 3 * model.error(16)  # and its estimated error is large


def test_under_noise_constant_shares_do_not_erase_the_ratio_either():
    model, rng = settled(), random.Random(0)
    for n, t in at(16, times=1000):
        model.observe(n, t * rng.gauss(1, 0.05))
    assert model.cost.fixed / model.cost.per_sample == pytest.approx(0.010 / 0.002, rel=0.1)
    assert model.predict(32) == pytest.approx(0.074, rel=0.1)


# -- hiccups and lasting changes ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factors", "last"),
    [
        *(((factor,), 1) for factor in (0.1, 0.5, 2, 5, 100)),
        ((5, 1, 5, 0.1, 5, 1, 0.1, 1), 1),  # never two in a row on one side
        *(((factor, factor), factor) for factor in (0.25, 0.5, 1.5, 2, 4, 20)),
        ((2.0, 3.0), math.sqrt(6.0)),
        ((4, 4, 20), 4),
        ((100, 1, 2, 2), 2),
    ],
)
def test_one_hiccup_is_ignored_and_a_lasting_change_taken_over_at_the_second_measurement(factors, last):
    model = settled()
    noise = model.noise
    for factor in factors:
        model.observe(16, 0.042 * factor)
    assert model.predict(16) == pytest.approx(0.042 * last, rel=0.01)
    # The device as a whole has changed, as far as one can tell.
    assert model.cost.fixed / model.cost.per_sample == pytest.approx(5, rel=0.05)
    assert model.noise == noise or len(factors) > 1


@pytest.mark.parametrize("factor", [0.7, 1.3])
def test_a_lasting_change_that_noise_hides_is_followed_within_a_few_measurements(factor):
    # At 10% noise a change of 30% is not far, measurement by measurement; it is one of many on the same side.
    off = []
    for seed in range(30):
        rng = random.Random(seed)
        model = learned([(16, 0.042 * rng.gauss(1, 0.1)) for _ in range(80)])
        for _ in range(8):
            model.observe(16, 0.042 * factor * rng.gauss(1, 0.1))
        off.append(abs(model.predict(16) / (0.042 * factor) - 1))
    assert sum(off) / len(off) < 0.09


def test_after_a_change_the_ratio_is_learned_anew():
    model = settled()
    # Now each sample takes four times as long, and the fixed cost is what it was.
    for n, t in [*at(16, 0.010, 0.008, 8), *at(8, 0.010, 0.008, 8), *at(4, 0.010, 0.008, 8)]:
        model.observe(n, t)
    assert model.cost.fixed == pytest.approx(0.010, rel=0.15)
    assert model.cost.per_sample == pytest.approx(0.008, rel=0.05)


# -- how sure it is ----------------------------------------------------------------------------------


def test_it_is_ready_after_two_measurements_beyond_the_warm_up():
    model = CostModel()
    assert [model.error(16)] == [math.inf]
    ready = []
    for n, t in at(16, times=6):
        model.observe(n, t)
        ready.append((model.ready, math.isfinite(model.error(n))))
    assert ready == [(False, False)] * 3 + [(True, True)] * 3


def test_the_warm_up_leaves_no_trace():
    slow_start = [(16, 3.0), (16, 0.049), *at(16, times=5)]
    assert learned(slow_start).cost == learned([*at(16, times=7)]).cost


def test_of_long_steps_only_the_first_is_left_out():
    model = learned([(16, 9.0), (16, 1.0), (16, 1.0)])
    assert model.ready
    assert model.predict(16) == pytest.approx(1.0)


def test_the_error_covers_what_the_prediction_is_off_by():
    off = []
    for seed in range(200):
        rng = random.Random(seed)
        model = learned([(n, (0.01 + 0.002 * n) * rng.gauss(1, 0.05)) for n in [16] * 10 + [24] * 10])
        off.append((model.predict(24) / 0.058 - 1) / model.error(24))
    deviation = math.sqrt(sum(x * x for x in off) / len(off))
    assert 0.4 < deviation < 1.6  # in standard errors; 1 if it is honest


# -- input that means nothing ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "seconds"),
    [(16, math.nan), (16, math.inf), (16, -math.inf), (16, 0.0), (16, -0.042), (0, 0.042), (-4, 0.042)],
)
def test_measurements_that_mean_nothing_are_ignored(samples, seconds):
    model, other = settled(), settled()
    model.observe(samples, seconds)
    assert vars(model) == vars(other)


@given(measurements)
@settings(max_examples=500)
def test_whatever_is_measured_a_split_can_use_the_cost(points):
    model = CostModel()
    for samples, seconds in points:
        model.observe(samples, seconds)
        cost = model.cost
        assert cost.fixed >= 0
        assert cost.per_sample > 0
        assert math.isfinite(cost.fixed + cost.per_sample)
        assert model.error(samples) >= 0
    if len(points) > 5:
        last = points[-1][0]
        # Enforcing a >= 0 and k > 0 does not change what is predicted where it is used.
        assert model.cost.seconds(last) == pytest.approx(max(model.predict(last), 1e-9), rel=1e-6)


def test_no_past_keeps_it_from_learning():
    for seed in range(300):
        # Sizes that vary, and three measurements in ten that have nothing to do with the device.
        rng = random.Random(seed)
        model = CostModel()
        for _ in range(rng.randint(1, 40)):
            n, wild = rng.choice([1, 2, 3, 5, 8, 16, 32, 64, 128]), rng.random() < 0.3
            seconds = math.exp(rng.uniform(-8, 2)) if wild else rng.uniform(0, 0.02) + rng.uniform(5e-4, 0.01) * n
            model.observe(n, seconds)
        n, seconds = rng.choice([1, 2, 4, 16, 64]), math.exp(rng.uniform(-6, 1))
        for _ in range(300):
            model.observe(n, seconds)
        assert model.cost.seconds(n) == pytest.approx(seconds, rel=0.1), f"seed {seed}"


# -- resuming ----------------------------------------------------------------------------------------


def test_an_assumed_fit_is_used_at_once_and_can_be_corrected():
    model = learned(at(16, 1.0, 1.0, times=50))
    model.assume(Cost(0.010, 0.002), 16)
    assert model.ready
    assert model.cost[:2] == pytest.approx((0.010, 0.002), rel=1e-12)
    assert 0 < model.error(16) < 0.1
    for n, t in at(32, 0.010, 0.0021, times=20):  # a little slower than it was
        model.observe(n, t)
    assert model.predict(32) == pytest.approx(0.010 + 0.0021 * 32, rel=0.01)


def flat(samples):
    """64 ms for up to 16 samples, and 4 ms for each further one."""
    return 0.064 + 0.004 * max(0, samples - 16)


def staircase(samples):
    """20 ms for each 8 samples."""
    return 0.020 * -(-samples // 8)


def line(samples):
    return 0.010 + 0.002 * samples


def seen(device, sizes, times=8, noise=0.0, seed=0, into=None):
    """A shape with ``times`` measurements of each size, in stretches of 0.1 s at least."""
    found, rng = into or CurveEstimator(), random.Random(seed)
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
    noise, found, now, curves = by(traces(name)), CurveEstimator(), 0.0, 0
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


def test_two_sizes_are_enough_if_a_line_would_take_no_time_for_no_samples():
    curve = seen(flat, [40, 20]).curve()  # 160 and 80 ms are in proportion
    assert curve is None
    curve = seen(lambda n: 0.02 if n <= 16 else 0.02 + 0.004 * (n - 16), [16, 24]).curve()
    assert curve.seconds(20) == pytest.approx(0.036)
    assert 0 < curve.seconds(1) < 0.02


# -- changes of speed --------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.25, 0.5, 2.0, 4.0])
def test_what_was_before_a_change_of_speed_is_forgotten(factor):
    found = seen(line, [32, 16])
    seen(lambda n: factor * line(n), [16, 24], times=3, into=found)
    assert found.curve() is None
    assert [p.samples for p in found.points()] == [16, 24]


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


# -- bumps -------------------------------------------------------------------------------------------


def test_where_times_bend_down_the_curve_is_below_them_and_it_is_said():
    assert seen(flat, [32, 24, 16, 8]).bump() == (0.0, 0.0)
    found = seen(staircase, [24, 32, 33, 40])  # 60, 80, 100, 100 ms: down after 33
    curve = found.curve()
    assert [curve.seconds(n) for n in (24, 32, 40)] == pytest.approx([0.060, 0.080, 0.100], rel=1e-3)
    assert found.bump() == (33, pytest.approx(0.100))


# -- resuming ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_an_assumed_curve_is_used_at_the_speed_that_is_measured(factor):
    found = CurveEstimator()
    found.assume(Cost(0.064, 1e-9, ((16.0, 0.004),)))
    assert found.curve() is None  # nothing has been measured yet
    seen(lambda n: factor * flat(n), [24], times=2, into=found)
    for n in (8, 16, 24, 32):
        assert found.curve().seconds(n) == pytest.approx(factor * flat(n), rel=1e-3)


# -- shares ------------------------------------------------------------------------------------------
