"""What the arithmetic believes of strategies, against the strategies themselves."""

import inspect

import pytest

import lightning_hetero.strategies
from lightning_hetero.batching.shares import Cost
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.planning.cluster import Cluster, LinkModel
from lightning_hetero.planning.predictions import AVERAGES, CENTERS, DASO, PAIRS, WIRES, predictions
from lightning_hetero.planning.strategy_choice import AutoLimits, choose

KINDS = {kind.name: kind for kind in (*AVERAGES, DASO, *CENTERS, *PAIRS)}
STRATEGIES = vars(lightning_hetero.strategies)


def cluster(rate=1e6):
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
    found, whole = ({one.name: one for one in predictions(cluster(), every, some)} for some in (wire, "fp32"))
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
    assert [any("streaming" in one.name for one in predictions(cluster(), every)) for every in (1, 2)] == [False, True]


@pytest.mark.parametrize("name", ["hetero_gossip", "hetero_gossip_async", "hetero_easgd_async"])
def test_hetero_auto_goes_on_with_the_wire_that_was_wished_for(name, monkeypatch):
    monkeypatch.setattr("lightning_hetero.planning.strategy_choice.CANDIDATES", (name,))
    some_cluster = cluster(rate=3e6)
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
