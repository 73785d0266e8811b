"""The cost model against data of which the truth is known."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.batching.cost import CostModel
from lightning_hetero.batching.shares import Cost

measurements = st.lists(st.tuples(st.integers(1, 512), st.floats(1e-6, 1e4)), max_size=60)


def learned(points, **options):
    """A model that has seen the given (samples, seconds)."""
    model = CostModel(**options)
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


def test_exact_measurements_of_two_sizes_give_a_and_k():
    fixed, per_sample = settled().cost
    assert fixed == pytest.approx(0.010, rel=0.03)
    assert per_sample == pytest.approx(0.002, rel=0.01)


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
    assert model.error(32) > 3 * model.error(16)  # and it admits that


def test_constant_shares_do_not_erase_the_ratio_learned_before():
    model = settled()
    before = model.cost
    for n, t in at(16, times=1000):
        model.observe(n, t)
    assert model.cost.fixed == pytest.approx(before.fixed, rel=0.01)
    assert model.cost.per_sample == pytest.approx(before.per_sample, rel=0.01)


def test_under_noise_constant_shares_do_not_erase_the_ratio_either():
    model, rng = settled(), random.Random(0)
    for n, t in at(16, times=1000):
        model.observe(n, t * rng.gauss(1, 0.05))
    assert model.cost.fixed / model.cost.per_sample == pytest.approx(0.010 / 0.002, rel=0.1)
    assert model.predict(32) == pytest.approx(0.074, rel=0.1)


def test_a_slow_drift_of_the_whole_device_keeps_the_ratio():
    model = settled()
    for step in range(200):  # doubles slowly, no step of it far
        model.observe(16, 0.042 * 2 ** (step / 199))
    assert model.predict(16) == pytest.approx(0.084, rel=0.05)
    assert model.cost.fixed / model.cost.per_sample == pytest.approx(5, rel=0.1)


# -- hiccups and lasting changes ---------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.1, 0.5, 2, 5, 100])
def test_one_hiccup_is_ignored(factor):
    model = settled()
    before, noise = model.cost, model.noise
    model.observe(16, 0.042 * factor)
    assert model.cost == pytest.approx(before, rel=1e-9)
    assert model.noise == noise
    for n, t in at(16, times=3):
        model.observe(n, t)
    assert model.cost == pytest.approx(before, rel=0.01)


def test_hiccups_apart_or_on_opposite_sides_are_ignored():
    model = settled()
    for factor in (5, 1, 5, 0.1, 5, 1, 0.1, 1):  # never two in a row on one side
        model.observe(16, 0.042 * factor)
    assert model.predict(16) == pytest.approx(0.042, rel=0.01)


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.5, 2, 4, 20])
def test_a_lasting_change_is_taken_over_at_the_second_measurement(factor):
    model = settled()
    model.observe(16, 0.042 * factor)
    model.observe(16, 0.042 * factor)
    assert model.predict(16) == pytest.approx(0.042 * factor, rel=0.01)
    # The device as a whole has changed, as far as one can tell.
    assert model.cost.fixed / model.cost.per_sample == pytest.approx(5, rel=0.05)


def test_two_measurements_of_a_change_count_alike():
    model = settled()
    model.observe(16, 0.042 * 2.0)
    model.observe(16, 0.042 * 3.0)
    assert model.predict(16) == pytest.approx(0.042 * math.sqrt(6.0), rel=0.01)


def test_a_hiccup_just_after_a_change_is_ignored_too():
    model = settled()
    for factor in (4, 4, 20):
        model.observe(16, 0.042 * factor)
    assert model.predict(16) == pytest.approx(0.042 * 4, rel=0.01)


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


def test_a_hiccup_before_a_change_does_not_tell_where_it_goes():
    model = settled()
    model.observe(16, 4.2)  # a hundred times
    model.observe(16, 0.042)
    model.observe(16, 0.084)
    model.observe(16, 0.084)
    assert model.predict(16) == pytest.approx(0.084, rel=0.01)


# -- how sure it is ----------------------------------------------------------------------------------


def test_it_is_ready_after_three_measurements_beyond_the_warm_up():
    model = CostModel(warm_up=2)
    assert [model.error(16)] == [math.inf]
    ready = []
    for n, t in at(16, times=6):
        model.observe(n, t)
        ready.append((model.ready, math.isfinite(model.error(n))))
    assert ready == [(False, False)] * 4 + [(True, True)] * 2


def test_the_warm_up_leaves_no_trace():
    slow_start = [(16, 3.0), (16, 1.0), *at(16, times=5)]
    assert learned(slow_start).cost == learned([*at(16, times=7)]).cost


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.2])
def test_the_noise_of_a_measurement_is_estimated(noise):
    rng = random.Random(1)
    seen = []
    model = CostModel()
    for _ in range(600):
        model.observe(16, 0.042 * max(0.2, rng.gauss(1, noise)))
        seen.append(model.noise)
    assert sum(seen[100:]) / 500 == pytest.approx(noise, rel=0.4)


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
    model = CostModel()
    model.assume(Cost(0.010, 0.002), 16)
    assert model.ready
    assert model.cost == pytest.approx(Cost(0.010, 0.002))
    assert 0 < model.error(16) < 0.1
    for n, t in at(32, 0.010, 0.0021, times=20):  # a little slower than it was
        model.observe(n, t)
    assert model.predict(32) == pytest.approx(0.010 + 0.0021 * 32, rel=0.01)


def test_an_assumed_fit_replaces_what_was_known():
    model = learned(at(16, 1.0, 1.0, times=50))
    model.assume(Cost(0.010, 0.002), 16)
    assert model.cost == pytest.approx(Cost(0.010, 0.002))
    model.observe(16, 0.042)
    assert model.cost == pytest.approx(Cost(0.010, 0.002), rel=1e-3)


def test_an_assumed_fit_survives_a_round_trip():
    cost = settled().cost
    model = CostModel()
    model.assume(cost, 16)
    assert model.cost == pytest.approx(cost, rel=1e-12)
