"""The verdict against cases whose answer is plain to see."""

import pytest

from lightning_hetero.callbacks.verdict import Totals, judge


def rank(
    number: int, samples: float, compute: float, data: float = 0.0, wait: float = 0.0, exchange: float = 0.0,
    network: float = 0.0,
) -> Totals:  # fmt: skip
    """A rank's 10 steps; times in seconds."""
    return Totals(number, 10, samples, data, compute, wait, exchange, network)


EVEN = [rank(0, 100, 1.0, wait=3.0), rank(1, 100, 1.0, wait=3.0), rank(2, 100, 4.0)]
BALANCED = [rank(0, 100, 1.0), rank(1, 100, 1.0), rank(2, 25, 1.0)]
STARVED = [rank(0, 100, 1.0, 0.1, wait=3.9), rank(1, 100, 1.0, 4.0), rank(2, 100, 1.2, 0.1, wait=3.7)]
FAR = [rank(i, 100, 1.0, exchange=own, network=own) for i, own in enumerate((0.1, 0.2, 3.0))]
# The fast ones wait for the slow one at the exchange, which itself takes 0.1 s from each.
MEETING = [rank(i, 100, own, exchange=4.1 - own, network=0.1) for i, own in enumerate((1.0, 1.0, 4.0))]
SLOW_WIRE = [rank(i, 100, 1.0, wait=2.0, network=2.0) for i in range(3)]
# A fast GPU at slow data is still the one that processes most.
FAST_BUT_STARVED = [rank(0, 400, 1.0, 1.0), rank(1, 100, 2.0), rank(2, 100, 1.9)]


@pytest.mark.parametrize(
    ("ranks", "lockstep", "slowest", "cause", "times"),
    [
        (EVEN, True, 2, "compute", 4.0),
        (BALANCED, True, 2, "compute", 4.0),
        (STARVED, True, 1, "data", 5.0 / 1.2),
        (FAR, False, 2, "network", 4.0 / 1.15),
        (MEETING, True, 2, "compute", 4.0),
        (SLOW_WIRE, True, None, None, 1.0),
        (FAST_BUT_STARVED, True, 1, "compute", 0.02 / 0.012),
    ],
)  # fmt: skip
def test_the_slowest_and_why(ranks: list[Totals], lockstep: bool, slowest: int, cause: str, times: float) -> None:
    verdict = judge(ranks, lockstep, automatic=False)
    assert verdict.cause == cause
    assert verdict.times == pytest.approx(times)
    assert sum(verdict.spent.values()) == pytest.approx(1)
    if cause is None:
        assert "No rank stands out" in verdict.headline
    else:
        assert verdict.slowest == slowest
        assert f"Rank {slowest} is the slowest" in verdict.headline


def test_numbers_in_words() -> None:
    verdict = judge(EVEN, lockstep=True, automatic=False)
    assert "because of its compute: it spends 40 ms per sample computing, the others 10 ms (median)" in verdict.headline
    words = " ".join(verdict.sentences)
    # Each has 100 samples in 4 s; at their own speeds they would process 100, 100 and 25 samples/s.
    assert "75 samples/s: 33% of the 225" in words
    assert "50% is computing, 0% loading data, 50% waiting for slower ranks, and 0% communication" in words
    assert "balance='auto'" in words
    assert verdict.efficiency == pytest.approx(1 / 3)


def test_what_to_do_fits_the_cause() -> None:
    def words(ranks: list[Totals], lockstep: bool = True) -> str:
        return " ".join(judge(ranks, lockstep, automatic=True).sentences)

    assert "num_workers" in words(STARVED)
    assert "num_workers" not in words(EVEN)
    assert "Communication takes time" in words(SLOW_WIRE)
    assert "Communication takes time" in words(FAR, lockstep=False)
    assert "Communication takes time" not in words(EVEN)
    assert "given 2.5 of 22.5 samples per step" in words(BALANCED)
    assert "Ranks wait for slower ones although batches are split by speed" in words(EVEN)
    assert judge(SLOW_WIRE, True, True).spent["network"] == pytest.approx(2 / 3)
    assert judge(MEETING, True, True).spent["network"] == pytest.approx(0.1 / 4.1)


def test_one_rank_alone_is_not_compared() -> None:
    verdict = judge([rank(0, 100, 1.0, data=3.0)], lockstep=True, automatic=True)
    assert verdict.slowest is None
    assert "One rank alone: 25 samples/s, 30.00 ms per sample loading data" in verdict.headline
    assert "num_workers" in " ".join(verdict.sentences)
