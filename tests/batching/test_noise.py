"""Shares under the noise of real machines: alike ranks are left alone, and ranks that differ get what they should."""

import statistics

import pytest
from simulation import Cluster, by_row, by_time, gaussian, near_even, optimum, traces

from lightning_hetero.batching.shares import Cost

TINY = Cost(0.0004, 0.0001)  # 3.6 ms for 32 samples, as in the recorded steps
SLOW = Cost(0.010, 0.002)  # 74 ms


@pytest.mark.long(after=1)
@pytest.mark.parametrize("name", ["quiet", "one_busy", "two_busy", "bursts"])
@pytest.mark.parametrize("first", [0.0, 12.5])
def test_alike_ranks_of_a_busy_machine_keep_even_shares(name, first):
    cluster = Cluster([TINY, TINY], noise=by_time(traces(name), first), planners=1)
    cluster.run(2000)
    assert near_even(cluster.shares) >= 0.99


@pytest.mark.parametrize("name", ["quiet", "one_busy", "two_busy", "bursts"])
def test_so_do_they_if_every_step_meets_a_recorded_one(name):
    cluster = Cluster([TINY, TINY], noise=by_row(traces(name)), planners=1)
    cluster.run(2000)
    assert near_even(cluster.shares) >= 0.9


@pytest.mark.parametrize("world", [2, 4])
def test_independent_noise_moves_nothing(world):
    cluster = Cluster([SLOW] * world, 32 * world, noise=gaussian(0.1), planners=1)
    cluster.run(1000)
    assert near_even(cluster.shares) >= 0.99


@pytest.mark.long(after=1)
@pytest.mark.parametrize("name", ["quiet", "one_busy", "two_busy", "bursts"])
def test_ranks_that_differ_four_times_get_most_of_what_there_is_to_gain(name):
    costs = [Cost(0.010, k) for k in (0.001, 0.002, 0.004)]
    even, best = 0.094, optimum(costs, 63)
    cluster = Cluster(costs, 63, noise=by_time(traces(name)), planners=1)
    seconds = cluster.run(1200)
    assert best == pytest.approx(0.046, abs=0.001)
    gained = (even - statistics.mean(seconds[-400:])) / (even - best)
    assert gained >= 0.7
