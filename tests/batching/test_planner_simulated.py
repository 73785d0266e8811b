"""The agreed plan, driven through a simulated cluster without processes."""

import statistics

import pytest
from simulation import Cluster, by_row, by_time, gaussian, near_even, optimum, traces

from lightning_hetero.batching.shares import Cost, makespan, split

EXAMPLE = (0.002, 0.002, 0.004, 0.008)  # seconds per sample; each batch costs 10 ms besides; the optimum is 58 ms


class LinearCluster(Cluster):
    """Ranks that take ``10 ms + k * n`` for their share."""

    def __init__(self, speeds, total=64, every=4, noise=0.0, seed=0, ahead=None):
        costs = [Cost(0.010, k) for k in speeds]
        super().__init__(costs, total, every, gaussian(noise, seed) if noise else None, ahead)

    def run(self, steps, speeds=None):
        return super().run(steps, speeds and [Cost(0.010, k) for k in speeds])


# (new speeds, the best possible step in seconds, worked out by hand)
CHANGES = [
    ((0.002, 0.008, 0.004, 0.008), 0.074),  # one rank at a quarter: 32, 8, 16, 8 samples
    ((0.002, 0.002, 0.002, 0.002), 0.042),  # the slow ones recover: 16 each
    ((0.004, 0.004, 0.004, 0.004), 0.074),  # the fast ones at half speed
    ((0.002, 0.002, 0.004, 0.002), 0.048),  # only the slowest recovers: 18, 18, 9, 18 and one more
    ((0.010, 0.002, 0.004, 0.008), 0.078),  # the fastest becomes the slowest: 6, 33, 17, 8
    ((0.020, 0.020, 0.040, 0.080), 0.490),  # all at a tenth: the shares stay
]


@pytest.mark.parametrize("when", [51, 52, 53, 54])
@pytest.mark.parametrize(("speeds", "optimum"), CHANGES)
def test_after_a_change_of_speed_the_step_is_soon_near_the_optimum(speeds, optimum, when):
    cluster = LinearCluster(EXAMPLE)
    cluster.run(when)
    seconds = cluster.run(60, speeds)
    assert min(seconds) >= optimum - 1e-9  # the number above is the optimum
    assert max(seconds[10:]) <= 1.10 * optimum
    assert max(seconds[12:]) <= 1.05 * optimum
    assert {sum(shares) for shares in cluster.shares} == {64}


def test_a_change_under_noise_is_followed_too():
    # From fast to slow and back, 10% noise in every measurement; not told from noise by any single one.
    speeds, reversed_ = (0.001, 0.003, 0.005), (0.005, 0.003, 0.001)
    after = []
    for seed in range(20):
        cluster = LinearCluster(speeds, total=24, noise=0.1, seed=seed)
        cluster.run(40)
        seconds = cluster.run(80, reversed_)
        costs = [Cost(0.010, k) for k in reversed_]
        after.append([seconds[i] / makespan(split(24, costs), costs) for i in (0, 14, 24, 79)])
    before, soon, later, last = (statistics.median(column) for column in zip(*after, strict=True))
    assert before > 2
    assert soon <= 1.1
    assert later <= 1.05
    assert last <= 1.05
    assert max(row[-1] for row in after) <= 1.25


# -- the first shares ----------------------------------------------------------------------------------------

UNEQUAL = [Cost(0.010 / speed, 0.004 / speed) for speed in (0.8, 0.4, 0.2, 0.2)]  # even 370 ms, (35, 16, 7, 6) 190 ms


def first_steps(noise: float, apart: int = 1) -> tuple[float, float, float]:
    """Of runs of 72 steps: the best time over that of all steps, of the 16th, and of the mean after 40%; medians."""
    found, best = [], optimum(UNEQUAL, 64)
    for seed in range(9):
        cluster = Cluster(UNEQUAL, noise=gaussian(noise, seed), apart=apart)
        seconds = cluster.run(72)
        found.append((72 * best / max(cluster.exact), best / seconds[15], best / statistics.mean(seconds[29:])))
    whole, soon, later = (statistics.median(column) for column in zip(*found, strict=True))
    return whole, soon, later


@pytest.mark.parametrize("apart", [1, 4, 12])
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.02])
def test_first_shares_are_corrected_soon(noise: float, apart: int) -> None:
    """Three even steps and one of 205 ms cost 555 ms more than the best ones: 13680 ms of 14235, or 0.961."""
    whole, soon, later = first_steps(noise, apart)
    assert whole >= 0.95
    assert soon >= 0.98
    assert later >= 0.98


def test_under_much_noise_most_of_the_samples_are_there_too() -> None:
    assert first_steps(0.1)[0] >= 0.93


@pytest.mark.parametrize("apart", [1, 12])
def test_the_mutant_without_early_meetings(monkeypatch: pytest.MonkeyPatch, apart: int) -> None:
    monkeypatch.setattr("simulation.OPENING", ())
    assert first_steps(0.0, apart)[0] < 0.94


def test_the_mutant_that_corrects_only_what_is_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_hetero.batching.planner.Planner.CORRECT", 1.0)
    monkeypatch.setattr("lightning_hetero.batching.planner.Plan.held_back", lambda plan, total: False)
    assert first_steps(0.02)[1] < 0.98


def test_with_prefetching_workers_it_only_takes_that_much_longer():
    cluster = LinearCluster(EXAMPLE, ahead=[4, 0, 7, 2])
    seconds = cluster.run(60)
    assert seconds[8] == pytest.approx(0.138)  # steps that are already drawn stay as they were
    assert max(seconds[30:]) <= 1.05 * 0.058
    assert max(cluster.run(60, CHANGES[0][0])[24:]) <= 1.05 * 0.074


@pytest.mark.long(after=1)
@pytest.mark.parametrize("seed", range(4))
def test_under_noise_the_shares_neither_oscillate_nor_wander(seed):
    cluster = LinearCluster(EXAMPLE, noise=0.10, seed=seed)
    cluster.run(100)
    plans = len(cluster.plans)
    seconds = cluster.run(900)
    assert len(cluster.plans) - plans <= 0.06 * 900 / 4  # of the pulses
    assert sum(seconds) / 900 <= 1.05 * 0.058
    assert all(abs(n - best) <= 0.25 * best + 2 for n, best in zip(cluster.shares[-1], (24, 24, 11, 5), strict=True))


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


@pytest.mark.parametrize("every", [1, 2, 8])
def test_other_intervals_between_reports_reach_the_optimum_too(every):
    cluster = LinearCluster(EXAMPLE, every=every)
    assert cluster.run(60)[-20:] == pytest.approx([0.058] * 20)
    assert max(cluster.run(60, CHANGES[0][0])[-20:]) <= 1.05 * 0.074
