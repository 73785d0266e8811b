"""Predicted steps of strategies with a center, against a simulation of ranks and a center, visit by visit."""

import heapq
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from lightning_hetero.batching.shares import Cost
from lightning_hetero.planning.cluster import Cluster, LinkModel
from lightning_hetero.planning.predictions import predictions
from lightning_hetero.planning.strategy_choice import AutoLimits, choose

SIZE, VISITS = 8.6e6, 60


def cluster(nodes=(1, 1), speeds=(1.0,), rate=2.5e6, step=0.07, given=()):
    """Ranks of given speeds, each with 16 samples on average, and a step of so many seconds at speed 1."""
    world = sum(nodes)
    costs = iter([Cost(0.0, step / 16 / speeds[rank % len(speeds)]) for rank in range(world)])
    ranks = tuple(tuple(next(costs) for _ in range(count)) for count in nodes)
    return Cluster(ranks, 16 * world, SIZE, LinkModel(2e-5, 5e9), LinkModel(2e-4, rate), handling=1e30, given=given)


def visits_of(some_cluster, fewer=1.0):
    ways = [some_cluster.between if number else some_cluster.within for number in range(len(some_cluster.nodes))]
    return [
        2 * (w.latency + fewer * SIZE / w.bandwidth) for w, n in zip(ways, some_cluster.nodes, strict=True) for _ in n
    ]


def played(paces, visits, every, *, behind, in_turn=False):
    """Seconds of a step of the last rank. The center serves one visit at a time, first come, first served.

    Args:
        paces: seconds of a step of each rank.
        visits: of a visit of each rank.
        every: steps between two visits of a rank.
        behind: whether a visit passes behind the step before which it begins.
        in_turn: whether it serves ranks in their order instead.
    """
    last = [(every - behind) * pace for pace in paces]  # when each asks to be served
    queue, count, free = [(time, rank) for rank, time in enumerate(last)], [0] * len(paces), 0.0
    heapq.heapify(queue)
    done, turn = [0.0] * len(paces), 0
    while queue:
        if in_turn:
            time, rank = next(one for one in queue if one[1] == turn)
            queue.remove((time, rank))
            turn = (turn + 1) % len(paces)
        else:
            time, rank = heapq.heappop(queue)
        free = max(free, time) + visits[rank]
        done[rank] = max(free, time + paces[rank]) if behind else free
        count[rank] += 1
        if count[rank] < VISITS:
            entry = (done[rank] + (every - behind) * paces[rank], rank)
            if in_turn:
                queue.append(entry)
            else:
                heapq.heappush(queue, entry)
    return max(done) / VISITS / every


def by_name(some_cluster, every, wire="fp32"):
    return {one.name: one for one in predictions(some_cluster, every, wire)}


KINDS = {
    "hetero_easgd_async": {"behind": True},
    "hetero_diloco_async": {"behind": False},
    "hetero_easgd_round_robin": {"behind": False, "in_turn": True},
}


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=60)
@given(
    nodes=some.lists(some.integers(1, 3), min_size=2, max_size=4).map(tuple),
    speeds=some.lists(some.sampled_from([1.0, 0.5, 0.25]), min_size=1, max_size=3).map(tuple),
    rate=some.floats(1e6, 1e9),
    every=some.integers(1, 20),
)
def test_a_step_is_that_of_the_slowest_rank_as_when_visits_are_played_through(name, nodes, speeds, rate, every):
    some_cluster = cluster(nodes, speeds, rate)
    truth = played(some_cluster.paces, visits_of(some_cluster), every, **KINDS[name])
    found = by_name(some_cluster, every)[name].step
    # Ranks that come at the same moment wait a little for each other, which the arithmetic leaves out.
    assert 0.95 * found <= truth <= found + max(visits_of(some_cluster)) / every + 0.02 * found


def test_a_rank_that_comes_far_to_the_center_holds_up_the_fit_and_is_not_chosen():
    """An example: two nodes of one rank with 20 Mbit; the strategy was up to 1.8 times as slow as hetero_node."""
    some_cluster = replace(cluster(rate=2.5e6), handling=5e8)
    found = by_name(some_cluster, 16)
    visit = 2 * (2e-4 + SIZE / 2.5e6)
    assert found["hetero_easgd_async"].step == pytest.approx(0.07 + (visit - 0.07) / 16 + SIZE / 5e8 / 16, rel=1e-3)
    assert found["hetero_easgd_async"].step > 1.5 * found["hetero_node"].step
    chosen = choose(some_cluster, 10.0, AutoLimits()).prediction
    assert chosen is not None
    assert chosen.name != "hetero_easgd_async"


def test_shares_that_are_given_are_done_when_the_slowest_rank_has_done_its_own():
    some_cluster = cluster(speeds=(1.0, 0.25), rate=1e12, given=(16, 16))
    found = by_name(some_cluster, 8)
    for name in ("hetero_easgd_async", "hetero_gossip_async", "hetero_diloco_async"):
        assert found[name].step == pytest.approx(0.28, rel=1e-3)


def test_bytes_are_those_of_the_node_that_sends_most():
    some_cluster, every = cluster((2, 3, 2)), 8
    left = [0.0, 0.0, 0.0]
    for node, count in enumerate(some_cluster.nodes):
        for _ in count if node else ():
            left[node] += SIZE  # to the center
            left[0] += SIZE  # and back
    found = by_name(some_cluster, every)
    for name in KINDS:
        assert found[name].sent == pytest.approx(max(left) / every)
