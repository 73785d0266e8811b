"""The verdict in cases with an obvious answer."""

import math
from typing import Any

import pytest

from lightning_hetero.batching.shares import Cost, Stepwise
from lightning_hetero.callbacks.monitor_data import DealtByCost, ExchangeRecord, FitRecord, RankRecord, StepSpan
from lightning_hetero.callbacks.verdict import RankTotals, judge, totals, verdict_of

PROPORTIONAL = Cost(0.0, 0.01)


def rank(
    number: int, samples: float, compute: float, data: float = 0.0, wait: float = 0.0, exchange: float = 0.0,
    network: float = 0.0, cost: Cost | Stepwise | None = PROPORTIONAL, seen: tuple[float, float] = (1, 100),
) -> RankTotals:  # fmt: skip
    """Totals of a rank over 10 steps; times in seconds; by default without a fixed cost."""
    return RankTotals(number, 10, samples, data, compute, wait, exchange, network, cost=cost, seen=seen)


def fitted(number: int, samples: float, fixed: float, per_sample: float, **options: Any) -> RankTotals:
    """Totals of a rank over 10 steps of exactly ``fixed + per_sample * n`` seconds."""
    cost = Cost(fixed, per_sample)
    return rank(number, 10 * samples, 10 * cost.seconds(samples), cost=cost, **options)


EVEN = [rank(0, 100, 1.0, wait=3.0), rank(1, 100, 1.0, wait=3.0), rank(2, 100, 4.0)]
BALANCED = [rank(0, 100, 1.0), rank(1, 100, 1.0), rank(2, 25, 1.0)]
STARVED = [rank(0, 100, 1.0, 0.1, wait=3.9), rank(1, 100, 1.0, 4.0), rank(2, 100, 1.2, 0.1, wait=3.7)]
FAR = [rank(i, 100, 1.0, exchange=own, network=own) for i, own in enumerate((0.1, 0.2, 3.0))]
# The fast ones wait for the slow one at the exchange, which itself takes 0.1 s from each.
MEETING = [rank(i, 100, own, exchange=4.1 - own, network=0.1) for i, own in enumerate((1.0, 1.0, 4.0))]
# They meet one by one, so that the fast one waits for the slow one there; the network takes 3 ms of a step.
PAIRS = [rank(0, 100, 0.43, exchange=0.92, network=0.03), rank(1, 100, 1.35, exchange=0.03, network=0.03)]
FIXED = [rank(0, 70, 0.78, cost=None), rank(1, 10, 0.3, wait=0.48, cost=None)]
IDLE = [rank(0, 80, 1.0), rank(1, 0, 0.2, wait=0.8)]
SLOW_WIRE = [rank(i, 100, 1.0, wait=2.0, network=2.0) for i in range(3)]
# A fast GPU at slow data is still the one that processes most.
FAST_BUT_STARVED = [rank(0, 400, 1.0, 1.0), rank(1, 100, 2.0), rank(2, 100, 1.9)]


@pytest.mark.parametrize(
    ("ranks", "lockstep", "automatic", "slowest", "cause", "times"),
    [
        (EVEN, True, False, 2, "compute", 4.0),
        (BALANCED, True, True, 2, "compute", 4.0),
        (STARVED, True, False, 1, "data", 5.0 / 1.2),
        (FAR, False, False, 2, "network", 4.0 / 1.15),
        (FAR, False, True, 2, "network", 4.0 / 1.15),
        (MEETING, True, False, 2, "compute", 4.0),
        (PAIRS, False, False, 1, "compute", 138 / 46),
        (PAIRS, False, True, 1, "compute", 138 / 46),
        (SLOW_WIRE, True, False, None, None, 1.0),
        (FAST_BUT_STARVED, True, True, 1, "compute", 0.02 / 0.012),
        (FIXED, True, False, 0, "compute", 2.6),  # the devices are equal, but not what they are given
        (IDLE, True, False, 0, "compute", 5.0),
    ],
)  # fmt: skip
def test_the_slowest_and_why(
    ranks: list[RankTotals], lockstep: bool, automatic: bool, slowest: int, cause: str, times: float
) -> None:
    verdict = judge(ranks, lockstep, automatic)
    assert verdict.cause == cause
    assert verdict.times == pytest.approx(times)
    assert sum(verdict.spent.values()) == pytest.approx(1)
    if cause is None:
        assert "No rank stands out" in verdict.headline
    else:
        assert verdict.slowest == slowest
        assert f"Rank {slowest} is the slowest" in verdict.headline


def test_equal_ranks_with_fixed_unequal_shares() -> None:
    """20 ms + 0.5 ms a sample: an even split takes 28 ms where this one takes 35, but the speeds now hide that."""
    for seen, gain in (((2, 30), 35 / 28), ((2, 2), None)):
        ranks = [fitted(0, 2, 0.02, 0.0005, seen=seen), fitted(1, 30, 0.02, 0.0005, seen=(2, 30))]
        ranks[0] = ranks[0]._replace(wait=0.14)
        verdict = judge(ranks, lockstep=True, automatic=False)
        words = " ".join([*verdict.sentences, *verdict.advice])
        assert "1.0 times" not in words  # as much as the sum of the speeds now, divided by the samples, would promise
        assert verdict.gain == (None if gain is None else pytest.approx(1 / gain))
        assert "balance='auto'" in words
        assert "equally fast" not in words


def test_numbers_in_words() -> None:
    verdict = judge(EVEN, lockstep=True, automatic=False)
    assert "it spends 400 ms of each step computing its 10 samples, the others 100 ms (median)" in verdict.headline
    words = " ".join([*verdict.sentences, *verdict.advice])
    # Each has 100 samples in 4 s; at their own speeds they would process 100, 100 and 25 samples/s.
    assert "75 samples/s: 33% of the 225" in words
    assert "50% is computing, 0% loading data, 50% waiting for slower ranks, 0% communication" in words
    assert "balance='auto'" in words
    assert verdict.efficiency == pytest.approx(1 / 3)
    assert (
        verdict.sentences[1]
        == "The batches are split evenly. By the ranks' speeds now, a split by speed would make steps about 3.0 times "
        "as fast. What a batch costs whatever its size makes this more or less."
    )
    assert verdict.gain == pytest.approx(1)
    # 2.5 of 22.5 samples; with an even share of 7.5 it would take three times as long as now.
    found = judge(BALANCED, True, True)
    assert (
        "with an even share of 7.5 samples it would spend 300 ms of each step computing, the others 75 ms"
        in found.headline
    )
    assert found.gain == pytest.approx(3)
    words = " ".join(found.sentences)
    assert "This split makes steps 3.00 times as fast as an even one" in words
    assert "the slowest rank works 100 ms per step, with an even split 300 ms" in words


def test_equal_ranks_are_equal_whatever_their_shares() -> None:
    """Cost per sample differs by 11.8 times between them, because a fixed cost is spread over 2 or 30 samples."""
    verdict = judge([fitted(0, 2, 0.010, 0.0001), fitted(1, 30, 0.010, 0.0001)], lockstep=True, automatic=True)
    assert (verdict.cause, verdict.times) == (None, pytest.approx(1.0))
    assert "No rank stands out" in verdict.headline
    assert verdict.gain == pytest.approx(11.6 / 13)
    assert (
        "slower than an even one: the slowest rank works 13 ms per step, with an even split 11.6 ms"
        in verdict.sentences[0]
    )
    assert verdict.advice[0] == "Set balance='off': an even split is faster here."


def test_what_no_rank_has_been_seen_to_do_is_not_guessed() -> None:
    limited = [fitted(0, 2, 0.010, 0.0001, seen=(2, 2)), fitted(1, 30, 0.010, 0.0001, seen=(30, 30))]
    verdict = judge(limited, lockstep=True, automatic=True)
    assert verdict.gain is None
    assert "some rank has never had a share of about 16 samples" in verdict.sentences[1]
    assert (
        "Rank 1 is the slowest, because of its compute: it spends 13 ms of each step computing its 30 samples"
        in verdict.headline
    )
    assert "with the shares as they are" in verdict.sentences[0]


def test_there_is_always_something_to_do_next() -> None:
    [words] = judge([rank(0, 100, 1.0), rank(1, 100, 1.0)], lockstep=True, automatic=False).advice
    assert words.startswith("Nothing to change: ranks work 100% of the time")
    for ranks in (EVEN, BALANCED, STARVED, SLOW_WIRE, IDLE, EVEN[:1]):
        assert judge(ranks, lockstep=True, automatic=True).advice


def test_what_to_do_fits_the_cause() -> None:
    def words(ranks: list[RankTotals], lockstep: bool = True) -> str:
        return " ".join(judge(ranks, lockstep, automatic=True).advice)

    assert "num_workers" in words(STARVED)
    assert "num_workers" not in words(EVEN)
    assert "Communication takes time" in words(SLOW_WIRE)
    assert "Communication takes time" in words(FAR, lockstep=False)
    assert "Communication takes time" not in words(EVEN)
    assert "Ranks wait for slower ones although batches are split by speed" in words(EVEN)
    assert judge(SLOW_WIRE, True, True).spent["network"] == pytest.approx(2 / 3)
    assert judge(MEETING, True, True).spent["network"] == pytest.approx(0.1 / 4.1)


def test_one_rank_alone_is_not_compared() -> None:
    verdict = judge([rank(0, 100, 1.0, data=3.0)], lockstep=True, automatic=True)
    assert verdict.slowest is None
    assert "One rank alone: 25 samples/s, 30.00 ms per sample loading data" in verdict.headline
    assert "num_workers" in " ".join(verdict.advice)


def test_a_rank_without_samples_is_not_judged_by_them() -> None:
    verdict = judge(IDLE, lockstep=True, automatic=True)
    assert (verdict.slowest, verdict.cause) == (None, None)
    assert "Rank 0 alone has samples: 80 samples/s, 12.50 ms per sample computing" in verdict.headline
    other = judge([*IDLE, rank(2, 40, 1.0)], lockstep=True, automatic=True)
    assert (other.slowest, other.times) == (2, pytest.approx(2.0))
    nothing = judge([rank(0, 0, 0.0), rank(1, 0, 0.0)], lockstep=True, automatic=True)
    assert (nothing.slowest, nothing.efficiency) == (None, 0.0)


def epochs(
    count: int,
    per_step: tuple[float, ...],
    pause: float = 0.0,
    exchange: tuple[float, ...] = (),
    automatic: bool = False,
) -> FitRecord:
    """Ranks that take 10 steps of 16 samples per epoch, and wait for each other only at its end.

    Args:
        count: of epochs.
        per_step: of each rank, seconds of compute.
        pause: seconds of validation after each epoch but the last.
        exchange: of each rank, seconds of exchanges per step.
    """
    exchange = exchange or (0.0,) * len(per_step)
    steps = [own + more for own, more in zip(per_step, exchange, strict=True)]
    epoch = 10 * max(steps) + pause
    views = []
    for i, (compute, more) in enumerate(zip(per_step, exchange, strict=True)):
        began = [e * epoch + n * steps[i] for e in range(count) for n in range(10)]
        own = [StepSpan(n, 1, at, 16, 0.0, compute, 0.0, more) for n, at in enumerate(began)]
        views.append(RankRecord(i, own, own[:64], own[-64:], [], [ExchangeRecord(1, 1, 1, 0.0, 0.0, math.nan, {})]))
    replicas = tuple((i,) for i in range(len(per_step)))
    return FitRecord(views, replicas, [("one", "cpu")] * len(per_step), False, automatic, {}, None, None)


FREE = (0.01, 0.01, 0.01, 0.04)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_samples_per_second_are_in_wall_time(count: int) -> None:
    verdict = verdict_of(epochs(count, FREE))
    # 4 ranks, 160 samples each, in the 0.4 s of the slow one; while they work, 1600 three times, and 400.
    assert verdict.efficiency * 5200 == pytest.approx(1600, rel=0.06)
    # Three of four ranks have nothing to do for three quarters of the time.
    assert verdict.spent["between"] == pytest.approx(9 / 16, rel=0.06)
    assert sum(verdict.spent.values()) == pytest.approx(1)
    assert (verdict.slowest, verdict.cause) == (3, "compute")
    if count == 4:
        words = " ".join(verdict.sentences)
        assert "1,600 samples/s: 31% of the 5,200" in words
        assert "56% between steps: waiting at the end of an epoch, validation, checkpoints" in words
        advice = " ".join(verdict.advice)
        assert "Ranks wait for slower ones at the ends of epochs (56% of all ranks' time): set balance='auto'" in advice
        assert "validate or save less often" not in advice


@pytest.mark.parametrize("left", [False, True])
def test_it_says_how_well_costs_explain_times(left: bool) -> None:
    fit = epochs(2, FREE)
    known = [view._replace(by_cost=DealtByCost(0.03 * i, 0.1 * i, left)) for i, view in enumerate(fit.views[:3])]
    *rest, last = verdict_of(fit._replace(views=[*known, fit.views[3]])).sentences
    assert last == (
        "Step times are within 6% of what the cost of a rank's samples explains, and within 20% of what their number "
        f"explains. Batches were {'split by samples in the end' if left else 'dealt by cost'}."
    )
    assert tuple(rest) == verdict_of(fit).sentences


def test_what_all_spend_between_steps_is_named() -> None:
    verdict = verdict_of(epochs(4, (0.02, 0.02), pause=0.2))
    assert verdict.spent["between"] == pytest.approx(1 / 3)  # of 0.6 s from the second epoch's end
    assert verdict.efficiency == pytest.approx(2 / 3)
    words = " ".join(verdict.advice)
    assert "All ranks spend 33% of their time between steps: validate or save less often" in words
    assert "balance='auto'" not in words
    assert "less often" not in " ".join(verdict_of(epochs(4, (0.02, 0.02))).advice)


def test_waiting_for_a_slow_partner_is_waiting() -> None:
    fit = epochs(4, (0.043, 0.135), exchange=(0.095, 0.003))
    verdict = verdict_of(fit)
    assert [own.network / own.steps for own in totals(fit)] == pytest.approx([0.003, 0.003])
    assert verdict.spent["waiting"] == pytest.approx(0.092 / 0.276)
    assert verdict.spent["network"] == pytest.approx(0.006 / 0.276)
    assert "Rank 1 is the slowest, because of its compute: it spends 135 ms of each step" in verdict.headline
    assert "Communication takes time" not in " ".join(verdict.advice)


def test_after_an_error_one_view_of_many_is_no_verdict() -> None:
    whole = epochs(4, FREE)
    verdict = verdict_of(whole._replace(views=whole.views[:1], ended="RuntimeError"))
    assert (verdict.slowest, verdict.cause) == (None, None)
    assert "Only rank 0's view is there, not those of the 3 others, since the fit ended by an error" in verdict.headline
    [words] = verdict.sentences
    assert "waiting for other ranks and communication" in words
    alone = whole._replace(views=whole.views[:1], places=whole.places[:1], replicas=whole.replicas[:1])
    assert "One rank alone" in verdict_of(alone).headline


def test_ranks_are_compared_by_their_curves() -> None:
    # Up to 16 samples 64 ms, then 4 ms each. With 16 samples both would take 64 ms; in proportion 128 and 64.
    curve = Cost(0.064, 1e-9, ((16.0, 0.004),))
    twins = [rank(i, 10 * n, 10 * curve.seconds(n), cost=curve, seen=(8, 24)) for i, n in enumerate((8, 24))]
    assert [twin.scale(16) for twin in twins] == pytest.approx([1.0, 64 / 96])
    assert judge(twins, True, True).times == pytest.approx(1.0)


def test_an_even_split_pays_for_its_passes() -> None:
    """4 and 12 samples of at most 4 in a pass: one pass and three, and two of each rank with an even split."""
    cost = Stepwise(Cost(0.010, 0.001), 4)
    ranks = [rank(i, 10 * n, 10 * cost.seconds(n), cost=cost, seen=(n, n)) for i, n in enumerate((4, 12))]
    assert [one.scale(8) for one in ranks] == pytest.approx([28 / 14, 28 / 42])
    assert ranks[1].scale(6) is None  # passes of 3 samples have never been run
    assert judge(ranks, True, True).gain == pytest.approx(28 / 42)
