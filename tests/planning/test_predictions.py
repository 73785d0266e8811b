"""Predictions against simulated rings, measured figures, bounds, and the strategies."""

import inspect
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

import lightning_hetero.strategies
from lightning_hetero.algorithms.topologies import MATCHINGS, rule_of, sends
from lightning_hetero.batching.shares import Cost, makespan
from lightning_hetero.comm import all_reduce
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.planning.cluster import Cluster, LinkModel
from lightning_hetero.planning.plan import efficiencies
from lightning_hetero.planning.predictions import AVERAGES, CENTERS, DASO, PAIRS, WIRES, predictions
from lightning_hetero.planning.strategy_choice import AutoLimits, changes, choose
from lightning_hetero.strategies.table import ENTRIES

WITHIN = LinkModel(2e-5, 5e9)


def cluster(nodes=(2, 2), speeds=(1.0,), size=8.6e6, rate=25e6, latency=2e-4, samples=64, step=0.075, hidden=0.5):
    """Ranks of given speeds, each with a step of so many seconds on an even share if its speed is 1."""
    each = samples / sum(nodes)
    costs = iter([Cost(0.1 * step / s, 0.9 * step / each / s) for _ in range(sum(nodes)) for s in speeds])
    return Cluster(
        tuple(tuple(next(costs) for _ in range(count)) for count in nodes),
        samples,
        size,
        WITHIN,
        LinkModel(latency, rate),
        hidden,
    )


def by_name(some_cluster, every=16, wire="fp32"):
    return {one.name: one for one in predictions(some_cluster, every, wire)}


# -- rings, played through -----------------------------------------------------------------------------------


def ring(nodes, size):
    """Bytes that leave each node when all ranks reduce ``size`` bytes in a ring, in 2 (P - 1) rounds of parts."""
    node_of = [node for node, count in enumerate(nodes) for _ in range(count)]
    world, left = len(node_of), [0.0] * len(nodes)
    for _ in range(2 * (world - 1)):
        for rank in range(world):
            if node_of[rank] != node_of[(rank + 1) % world]:
                left[node_of[rank]] += size / world
    return left


@pytest.mark.parametrize("nodes", [(1, 1), (2, 2), (4, 4), (2, 2, 2), (1, 1, 1, 1), (4,)])
def test_bytes_are_those_of_a_ring_that_is_played_through(nodes):
    found = by_name(cluster(nodes))
    assert found["ddp"].sent == pytest.approx(max(ring(nodes, 8.6e6)))
    across = max(ring((1,) * len(nodes), 8.6e6))
    assert found["hetero_node"].sent == pytest.approx(across / 16)
    assert found["hetero_daso"].sent == pytest.approx(across / 4)
    assert found["hetero_easgd"].sent == pytest.approx(max(ring(nodes, 8.6e6)) / 16)


def test_a_ring_takes_as_many_rounds_as_it_has_when_played_through():
    way, members, size = LinkModel(0.003, 1e6), 5, 1e6
    clock = 0.0
    for _ in range(members - 1):  # each sends a part to the next one, twice around
        clock += 2 * (way.latency + size / members / way.bandwidth)
    assert way.all_reduce(size, members) == pytest.approx(clock)
    assert way.all_reduce(size, 1) == 0


# -- gradients behind a backward pass ------------------------------------------------------------------------


def after_the_pass(count, seconds, work, hidden):
    """Simulate a pass: buckets are ready one by one in its last part, and are sent one after the other."""
    free = 0.0
    for bucket in range(count):
        ready = work * (1 - hidden) + work * hidden * (bucket + 1) / count
        free = max(free, ready) + seconds / count
    return free - work


@pytest.mark.parametrize("count", [1, 2, 8, 64])
@pytest.mark.parametrize("seconds", [0.01, 0.2, 1.0, 5.0])
def test_gradients_are_exposed_as_when_their_buckets_are_played_through(count, seconds):
    some_cluster = cluster(size=count * all_reduce.DEFAULT * all_reduce.MEBIBYTE, hidden=0.6)
    found = some_cluster.exposed(seconds, 1.0, by_link=False)
    assert found == pytest.approx(after_the_pass(count, seconds, 1.0, 0.6), abs=min(seconds, 0.6) / count + 1e-9)
    assert found >= seconds / count - 1e-9  # the last bucket
    assert count > 1 or found == pytest.approx(seconds)


@given(some.floats(1e-4, 100.0), some.floats(1e6, 1e9))
def test_buckets_by_the_link_are_as_large_as_those_that_are_chosen_in_training(seconds, size):
    some_cluster = cluster(size=size, step=1e-9)  # all buckets but the last are sent before the end of the pass
    chosen = all_reduce.AllReduceTime(0.0, seconds / size).bucket_mib() or all_reduce.DEFAULT
    last = replace(some_cluster, hidden=1.0).exposed(seconds, 1e6) / seconds * size
    assert last <= size
    # A power of 2 there: up to half as large.
    assert (
        last == pytest.approx(size)
        or chosen * all_reduce.MEBIBYTE <= last * (1 + 1e-9) < 2.1 * chosen * all_reduce.MEBIBYTE
    )


# -- what was measured ---------------------------------------------------------------------------------------


#: docs/benchmarks.md, "Slow links between nodes": time per step over that with no exchange, by delay (70 ms a step).
MEASURED = {"hetero_daso": (1.06, 4, "bf16"), "hetero_node": (1.54, 8, "fp32"), "hetero_diloco": (1.24, 16, "fp32")}


@pytest.mark.parametrize("name", MEASURED)
def test_ratios_that_were_measured_on_an_emulated_cluster(name):
    ratio, every, wire = MEASURED[name]
    floor = 0.073 / 0.79  # seconds of "no exchange", with gradients within nodes, measured as well
    found = by_name(cluster(step=floor), every, wire)[name]
    assert found.step / floor == pytest.approx(ratio, rel=0.08)


def test_ddp_as_it_was_measured():
    floor = 0.073 / 0.79
    found = by_name(cluster(step=0.073, hidden=0.0))["ddp"]
    assert found.step / floor == pytest.approx(6.67, rel=0.08)


# -- bounds --------------------------------------------------------------------------------------------------


clusters = some.builds(
    cluster,
    nodes=some.lists(some.integers(1, 4), min_size=1, max_size=4).map(tuple),
    speeds=some.lists(some.floats(0.1, 4), min_size=1, max_size=3).map(tuple),
    size=some.floats(1e4, 1e10),
    rate=some.floats(1e5, 1e11),
    latency=some.floats(0, 0.1),
    samples=some.integers(16, 4096),
    step=some.floats(1e-3, 10),
)


@given(clusters, some.integers(1, 1000), some.sampled_from(list(WIRES)))
def test_no_strategy_is_faster_than_its_work(some_cluster, every, wire):
    found = predictions(some_cluster, every, wire)
    assert found == sorted(found, key=lambda one: (one.seldom, -one.speed))
    for one in found:
        assert math.isfinite(one.step)
        assert one.exposed >= -1e-12
        assert one.speed == pytest.approx(some_cluster.samples / one.step)
        assert one.efficiency == pytest.approx(one.speed / some_cluster.independent_speed)
        if one.name == "ddp":
            assert one.step >= some_cluster.even
        else:  # the slowest rank has its share to do, in asynchronous strategies too
            assert one.step >= some_cluster.split * (1 - 1e-9)


@given(clusters, some.integers(2, 100))
def test_an_exchange_takes_the_processor_where_it_is_hidden_too(some_cluster, every):
    often, slow = (by_name(replace(some_cluster, handling=rate), every) for rate in (1e30, 1e6))
    seconds = some_cluster.size / 1e6
    for name, steps in (("hetero_node", every), ("hetero_daso", 4), ("hetero_gossip", every)):
        assert slow[name].step - often[name].step == pytest.approx(seconds / steps)
    assert slow["hetero_ddp"].step == often["hetero_ddp"].step


@given(clusters)
def test_splitting_by_speed_never_loses_and_a_faster_link_neither(some_cluster):
    found = by_name(some_cluster)
    assert found["hetero_ddp"].step <= found["ddp"].step * (1 + 1e-9)
    way = some_cluster.between
    faster = by_name(replace(some_cluster, between=LinkModel(way.latency, 2 * way.bandwidth)))
    assert all(faster[name].step <= one.step * (1 + 1e-9) for name, one in found.items())


def test_every_strategy_is_there_and_split_is_the_best_one():
    some_cluster = cluster(speeds=(1.0, 0.5))
    found = by_name(some_cluster)
    # Not predicted: one is for one machine only, and the other becomes another strategy.
    elsewhere = {"hetero_easgd_hogwild", "hetero_auto"}
    assert set(found) - {"ddp", "hetero_diloco (streaming)"} == {entry.name for entry in ENTRIES} - elsewhere
    assert some_cluster.split == makespan(some_cluster.shares, some_cluster.ranks) < some_cluster.even
    for one in found.values():
        assert one.name.removesuffix(" (streaming)") == "ddp" or "Strategy(" in one.strategy or "hetero" in one.strategy


# -- gossip ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "size"), [(2, 1), (2, 2), (2, 4), (4, 1), (4, 2)])
def test_pairs_meet_within_nodes_and_between_them_as_often_as_when_they_are_drawn(nodes, size):
    world, rule, rounds = nodes * size, rule_of("random", MATCHINGS, "x"), 4000
    waited = sent = 0.0
    for number in range(rounds):
        pairs = sends(rule, range(world), number, 0)
        crossing = sum(pairs[rank][0] // size != rank // size for rank in range(size))  # of the first node
        sent += crossing
        waited += max(2e-4 + crossing * 8.6e6 / 25e6 - 0.075, 0.0) if pairs[0][0] >= size else 0.0
    found = by_name(replace(cluster((size,) * nodes), handling=1e30), every=8)["hetero_gossip"]
    assert found.exposed == pytest.approx(waited / rounds / 8, rel=0.1)
    assert found.sent == pytest.approx(8.6e6 * sent / rounds / 8, rel=0.1)


def test_asynchronous_gossip_waits_for_nobody_and_is_no_advice_where_it_could_hardly_exchange():
    some_cluster = replace(cluster(), handling=1e30)
    for rate, seldom in ((125e6, False), (12.5e6, False), (1e6, True)):
        slower = replace(some_cluster, between=LinkModel(2e-4, rate))
        found = by_name(slower)["hetero_gossip_async"]
        assert found.step == pytest.approx(some_cluster.split)
        assert found.sent <= rate * found.step  # per direction
        assert found.seldom == seldom
        assert (predictions(slower)[-1].name == "hetero_gossip_async") == seldom
    assert choose(slower, 100.0, AutoLimits()).prediction.name != "hetero_gossip_async"


# -- what would help, and scaling -----------------------------------------------------------------------------


def test_on_a_slow_link_the_link_helps_and_on_a_fast_one_with_a_slow_rank_that_rank():
    first, *_ = changes(cluster(rate=1e5), 16, "fp32")
    assert first.gain > 2
    assert "a link ten times as fast" in [one.what for one in changes(cluster(rate=1e5), 16, "fp32") if one.gain > 2]
    gains = {one.what: one.gain for one in changes(cluster(nodes=(1, 1, 1, 1), speeds=(1, 1, 1, 0.5), rate=1e12))}
    assert gains["the slowest ranks as fast as the fastest"] == pytest.approx(4 / 3.5, rel=0.05)
    assert gains["a link ten times as fast"] == pytest.approx(1, abs=0.02)


def test_weak_scaling_keeps_the_samples_of_a_rank_and_the_kinds_of_nodes():
    some_cluster = cluster(nodes=(2, 1), speeds=(1.0, 0.5, 2.0), samples=48)
    grown = some_cluster.with_nodes(5)
    assert [len(node) for node in grown.nodes] == [2, 1, 2, 1, 2]
    assert grown.samples == 8 * 16
    curves = efficiencies(some_cluster, ["ddp", "hetero_daso"], 12, 16, "fp32")
    assert list(curves["ddp"]) == [2, 3, 6, 12, 18]  # ranks of 1, 2, 4, 8 and 12 nodes
    assert all(0 < value <= 1.2 for curve in curves.values() for value in curve.values())


@pytest.mark.parametrize("handling", [0.0, -1.0, math.inf, math.nan])
def test_a_rate_of_packing_that_cannot_be_is_refused(handling):
    with pytest.raises(ConfigurationError, match="packed per second: give a number above 0"):
        replace(cluster(), handling=handling)


@pytest.mark.parametrize(("nodes", "samples"), [((), 8), (((),), 8), (((Cost(0, 1),) * 4,), 3)])
def test_a_cluster_that_cannot_be_is_refused(nodes, samples):
    with pytest.raises(ConfigurationError):
        Cluster(nodes, samples, 1e6, WITHIN, WITHIN)


KINDS = {kind.name: kind for kind in (*AVERAGES, DASO, *CENTERS, *PAIRS)}
STRATEGIES = vars(lightning_hetero.strategies)


def of_two_nodes(rate=1e6):
    return Cluster(((Cost(0.01, 0.001),) * 2,) * 2, 128, 8.6e6, LinkModel(2e-5, 5e9), LinkModel(2e-4, rate))


def takes(kind, wire):
    try:
        STRATEGIES[kind.strategy](**{**kind.given(16), "wire": wire})
    except ConfigurationError:
        return False
    except TypeError as error:
        return "wire" not in str(error)  # it has no such option
    return True


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_its_wires_are_those_that_the_strategy_takes(kind):
    assert list(kind.wires) == ([wire for wire in WIRES if takes(kind, wire)] or ["fp32"])


@pytest.mark.parametrize("every", [1, 2, 3, 16])
@pytest.mark.parametrize("wire", WIRES)
def test_every_advice_can_be_made_with_the_wire_that_it_was_predicted_with(every, wire):
    found, whole = ({one.name: one for one in predictions(of_two_nodes(), every, some)} for some in (wire, "fp32"))
    for name, kind in KINDS.items():
        if name not in found:
            continue
        one, narrow = found[name], wire in kind.wires
        made = eval(one.strategy, STRATEGIES)
        assert ("wire" in one.options) == (narrow and wire != "fp32")
        if "wire" in inspect.signature(type(made)).parameters:
            assert made.algorithm.wire == (wire if narrow else "fp32")
        if kind.repeatable:  # an asynchronous one sends as much as the link carries
            assert one.sent == pytest.approx(whole[name].sent * (WIRES[wire] if narrow else 1.0))
        assert one.step <= whole[name].step


def test_a_streaming_exchange_that_is_over_before_its_next_one_needs_two_steps():
    assert [any("streaming" in one.name for one in predictions(of_two_nodes(), every)) for every in (1, 2)] == [
        False,
        True,
    ]


@pytest.mark.parametrize("name", ["hetero_gossip", "hetero_gossip_async", "hetero_easgd_async"])
def test_hetero_auto_goes_on_with_the_wire_that_was_wished_for(name, monkeypatch):
    monkeypatch.setattr("lightning_hetero.planning.strategy_choice.CANDIDATES", (name,))
    some_cluster = of_two_nodes(rate=3e6)
    assert choose(some_cluster, 100.0, AutoLimits(gain=0.0, wire="bf16")).prediction.options["wire"] == "bf16"
    assert "wire" not in choose(some_cluster, 100.0, AutoLimits(gain=0.0, wire="int8")).prediction.options


def test_gradients_within_a_replica_count_as_exposed():
    """1.3 billion parameters on 64 nodes of 8 ranks: a step of 0.485 s of work takes many seconds."""
    ranks = [Cost(0.04 / speed, 0.36 / 32 / speed) for speed in (1.0, 1.0, 0.5)]
    nodes = tuple(tuple(ranks[(8 * node + i) % 3] for i in range(8)) for node in range(64))
    some_cluster = Cluster(nodes, 32 * 512, 5.2e9, LinkModel(2e-5, 5e9), LinkModel(2e-4, 125e6))
    for one in predictions(some_cluster):
        work = some_cluster.even if one.name == "ddp" else some_cluster.split
        assert one.step - one.exposed == pytest.approx(work)
    inside = 14 * (5.2e9 / 8 / 5e9 + 2e-5)  # a ring of 8, of which half a step hides some
    node = next(one for one in predictions(some_cluster) if one.name == "hetero_node")
    across = 126 * (5.2e9 / 64 / 125e6 + 2e-4)
    expected = inside - some_cluster.split / 2 + across / 16 + 5.2e9 / 5e8 / 16
    assert node.exposed == pytest.approx(expected, rel=1e-6)


DEVICES = (Path(__file__).parents[2] / "docs" / "devices.md").read_text()


def test_memory_is_that_of_the_table_whose_figures_are_counted():
    """The table is in docs/devices.md; test_device_memory.py measures its figures."""
    rows = re.findall(r"^\| (`hetero_.*?) \| (\d).*? \| (\d+)", DEVICES, re.M)
    gradients = next(int(device) + int(host) for names, device, host in rows if "replicas of several" in names)
    listed = {name: int(device) + int(host) for names, device, host in rows for name in re.findall(r"`(\w+)`", names)}
    one_rank = by_name(cluster(nodes=(1, 1)))
    several = by_name(cluster(nodes=(2, 2)))
    size = cluster(nodes=(1, 1)).size / 4
    kinds = {kind.name.removesuffix(" (streaming)"): kind for kind in KINDS.values()}
    listed["hetero_measgd_async"] = listed.get("hetero_measgd_async", listed["hetero_easgd_async"])
    for name, kind in kinds.items():
        assert one_rank[kind.name].kept == pytest.approx(listed[name] * size), name
        more = gradients if kind.nodes else 0
        assert several[kind.name].kept == pytest.approx((listed[name] + more) * size), name
    assert several["hetero_ddp"].kept == pytest.approx(gradients * size)
