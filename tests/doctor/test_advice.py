"""Suggestions, against arithmetic by hand and the choice of ``hetero_auto``."""

import re
from pathlib import Path

import pytest

from lightning_hetero.batching.shares import Cost
from lightning_hetero.doctor import Advice, SlowestLinks, advise
from lightning_hetero.planning.cluster import Cluster, LinkModel, MeasuredLink, pairs_to_measure, slowest_link
from lightning_hetero.planning.predictions import predictions
from lightning_hetero.planning.strategy_choice import AutoLimits, choose

MB = 10**6
ALIKE = [Cost(0.004, 0.001)] * 4  # 20 ms for 16 samples
NODES = ((0, 1), (2, 3))
FAST = LinkModel(1e-5, 5e9)
MEMORY = LinkModel(2e-5, 5e9)  # a cluster in which no two ranks have a link


def taken(cluster: Cluster, **wish: float) -> str:
    """Strategy that ``hetero_auto`` goes on with, if steps of ``hetero_ddp`` take as long as predicted."""
    measured = next(one.step for one in predictions(cluster) if one.name == "hetero_ddp")
    found = choose(cluster, measured, AutoLimits(**wish)).prediction
    return '"hetero_ddp"' if found is None else found.strategy


SHAPES = {"1 node": ((0, 1, 2, 3),), "2x1": ((0,), (1,)), "2x2": NODES, "4x1": ((0,), (1,), (2,), (3,))}
RATES = {"20 Mbit": 2.5e6, "200 Mbit": 25e6, "1 Gbit": 125e6, "10 Gbit": 1.25e9}


def advised(shape: str, rate: str, slow: float) -> tuple[Advice, Cluster]:
    """The doctor's advice, and the same cluster by hand: every second rank takes ``slow`` times as long."""
    nodes, outside = SHAPES[shape], LinkModel(2e-4, RATES[rate])
    speeds = [Cost(0.010 * factor, 0.0056 * factor) for factor in (1.0, slow)] * 2
    costs = speeds[: sum(map(len, nodes))]
    links = SlowestLinks(FAST if len(nodes) < len(costs) else None, outside if len(nodes) > 1 else None)
    if shape == "2x2":
        by_hand = ((costs[0], costs[1]), (costs[2], costs[3]))
    else:
        by_hand = (tuple(costs),) if shape == "1 node" else tuple((cost,) for cost in costs)
    inside, out = links.within or MEMORY, links.between or MEMORY
    return advise(costs, nodes, 16, 7_500_000, links), Cluster(by_hand, 16 * len(costs), 7.5e6, inside, out)


@pytest.mark.parametrize("slow", [1.0, 2.0], ids=["alike", "unequal"])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_doctor_names_what_hetero_auto_chooses(shape: str, rate: str, slow: float) -> None:
    advice, cluster = advised(shape, rate, slow)
    assert advice.strategy == taken(cluster)
    assert eval(advice.strategy, vars(__import__("lightning_hetero.strategies").strategies)) is not None


def test_this_table_has_more_than_one_answer() -> None:
    found = {advised(shape, rate, slow)[0].strategy for shape in SHAPES for rate in RATES for slow in (1.0, 2.0)}
    assert '"hetero_ddp"' in found
    assert len(found) >= 3


def test_the_example_in_the_docs_follows_the_same_rule() -> None:
    text = (Path(__file__).parents[2] / "docs" / "choosing.md").read_text()
    sentences = " ".join(text.split())
    rank, link = Cost(0.03, 0.27 / 64), LinkModel(0.0002, 125e6)
    rows = re.findall(r"^\| ([\d.]+) million \| (.*?) \| ([\d.]+) s \| ([\d.]+) s \|$", text, re.MULTILINE)
    assert len(rows) == 5
    for million, strategy, seconds, step in rows:
        cluster = Cluster(((rank,), (rank,)), 128, 4e6 * float(million), MEMORY, link)
        assert cluster.split == pytest.approx(0.3)
        assert float(seconds) == pytest.approx(2 * (cluster.size / 2 / link.bandwidth + link.latency), rel=0.02)
        exact = next(one for one in predictions(cluster) if one.name == "hetero_ddp")
        assert float(step) == pytest.approx(exact.step, rel=0.02)
        assert strategy.strip("`") == taken(cluster).strip('"')
    [largest] = re.findall(r"up to about ([\d.]+) million parameters", sentences)
    for factor, exact_is_best in ((0.97, True), (1.03, False)):
        cluster = Cluster(((rank,), (rank,)), 128, 4e6 * float(largest) * factor, MEMORY, link)
        assert (taken(cluster) == '"hetero_ddp"') == exact_is_best
    pattern = r"([\d.]+) times as long as 16 steps, and ([\d.]+) times as long as 500 steps"
    [(often, rarely)] = re.findall(pattern, sentences)
    assert (float(often), float(rarely)) == pytest.approx((32.0 / (16 * 0.3), 32.0 / (500 * 0.3)), rel=0.02)


def test_the_arithmetic_is_shown() -> None:
    # Ranks of 1 and 3 ms per sample, 20 each: 60 ms, or 30 ms for 30 and 10. 3 MB in one bucket hide nothing of 1 MiB.
    costs = [Cost(0.0, 0.001), Cost(0.0, 0.003)]
    advice = advise(costs, ((0,), (1,)), 20, 3 * MB, SlowestLinks(None, LinkModel(0.001, 100 * MB)))
    text = "\n".join(advice.reasons)
    assert "Step: 60 ms with 20 samples on each rank, 30 ms if they are split by speed (30, 10): 2.00x as fast." in text
    assert "slowest link between nodes: 2 x (3.00 MB / 2 / 100.0 MB/s + 1 ms) = 32 ms, that is 1.07 steps." in text
    assert "hides them behind at most 50% of a step" in text
    assert "47 ms a step, in 17 ms (36%) of which ranks only communicate." in text  # 32 ms, less half of 30
    assert advice.strategy in text
    assert "more than 1 + gain = 1.2. If exactness matters more than time, take hetero_ddp all the same." in text


def test_too_small_a_gain_is_told() -> None:
    advice, cluster = advised("2x1", "10 Gbit", 1.0)
    assert advice.strategy == '"hetero_ddp"'
    other = taken(cluster, gain=0.0)
    assert other != '"hetero_ddp"'
    assert f"Of those that train replicas apart, {other} would take" in advice.reasons[-1]
    assert "not more than 1 + gain = 1.2, so stay exact." in advice.reasons[-1]
    nothing = advise(ALIKE[:2], ((0, 1),), 16, 4, SlowestLinks(LinkModel(0.0, 1e12), None))  # one parameter
    assert nothing.reasons[-1] == "No strategy that trains replicas apart would be faster."


def test_a_choice_that_depends_on_timing_says_so_and_what_to_take_instead() -> None:
    advice = advise(ALIKE, NODES, 16, 3 * MB, SlowestLinks(FAST, LinkModel(0.0, 100 * MB)))
    assert advice.strategy.startswith("DASO")
    [line] = [line for line in advice.reasons if "depends on timing" in line]
    cluster = Cluster(((ALIKE[0],) * 2,) * 2, 64, 3e6, FAST, LinkModel(0.0, 100e6))
    assert f"If they must not: {taken(cluster, deterministic=True)}, " in line


def test_a_link_that_is_slow_even_for_rare_exchanges_asks_for_rarer_ones() -> None:
    # 100 MB at 2.5 MB/s between two nodes: 40 s for steps of 20 ms. For a twentieth of the time, every 40,000 steps.
    advice = advise(ALIKE, NODES, 16, 100 * MB, SlowestLinks(FAST, LinkModel(0.0, 2.5 * MB)))
    text = "\n".join(advice.reasons)
    assert re.search(r"Ranks still only communicate for \d\d% of a step", text)
    assert "as rarely as every 500 steps: " in text
    cluster = Cluster(((ALIKE[0],) * 2,) * 2, 64, 100e6, FAST, LinkModel(0.0, 2.5e6))
    assert f"{taken(cluster, every=500)}, " in text


def test_what_is_not_sure_is_not_presented_as_sure() -> None:
    ranks = [Cost(0.0, 0.001), Cost(0.0, 0.003)]  # one rank is three times as slow: 200% more
    link = LinkModel(0.001, 100 * MB)
    busy = "\n".join(advise(ranks, ((0,), (1,)), 20, 3 * MB, SlowestLinks(None, link), spread=2.5).reasons)
    assert "Measurements differ by 250% from round to round, because the machine is busy. Run it again" in busy
    assert "it is not clear that any rank is slower" in busy
    assert "x as fast" not in busy
    perhaps = "\n".join(advise(ranks, ((0,), (1,)), 20, 3 * MB, SlowestLinks(None, link), spread=0.4).reasons)
    assert "Measurements differ by 40%" in perhaps
    assert "perhaps 2.00x as fast" in perhaps
    alike = "\n".join(advise(ALIKE, NODES, 16, MB, SlowestLinks(FAST, FAST), spread=0.02).reasons)
    assert "busy" not in alike
    assert "Ranks differ by 0%, and measurements of one rank by up to 2%" in alike


def test_no_share_of_zero() -> None:
    ranks = [Cost(0.0, 0.001), Cost(0.5, 0.001)]
    text = "\n".join(advise(ranks, ((0,), (1,)), 20, MB, SlowestLinks(None, FAST)).reasons)
    assert "(39, 1)" in text
    # 39 samples of rank 0 take less than the one of rank 1, 501 ms; all 40 take 40 ms.
    assert "Without rank 1 the job is 12.5" in text
    assert " times as fast (1000 samples/s against 79.8)" in text
    assert "Under hetero_ddp it gets no samples once that is sure." in text
    assert "global_batch_size=40" in text
    unsure = "\n".join(advise(ranks, ((0,), (1,)), 20, MB, SlowestLinks(None, FAST), spread=3.0).reasons)
    assert "Without rank" not in unsure
    assert "Without rank" not in "\n".join(advise(ALIKE, NODES, 16, MB, SlowestLinks(FAST, FAST)).reasons)


def test_one_node() -> None:
    fast = advise(ALIKE[:2], ((0, 1),), 16, MB, SlowestLinks(FAST, None))
    assert fast.strategy == '"hetero_ddp"'
    assert "slowest link of the node" in " ".join(fast.reasons)
    slow = advise(ALIKE[:2], ((0, 1),), 16, 10 * MB, SlowestLinks(LinkModel(0.0, 10 * MB / 0.100), None))  # five steps
    assert slow.strategy.startswith(("EASGDOverlap", "Gossip", "EASGDAsync"))
    assert "5.00 steps" in " ".join(slow.reasons)
    assert "measured over gloo" in slow.reasons[-1]


def test_one_rank() -> None:
    assert advise(ALIKE[:1], ((0,),), 16, 10 * MB, SlowestLinks(None, None)).strategy == '"hetero_ddp"'
    assert taken(Cluster(((ALIKE[0],),), 16, 10e6, MEMORY, MEMORY)) == '"hetero_ddp"'


def test_which_links_are_measured() -> None:
    assert pairs_to_measure(((0, 1, 2), (3,), (4, 5))) == ([(0, 1), (4, 5)], [(0, 3), (3, 4), (4, 0)])
    assert pairs_to_measure(((0, 1), (2,))) == ([(0, 1)], [(0, 2)])
    assert pairs_to_measure(((0,),)) == ([], [])


def test_which_link_is_slowest_depends_on_the_message() -> None:
    late, narrow = MeasuredLink((0, 1), 0.1, 1e9), MeasuredLink((1, 2), 0.001, 1e7)
    assert slowest_link([late, narrow], 1e5) == LinkModel(0.1, 1e9)  # 100 ms, and 11 ms
    assert slowest_link([late, narrow], 1e7) == LinkModel(0.001, 1e7)  # 110 ms, and 1001 ms
    assert slowest_link([], 1e6) is None
