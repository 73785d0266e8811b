"""What the split of the batches gains, and what to do next: the report's advice."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from lightning_hetero.callbacks.totals import Totals, even_share, even_work
from lightning_hetero.workload.shares import TooSlow

Cause = Literal["compute", "data", "network"]
#: From this fraction of the job's time on, something is worth a word.
WORTH_A_WORD = 0.1
#: Steps that differ by less than this fraction are called equally long.
ALIKE = 0.03


class Gain(NamedTuple):
    """What splitting by speed gains, or could gain.

    Attributes:
        times: how many times as fast as with an even split the slowest rank is done with a step; None if not known.
        possible: if batches are not split by speed: about how many times as fast it would be if they were, where no
            batch has a fixed cost; infinite if nobody can tell.
        sentences: the same in words.
    """

    times: float | None
    possible: float
    sentences: tuple[str, ...]


def gain_of(ranks: Sequence[Totals], automatic: bool) -> Gain:
    """Compare the slowest rank's work on a step with that under an even split.

    Args:
        ranks: one per rank.
        automatic: whether batches are split by measured speed.
    """
    if len(ranks) < 2:
        return Gain(None, 1.0, ())
    now = max(rank.work / rank.steps for rank in ranks)
    # All would be done together at their speeds, as long as these do not depend on the samples per step.
    possible = 1.0 if automatic else now * sum(rank.speed for rank in ranks) / sum(rank.share for rank in ranks)
    works = even_work(ranks)
    uneven = max(rank.share for rank in ranks) > (1 + ALIKE) * even_share(ranks)
    if works is None:
        unknown = (
            "How long an even split would take is not known, because some rank has never had a share of about "
            f"{even_share(ranks):.3g} samples."
        )
        return Gain(None, 1.0 if automatic else math.inf, (unknown,))
    even = max(works)
    times = even / max(now, 1e-12)
    possible = 1.0 if automatic else max(possible, 1 / max(times, 1e-12))  # an even split is one by speed, too
    if not uneven:
        could = "" if automatic else f" {_could(possible)}"
        return Gain(times, possible, (f"The batches are split evenly.{could}",))
    split = f"the slowest rank works {1e3 * now:.3g} ms per step, with an even split {1e3 * even:.3g} ms"
    if abs(times - 1) < ALIKE:
        return Gain(times, possible, (f"This split gains nothing over an even one: {split}.",))
    if times < 1:
        return Gain(times, possible, (f"This split is slower than an even one: {split}.",))
    return Gain(times, possible, (f"This split makes steps {times:.2f} times as fast as an even one: {split}.",))


def _could(possible: float) -> str:
    if possible < 1 + ALIKE:
        return "A split by speed would gain nothing, because on average all ranks are equally fast."
    return (
        f"By the ranks' speeds now, a split by speed would make steps about {possible:.1f} times as fast. What a batch "
        "costs whatever its size makes this more or less."
    )


def next_steps(
    spent: Mapping[str, float],
    uneven: float,
    common: float,
    automatic: bool,
    gain: Gain,
    slow: TooSlow | None,
    cause: Cause | None,
) -> tuple[str, ...]:
    """What to do next, the most promising first; at least one sentence.

    Args:
        spent: parts of all ranks' time.
        uneven: fraction of all ranks' time that some spend between steps while others work.
        common: fraction that all ranks spend between steps.
        automatic: whether batches are split by measured speed.
        gain: of the split.
        slow: ranks without which the job would be faster.
        cause: what sets the slowest rank apart, if it stands out.
    """
    advice = []
    if gain.times is not None and gain.times < 1 - ALIKE:
        advice.append("Set balance='off': an even split is faster here.")
    if slow is not None:
        advice.append(str(slow))
    elif max(spent["waiting"], uneven) >= WORTH_A_WORD:
        advice.append(_waiting(spent["waiting"], uneven, automatic, gain.possible))
    if common >= WORTH_A_WORD:
        advice.append(
            f"All ranks spend {common:.0%} of their time between steps: validate or save less often, make epochs "
            "longer, or set DataLoader(persistent_workers=True)."
        )
    if cause == "data" or spent["data"] >= WORTH_A_WORD:
        advice.append("Loading data takes time from training: give the DataLoader more workers (num_workers).")
    if cause == "network" or spent["network"] >= WORTH_A_WORD:
        advice.append(
            "Communication takes time from training: use larger batches, exchange less often, or take a strategy that "
            "exchanges in the background, such as hetero_daso."
        )
    return tuple(advice) or (_nothing(spent),)


def _waiting(waiting: float, uneven: float, automatic: bool, possible: float) -> str:
    at_ends = f" at the ends of epochs ({uneven:.0%} of all ranks' time)" if uneven >= WORTH_A_WORD else ""
    waits = f"Ranks wait for slower ones{', also' if at_ends and waiting >= WORTH_A_WORD else ''}{at_ends}"
    if automatic:
        return (
            f"{waits} although batches are split by speed: see whether min_batch_size, max_batch_size or very few "
            "samples per rank limit the split, or whether speeds change faster than it can follow."
        )
    if possible < 1 + ALIKE:
        return f"{waits}, but on average all are equally fast: look for what stalls them from time to time."
    return f"{waits}: set balance='auto', which splits batches by measured speed."


def _nothing(spent: Mapping[str, float]) -> str:
    return (
        f"Nothing to change: ranks work {spent['compute'] + spent['data']:.0%} of the time, and no cause of delay "
        f"takes {WORTH_A_WORD:.0%} of it."
    )
