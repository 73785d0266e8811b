"""The agreed plan, driven through a simulated cluster without processes."""

import statistics

import pytest
import simulation

from lightning_hetero.batching.shares import Cost, makespan, split

EXAMPLE = (0.002, 0.002, 0.004, 0.008)  # seconds per sample; each batch costs 10 ms besides; the optimum is 58 ms


class Cluster(simulation.Cluster):
    """Ranks that take ``10 ms + k * n`` for their share."""

    def __init__(self, speeds, total=64, every=4, noise=0.0, seed=0, ahead=None):
        costs = [Cost(0.010, k) for k in speeds]
        super().__init__(costs, total, every, simulation.gaussian(noise, seed) if noise else None, ahead)

    def run(self, steps, speeds=None):
        return super().run(steps, speeds and [Cost(0.010, k) for k in speeds])


# -- the simulated cluster ---------------------------------------------------------------------------


def test_from_an_even_start_to_the_optimum_within_few_pulses():
    cluster = Cluster(EXAMPLE)
    seconds = cluster.run(40)
    assert cluster.shares[0] == [16] * 4
    assert seconds[0] == pytest.approx(0.138)
    assert seconds[12] <= 0.058 * 1.05
    assert seconds[24:] == pytest.approx([0.058] * 16)
    assert cluster.shares[-1][:2] == [24, 24]


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
    cluster = Cluster(EXAMPLE)
    cluster.run(when)
    seconds = cluster.run(60, speeds)
    assert min(seconds) >= optimum - 1e-9  # the number above is the optimum
    assert max(seconds[10:]) <= 1.10 * optimum
    assert max(seconds[12:]) <= 1.05 * optimum


def test_a_change_under_noise_is_followed_too():
    # From fast to slow and back, 10% noise in every measurement; not told from noise by any single one.
    speeds, reversed_ = (0.001, 0.003, 0.005), (0.005, 0.003, 0.001)
    after = []
    for seed in range(20):
        cluster = Cluster(speeds, total=24, noise=0.1, seed=seed)
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


@pytest.mark.parametrize("every", [1, 2, 8])
def test_other_intervals_between_reports_reach_the_optimum_too(every):
    cluster = Cluster(EXAMPLE, every=every)
    assert cluster.run(60)[-20:] == pytest.approx([0.058] * 20)
    assert max(cluster.run(60, CHANGES[0][0])[-20:]) <= 1.05 * 0.074


def test_with_prefetching_workers_it_only_takes_that_much_longer():
    cluster = Cluster(EXAMPLE, ahead=[4, 0, 7, 2])
    seconds = cluster.run(60)
    assert seconds[8] == pytest.approx(0.138)  # steps that are already drawn stay as they were
    assert max(seconds[30:]) <= 1.05 * 0.058
    assert max(cluster.run(60, CHANGES[0][0])[24:]) <= 1.05 * 0.074


@pytest.mark.long(after=1)
@pytest.mark.parametrize("seed", range(4))
def test_under_noise_the_shares_neither_oscillate_nor_wander(seed):
    cluster = Cluster(EXAMPLE, noise=0.10, seed=seed)
    cluster.run(100)
    plans = len(cluster.plans)
    seconds = cluster.run(900)
    assert len(cluster.plans) - plans <= 0.06 * 900 / 4  # of the pulses
    assert sum(seconds) / 900 <= 1.05 * 0.058
    assert all(abs(n - best) <= 0.25 * best + 2 for n, best in zip(cluster.shares[-1], (24, 24, 11, 5), strict=True))


def test_equal_ranks_under_noise_stay_even():
    even, plans, seconds = 0, 0, []
    for seed in range(8):
        cluster = Cluster([0.002] * 4, noise=0.10, seed=seed)
        seconds += cluster.run(300)
        even += sum(shares == [16] * 4 for shares in cluster.shares)
        plans += len(cluster.plans)
    assert even >= 0.85 * 8 * 300
    assert plans <= 0.03 * 8 * 300 / 4
    assert sum(seconds) / len(seconds) <= 1.01 * 0.042


def test_equal_ranks_without_noise_never_change():
    cluster = Cluster([0.002] * 5, total=64)
    cluster.run(60)
    assert cluster.plans == []
    assert cluster.shares == [[13, 13, 13, 13, 12]] * 60


def test_whatever_happens_the_global_batch_stays():
    cluster = Cluster(EXAMPLE, total=61, noise=0.1, seed=3)
    for speeds, _ in CHANGES:
        cluster.run(40, speeds)
    assert len(cluster.plans) > 2
    assert {sum(shares) for shares in cluster.shares} == {61}
