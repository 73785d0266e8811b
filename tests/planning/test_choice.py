"""The choice against brute force over the predictions, and the limits of a user."""

from dataclasses import replace
from itertools import chain, combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from lightning_hetero.batching.shares import Cost
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.planning.cluster import Cluster, LinkModel
from lightning_hetero.planning.predictions import FRAGMENTS, WIRES, predictions
from lightning_hetero.planning.strategy_choice import (
    BY_LEARNING,
    CANDIDATES,
    EQUAL,
    INTERVALS,
    AutoLimits,
    changes,
    choose,
    search,
)
from lightning_hetero.strategies.table import ENTRIES


def cluster(
    rate: float, speeds: tuple[float, ...] = (1.0, 1.0), nodes: int = 2, given: tuple[int, ...] = ()
) -> Cluster:
    ranks = tuple(Cost(0.01 / speed, 0.09 / 16 / speed) for speed in speeds)
    return Cluster(
        (ranks,) * nodes, 16 * nodes * len(speeds), 10e6, LinkModel(2e-5, 5e9), LinkModel(2e-4, rate), given=given
    )


def ddp_step(some_cluster: Cluster) -> float:
    return next(one.step for one in predictions(some_cluster) if one.name == "hetero_ddp")


RATES = some.floats(1e5, 1e10)
SPEEDS = some.lists(some.sampled_from([1.0, 0.5, 0.25]), min_size=1, max_size=3).map(tuple)


@given(RATES, SPEEDS, some.integers(2, 4), some.floats(0, 2), some.booleans())
def test_it_is_among_the_fastest_that_are_allowed_or_none_gains_enough(rate, speeds, nodes, gain, deterministic):
    known = cluster(rate, speeds, nodes)
    measured = ddp_step(known)
    found = choose(known, measured, AutoLimits(gain=gain, deterministic=deterministic)).prediction
    allowed = [
        one
        for one in predictions(known)
        if one.name in CANDIDATES
        and not one.seldom
        and not (deterministic and (not one.repeatable or one.name == "hetero_daso"))
    ]
    now = known.samples / measured
    assert found is by_hand(allowed, now, gain) or found == by_hand(allowed, now, gain)


def by_hand(allowed, now, gain):
    """Drop the options that gain too little, then those much slower than another one; take the one that learns most."""
    left = [one for one in allowed if one.speed > (1 + gain) * now]
    left = [one for one in left if not any(other.speed > (1 + gain) * one.speed for other in left)]
    for tier in BY_LEARNING:
        if among := [one for one in left if one.name in tier]:
            return sorted(among, key=lambda one: (one.every, tier.index(one.name)))[0]
    return None


def test_replicas_that_learn_less_must_be_faster_by_the_gain():
    known = cluster(25e6)  # pairs in the background hide all of their exchanges, and means over nodes nearly all
    fastest = max((one for one in predictions(known) if one.name in CANDIDATES), key=lambda one: one.speed)
    assert fastest.name == "hetero_gossip_async"
    assert choose(known, ddp_step(known), AutoLimits(gain=0.2)).prediction.name == "hetero_daso"
    assert choose(known, ddp_step(known), AutoLimits(gain=0.0)).prediction == fastest


def test_a_slow_link_is_left_out_of_the_step_and_a_fast_one_is_not():
    assert choose(cluster(12.5e6), ddp_step(cluster(12.5e6)), AutoLimits()).prediction is not None
    assert choose(cluster(1e10), ddp_step(cluster(1e10)), AutoLimits()).prediction is None


def test_a_gain_over_the_model_alone_is_none_and_over_the_measurement_alone_neither():
    slow, fast = cluster(12.5e6), cluster(1e10)
    assert choose(slow, slow.split, AutoLimits()).prediction is None  # it is not as slow as the model says
    assert (
        choose(fast, 10 * fast.split, AutoLimits()).prediction is None
    )  # it is slow for a reason that the model lacks


def test_how_much_hides_is_told_by_the_measured_steps():
    """A model in one layer hides nothing, and one in many layers half of a step; arithmetic cannot know which."""
    known = cluster(100e6, (1.0,))  # 0.1 s of work, and as much for the gradients
    hides_all, hides_nothing = (
        known.split + known.exposed(known.gradients(), known.split),
        known.split + known.gradients(),
    )
    assert choose(known, hides_nothing, AutoLimits(gain=0.7)).prediction is not None
    assert choose(known, hides_all, AutoLimits(gain=0.7)).prediction is None
    stalled = choose(known, 10 * hides_nothing, AutoLimits(gain=1.0)).prediction  # nothing explains it
    assert stalled is None


def test_the_arithmetic_is_told():
    known = cluster(12.5e6)
    found = choose(known, 2.0, AutoLimits())
    assert "A step takes 2 s, of which 100 ms is work" in found.why
    assert f"{known.gradients():.3g} s" in found.why
    assert found.prediction is not None
    assert found.prediction.strategy in found.why


def test_shares_that_are_given_count():
    even = cluster(1e10, (1.0, 0.5), given=(16, 16, 16, 16))
    assert even.split == pytest.approx(even.even)
    assert cluster(1e10, (1.0, 0.5)).split < even.split
    assert even.with_nodes(4).given == ()
    with pytest.raises(ConfigurationError, match="64 samples for 4 ranks"):
        cluster(1e10, (1.0, 0.5), given=(64,))


def test_a_model_of_few_modules_is_not_cut_into_fragments():
    known = cluster(12.5e6)
    assert choose(known, 1.2, AutoLimits()).prediction.options["fragments"] == FRAGMENTS
    assert "fragments" not in choose(known, 1.2, AutoLimits(fragments=FRAGMENTS - 1)).prediction.options


def test_each_strategy_that_is_predicted_has_its_place():
    placed = [name for tier in BY_LEARNING for name in tier]
    assert sorted(placed) == sorted(one.name for one in predictions(cluster(1e8)))
    assert set(CANDIDATES) <= set(placed)
    assert {name.partition(" ")[0] for name in CANDIDATES} <= {entry.name for entry in ENTRIES}


def test_exact_stays_whatever_is_gained():
    assert choose(cluster(1e5), 100.0, AutoLimits(exact=True)).prediction is None


# -- the search of `plan` ----------------------------------------------------------------------------------------


def everything(known: Cluster, every: int | None, wire: str | None) -> list[tuple[tuple[int, ...], object]]:
    """All options: any ranks may be left out, except that `hetero_ddp` needs a sample for each."""
    found = []
    subsets = chain.from_iterable(combinations(range(known.world), count) for count in range(known.world))
    for left_out in subsets:
        numbers = iter(range(known.world))
        nodes = (tuple(cost for cost in node if next(numbers) not in left_out) for node in known.nodes)
        fewer = replace(known, nodes=tuple(filter(None, map(tuple, nodes))))
        for steps, format_ in product(INTERVALS if every is None else [every], WIRES if wire is None else [wire]):
            found += [(left_out, one) for one in predictions(fewer, steps, format_) if not one.seldom]
    return found


@settings(max_examples=15, deadline=None)
@given(
    RATES,
    some.sampled_from([(1.0,), (1.0, 0.5), (1.0, 0.25)]),
    some.sampled_from([None, 8]),
    some.sampled_from([None, "bf16"]),
)
def test_the_cheapest_settings_of_each_strategy_and_of_these_what_learns_most(rate, speeds, every, wire):
    known = cluster(rate, speeds)
    (best, left_out), *others = search(known, every, wire)
    whole = [one for ranks, one in everything(known, every, wire) if not ranks]
    assert left_out == ()  # every rank is done with its least share long before the others
    cheapest = {}
    for name in {one.name for one in whole}:
        most = max(one.speed for one in whole if one.name == name)
        near = [one for one in whole if one.name == name and one.speed >= (1 - EQUAL) * most]
        cheapest[name] = min(near, key=lambda one: (one.every, list(WIRES).index(one.wire), -one.speed))
    exact = max(cheapest["ddp"], cheapest["hetero_ddp"], key=lambda one: one.speed)
    inexact = [one for one in cheapest.values() if not one.exact]
    assert best == (by_hand(inexact, exact.speed, AutoLimits().gain) or exact)
    assert {best.name, *(one.prediction.name for one in others)} == {one.name for one in predictions(known)}
    speeds_of_rows = [(one.prediction.seldom, -one.prediction.speed) for one in others]
    assert speeds_of_rows == sorted(speeds_of_rows)


@pytest.mark.parametrize("rate", [1e6, 1e9])
def test_a_rank_that_slows_the_job_is_left_out_as_when_all_subsets_are_tried(rate):
    slow = Cost(3.0, 0.01)  # 3 s for a single sample
    fast = Cost(0.01, 0.09 / 16)
    known = Cluster(((fast, fast), (fast, slow)), 64, 10e6, LinkModel(2e-5, 5e9), LinkModel(2e-4, rate))
    best, left_out = search(known)[0]
    assert left_out == (3,)
    most = max(one.speed for _, one in everything(known, None, None))
    assert best.speed * (1 + AutoLimits().gain) >= most
    assert search(replace(known, given=(16,) * 4))[0].left_out == ()  # given shares stay


def test_what_the_search_has_found_needs_no_change_of_settings():
    assert not [one for one in changes(cluster(12.5e6)) if "wire" in one.what or "exchange" in one.what]
