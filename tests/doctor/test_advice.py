"""Suggestions, against arithmetic by hand."""

import re
from pathlib import Path

import pytest

from lightning_hetero.doctor.advice import HIDDEN, Slowest, advise, between_nodes
from lightning_hetero.forecast.links import Link, pairs
from lightning_hetero.workload.shares import Cost

MB = 10**6
ALIKE = [Cost(0.004, 0.001)] * 4  # 20 ms for 16 samples
NODES = ((0, 1), (2, 3))
FAST = Link((0, 1), 1e-5, 5e9)


def between(steps: float) -> Link:
    """A link over which two nodes need so many steps of 20 ms for 10 MB: each sends 10 MB in all."""
    return Link((0, 2), 0.0, 10 * MB / (steps * 0.020))


@pytest.mark.parametrize(
    ("steps", "strategy"),
    [
        (0.4, '"hetero_ddp"'),
        (0.6, 'DASOStrategy(wait="auto")'),
        (3.9, 'DASOStrategy(wait="auto")'),
        (4.1, 'DASOStrategy(global_every=8, wait="auto")'),
        (8.1, 'DASOStrategy(global_every=8, wait="auto", wire="bf16")'),
        (17.0, 'DiLoCoStrategy(tau=340, replica="node")'),  # 17 of 340 steps: 5%
    ],
)
def test_a_slower_link_is_used_more_rarely(steps: float, strategy: str) -> None:
    advice = advise(ALIKE, NODES, 16, 10 * MB, Slowest(FAST, between(steps)))
    assert advice.strategy == strategy
    assert f"that is {steps:.2f} steps" in " ".join(advice.reasons)
    if steps > 0.5:
        assert f"The exchange between nodes takes {steps:.1f} times as long as the step" in " ".join(advice.reasons)


def test_the_example_in_the_docs_follows_the_same_rule() -> None:
    text = (Path(__file__).parents[2] / "docs" / "choosing.md").read_text()
    step, bandwidth = 0.3, 125e6
    assert "a step of 300 ms" in text
    assert "1 GbE" in text
    rows = re.findall(r"^\| ([\d.]+) million \| (\d+) MB \| ([\d.]+) s \| ([\d.]+) \| (.*?) \|$", text, re.MULTILINE)
    assert len(rows) == 5
    for million, size, seconds, steps, strategy in rows:
        gradients = 4e6 * float(million)
        exchange = Link((0, 1), 0.0002, bandwidth).all_reduce(int(gradients), 2)
        assert float(size) == gradients / 1e6
        assert float(seconds) == pytest.approx(exchange, rel=0.02)
        assert float(steps) == pytest.approx(exchange / step, rel=0.02)
        assert strategy.strip("`") == between_nodes(exchange / step).strategy.strip('"')
    largest = HIDDEN * step * bandwidth / 4e6
    assert f"up to about {largest:.1f} million parameters" in text


def test_the_arithmetic_is_shown() -> None:
    # Ranks of 1 and 3 ms per sample, 20 each: 60 ms, or 30 ms for 30 and 10.
    costs = [Cost(0.0, 0.001), Cost(0.0, 0.003)]
    advice = advise(costs, ((0,), (1,)), 20, 3 * MB, Slowest(None, Link((0, 1), 0.001, 100 * MB)))
    text = "\n".join(advice.reasons)
    assert "Step: 60 ms with 20 samples on each rank, 30 ms if they are split by speed (30, 10): 2.00x as fast." in text
    assert "2 x (3.00 MB / 2 / 100.0 MB/s + 1 ms) = 32 ms, that is 1.07 steps." in text


def test_what_is_not_sure_is_not_presented_as_sure() -> None:
    ranks = [Cost(0.0, 0.001), Cost(0.0, 0.003)]  # one is three times as slow: 200% more
    link = Link((0, 1), 0.001, 100 * MB)
    busy = "\n".join(advise(ranks, ((0,), (1,)), 20, 3 * MB, Slowest(None, link), spread=2.5).reasons)
    assert "Measurements differ by 250% from round to round, because the machine is busy. Run it again" in busy
    assert "it is not clear that any rank is slower" in busy
    assert "x as fast" not in busy
    perhaps = "\n".join(advise(ranks, ((0,), (1,)), 20, 3 * MB, Slowest(None, link), spread=0.4).reasons)
    assert "Measurements differ by 40%" in perhaps
    assert "perhaps 2.00x as fast" in perhaps
    alike = "\n".join(advise(ALIKE, NODES, 16, MB, Slowest(FAST, FAST), spread=0.02).reasons)
    assert "busy" not in alike
    assert "Ranks differ by 0%, and measurements of one rank by up to 2%" in alike


def test_no_share_of_zero() -> None:
    ranks = [Cost(0.0, 0.001), Cost(0.5, 0.001)]
    text = "\n".join(advise(ranks, ((0,), (1,)), 20, MB, Slowest(None, FAST)).reasons)
    assert "(39, 1)" in text
    assert "Rank(s) 1: so slow" in text


def test_one_node() -> None:
    assert advise(ALIKE[:2], ((0, 1),), 16, 10 * MB, Slowest(FAST, None)).strategy == '"hetero_ddp"'
    slow = Link((0, 1), 0.0, 10 * MB / 0.100)  # five steps
    advice = advise(ALIKE[:2], ((0, 1),), 16, 10 * MB, Slowest(slow, None))
    assert advice.strategy == 'EASGDOverlapStrategy(tau=10, moving_rate="auto")'
    assert "5.00 steps" in " ".join(advice.reasons)


def test_one_rank() -> None:
    assert advise(ALIKE[:1], ((0,),), 16, 10 * MB, Slowest(None, None)).strategy == '"hetero_ddp"'


def test_an_all_reduce_sends_twice_the_vector_but_for_one_part() -> None:
    assert Link((0, 1), 0.002, 100.0).all_reduce(300, 3) == pytest.approx(4 * (300 / 3 / 100 + 0.002))
    assert Link((0, 1), 0.002, 100.0).all_reduce(300, 1) == 0


def test_which_links_are_measured() -> None:
    assert pairs(((0, 1, 2), (3,), (4, 5))) == ([(0, 1), (4, 5)], [(0, 3), (3, 4), (4, 0)])
    assert pairs(((0, 1), (2,))) == ([(0, 1)], [(0, 2)])
    assert pairs(((0,),)) == ([], [])
