"""Figures of one run, and tables of many."""

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from rich import box
from rich.table import Table
from systems import without_rate

INTERVAL = 16  # steps between two exchanges of most contenders
Run = dict[str, Any]


class Figures(NamedTuple):
    """Of a run.

    Attributes:
        ms: per step of the slowest rank.
        sent: MB per step of the node that sends most.
        to_goal: seconds until the goal was reached; infinite if it was not.
        sent_to_goal: MB that the node which sends most has sent by then.
        equal: the loss after as many steps as are compared; NaN if there were fewer.
        left: the loss of what the fit leaves.
        steps: of the rank with fewest.
        seconds: that the run lasted.
    """

    ms: float
    sent: float
    to_goal: float
    sent_to_goal: float
    equal: float
    left: float
    steps: int
    seconds: float


class Goal(NamedTuple):
    """Goal of runs: losses on text that nobody trains on, of the mean of all ranks' weights.

    Attributes:
        loss: to be reached.
        steps: after which losses are compared.
    """

    loss: float
    steps: int


def figures(run: Run, goal: Goal, alone: bool = False) -> Figures:
    """Of a run: what it took to reach the goal.

    Args:
        run: the run.
        goal: what is asked.
        alone: ask rank 0's own weights, not the mean of all.
    """
    ranks, whose = run["ranks"], int(alone)
    began = min(rank["times"][0] for rank in ranks)
    steps = min(len(rank["samples"]) for rank in ranks)
    # Over whole intervals, so that no exchange is left out; ranks at their own pace have no intervals in common.
    last = whole(steps) if run["together"] else steps
    ms = max(1e3 * (rank["times"][last] - rank["times"][0]) / last for rank in ranks)
    sent = max((rank["sent"][last] - rank["sent"][0]) / last for rank in ranks) / 1e6

    course = {step: losses[whose] for step, losses in run["course"]}
    reached = next((step for step, loss in course.items() if loss <= goal.loss), None)
    to_goal = sent_to_goal = math.inf
    if reached is not None:
        to_goal = max(rank["times"][reached] for rank in ranks) - began
        sent_to_goal = max(rank["sent"][reached] - rank["sent"][0] for rank in ranks) / 1e6
    seconds = max(rank["times"][-1] for rank in ranks) - began
    equal = course.get(goal.steps, math.nan)
    return Figures(ms, sent, to_goal, sent_to_goal, equal, run["left"][whose], steps, seconds)


def whole(steps: int) -> int:
    """So many steps as whole intervals have."""
    return steps // INTERVAL * INTERVAL or steps


def spread(values: Sequence[float], form: str, missing: str = "") -> str:
    """Median and range; what is infinite is missing."""

    def text(value: float) -> str:
        return f"{value:{form}}" if math.isfinite(value) else missing

    middle, low, high = text(statistics.median(values)), text(min(values)), text(max(values))
    return middle if low == high else f"{middle} ({low} to {high})"


def times_as_fast(own: Sequence[Figures], base: Sequence[Figures]) -> str:
    """Ratio of the times to the goal, run by run; a lower bound where the base never reaches it."""
    ratios = [
        min(b.to_goal, b.seconds) / o.to_goal for o, b in zip(own, base, strict=bool(base)) if math.isfinite(o.to_goal)
    ]
    if not ratios:
        return ""
    return ("" if all(math.isfinite(b.to_goal) for b in base) else "> ") + spread(ratios, ".2f")


def table(runs: Sequence[Run], against: str, goal: Goal) -> Table:
    """A row per contender: what each has taken to the goal."""
    of = _by_contender(runs, goal)

    def seconds(rows: list[Figures]) -> str:
        return spread([row.to_goal for row in rows], ".1f", f"not in {max(row.seconds for row in rows):.0f} s")

    columns: dict[str, Callable[[str, list[Figures]], str]] = {
        f"seconds to a loss of {goal.loss:g}": lambda _, rows: seconds(rows),
        f"times as fast as {against}": lambda name, rows: times_as_fast(rows, _paired(of, name, against)),
        "MB to it": lambda _, rows: spread([row.sent_to_goal for row in rows], ".1f", "-"),
        "ms per step": lambda _, rows: spread([row.ms for row in rows], ".0f"),
        "MB per step": lambda _, rows: spread([row.sent for row in rows], ".3f"),
        f"loss after {goal.steps} steps": lambda _, rows: spread([row.equal for row in rows], ".3f", "-"),
        "at the end": lambda _, rows: spread([row.left for row in rows], ".3f"),
        "steps": lambda _, rows: spread([row.steps for row in rows], ".0f"),
    }
    result = Table(box=box.MARKDOWN)
    for name in ("contender", *columns):
        result.add_column(name, no_wrap=True, justify="left" if name == "contender" else "right")
    for name, rows in of.items():
        result.add_row(name, *(column(name, rows) for column in columns.values()))
    return result


def pairs(runs: Sequence[Run], against: Sequence[str], goal: Goal) -> list[Table]:
    """A row per contender: how many times as fast to the goal it is as each of some others."""
    of = _by_contender(runs, goal)
    against = [name for name in against if name in of]
    if not against:
        return []
    result = Table(box=box.MARKDOWN)
    result.add_column(f"times as fast to a loss of {goal.loss:g} as", no_wrap=True)
    for name in against:
        result.add_column(name, no_wrap=True, justify="right")
    for name, rows in of.items():
        result.add_row(name, *(times_as_fast(rows, _paired(of, name, base)) for base in against))
    return [result]


def best_rates(runs: Sequence[Run], goal: Goal) -> Table:
    """Of each contender that was run with several learning rates, the one with the least loss after equal steps."""
    of = _by_contender(runs, goal)
    result = Table("contender", f"loss after {goal.steps} steps", "of the others", box=box.MARKDOWN)
    found: dict[str, list[tuple[float, str]]] = {}
    for name, rows in of.items():
        found.setdefault(without_rate(name)[0], []).append((statistics.mean(row.equal for row in rows), name))
    for tried in found.values():
        (loss, name), *others = sorted(tried)
        result.add_row(name, f"{loss:.3f}", ", ".join(f"{other:.3f}" for other, _ in others))
    return result


ONE_DEVICE = "one device"  # the row of rank 0's own weights, where ranks train alone


def _by_contender(runs: Sequence[Run], goal: Goal) -> dict[str, list[Figures]]:
    of: dict[str, list[Figures]] = {}
    for run in runs:
        name = run["contender"]
        of.setdefault(name, []).append(figures(run, goal))
        if without_rate(name)[0] == "alone":
            of.setdefault(name.replace("alone", ONE_DEVICE), []).append(figures(run, goal, alone=True))
    return of


def _paired(of: dict[str, list[Figures]], name: str, base: str) -> list[Figures]:
    """The runs of another contender with the same seeds."""
    found = of.get(base, [])
    return found if len(found) == len(of[name]) else []  # else a seed is missing


def rate(run: Run, warm: float) -> float:
    """Samples per second of all ranks, from some seconds after the beginning until the first rank ends."""
    ranks = run["ranks"]
    begin = max(rank["times"][0] for rank in ranks) + warm
    end = min(rank["times"][-1] for rank in ranks)
    if begin >= end:
        return math.nan
    return sum(_samples_until(rank, end) - _samples_until(rank, begin) for rank in ranks) / (end - begin)


def _samples_until(rank: Run, when: float) -> float:
    """Samples, with the part of the step under way."""
    done = 0.0
    for (began, ended), samples in zip(pairwise(rank["times"]), rank["samples"], strict=True):
        done += samples * min(max((when - began) / (ended - began), 0.0), 1.0)
    return done


def shares(runs: Sequence[Run], solo: str, warm: float) -> Table:
    """A row per contender: samples per second, over those of all devices by themselves."""
    names = list(dict.fromkeys(run["contender"] for run in runs))
    rates = {name: [rate(run, warm) for run in runs if run["contender"] == name] for name in names}
    result = Table(box=box.MARKDOWN)
    for name in ("contender", "samples/s", "of the solo speeds", "MB per 1000 samples and node"):
        result.add_column(name, no_wrap=True, justify="left" if name == "contender" else "right")
    for name, own in rates.items():
        parts = [100 * a / b for a, b in zip(own, rates[solo], strict=False)] if solo in rates else []
        sent = [_sent(run["ranks"]) for run in runs if run["contender"] == name]
        part = f"{spread(parts, '.1f')}%" if len(parts) == len(own) else ""
        result.add_row(name, spread(own, ".0f"), part, spread(sent, ".1f"))
    return result


def _sent(ranks: Sequence[Run]) -> float:
    samples = sum(sum(rank["samples"]) for rank in ranks)
    return max(rank["sent"][-1] - rank["sent"][0] for rank in ranks) / samples / 1e3
