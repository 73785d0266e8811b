"""What runs come to: figures of one run, and tables of many."""

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

INTERVAL = 16  # steps between two exchanges of most contenders
WINDOW = 8  # steps over which the loss is averaged
Run = dict[str, Any]


class Figures(NamedTuple):
    """Of a run.

    Attributes:
        ms: per step of the slowest rank.
        sent: MB per step of the node that sends most.
        loss: seconds until the training loss was reached; infinite if it was not.
        accuracy: seconds until the accuracy was reached; infinite if it was not.
        left: the accuracy of what the fit leaves.
        steps: of the rank with fewest.
        seconds: that the run lasted.
    """

    ms: float
    sent: float
    loss: float
    accuracy: float
    left: float
    steps: int
    seconds: float


def figures(run: Run, loss: float, accuracy: float) -> Figures:
    """Of a run: what it took to reach this training loss, and this accuracy on test digits."""
    ranks = run["ranks"]
    began = min(rank["times"][0] for rank in ranks)
    steps = min(len(rank["samples"]) for rank in ranks)
    # Over whole intervals, so that no exchange is left out; ranks at their own pace have no intervals in common.
    last = whole(steps) if run["together"] else steps
    ms = max(1e3 * (rank["times"][last] - rank["times"][0]) / last for rank in ranks)
    sent = max((rank["sent"][last] - rank["sent"][0]) / last for rank in ranks) / 1e6

    def after(step: int | None) -> float:
        return math.inf if step is None else max(rank["times"][step] for rank in ranks) - began

    first = next((step for step, value in enumerate(losses(ranks)) if step >= WINDOW and value <= loss), None)
    read = next((step for step, (value, _) in run["course"] if value >= accuracy), None)
    seconds = max(rank["times"][-1] for rank in ranks) - began
    return Figures(ms, sent, after(first), after(read), run["left"][0], steps, seconds)


def whole(steps: int) -> int:
    """So many steps as whole intervals have."""
    return steps // INTERVAL * INTERVAL or steps


def losses(ranks: Sequence[Run]) -> list[float]:
    """The loss after each step: the mean of the last 8 steps and all ranks."""
    means = [statistics.mean(step) for step in zip(*(rank["losses"] for rank in ranks), strict=False)]
    return [statistics.mean(means[max(0, step - WINDOW) : step]) for step in range(1, len(means) + 1)]


def spread(values: Sequence[float], form: str, missing: str = "") -> str:
    """Median and range; what is infinite is missing."""

    def text(value: float) -> str:
        return f"{value:{form}}" if math.isfinite(value) else missing

    middle, low, high = text(statistics.median(values)), text(min(values)), text(max(values))
    return middle if low == high else f"{middle} ({low} to {high})"


def over(own: Sequence[Figures], base: Sequence[Figures]) -> str:
    """How many of a contender's steps go into one of the base, run by run."""
    return spread([b.ms / o.ms for o, b in zip(own, base, strict=True)], ".2f") if base else ""


def _to_loss(run: Figures) -> float:
    return run.loss


def _to_accuracy(run: Figures) -> float:
    return run.accuracy


def times_as_fast(own: Sequence[Figures], base: Sequence[Figures], seconds: Callable[[Figures], float]) -> str:
    """How many times as soon something is reached, run by run; at least that many where the base never reaches it."""
    ratios = [
        min(seconds(b), b.seconds) / seconds(o)
        for o, b in zip(own, base, strict=bool(base))
        if math.isfinite(seconds(o))
    ]
    if not ratios:
        return ""
    return ("" if all(math.isfinite(seconds(b)) for b in base) else "> ") + spread(ratios, ".2f")


def table(runs: Sequence[Run], against: str, goals: tuple[float, float]) -> Table:
    """A row per contender: what each has taken to a loss and an accuracy."""
    of = _by_contender(runs, goals)

    def seconds(rows: list[Figures], values: list[float]) -> str:
        return spread(values, ".1f", f"not in {max(row.seconds for row in rows):.0f} s")

    def paired(name: str) -> list[Figures]:
        return _paired(of, name, against)

    columns: dict[str, Callable[[str, list[Figures]], str]] = {
        "ms per step": lambda _, rows: spread([row.ms for row in rows], ".0f"),
        f"{against}'s over it": lambda name, rows: over(rows, paired(name)),
        "MB per step and node": lambda _, rows: spread([row.sent for row in rows], ".2f"),
        f"seconds to a loss of {goals[0]:g}": lambda _, rows: seconds(rows, [row.loss for row in rows]),
        f"times as fast as {against}": lambda name, rows: times_as_fast(rows, paired(name), _to_loss),
        f"seconds to {goals[1]:.0%} of test digits": lambda _, rows: seconds(rows, [row.accuracy for row in rows]),
        "at the end": lambda _, rows: spread([100 * row.left for row in rows], ".1f") + "%",
        "steps": lambda _, rows: spread([row.steps for row in rows], ".0f"),
    }
    result = Table(box=box.MARKDOWN)
    for name in ("contender", *columns):
        result.add_column(name, no_wrap=True, justify="left" if name == "contender" else "right")
    for name, rows in of.items():
        result.add_row(name, *(column(name, rows) for column in columns.values()))
    return result


def pairs(runs: Sequence[Run], against: Sequence[str], goals: tuple[float, float]) -> list[Table]:
    """To the loss, and to the accuracy: a row per contender, how many times as fast it is as each of some others."""
    of, tables = _by_contender(runs, goals), list[Table]()
    against = [name for name in against if name in of]
    if not against:
        return tables
    for what, seconds in ((f"a loss of {goals[0]:g}", _to_loss), (f"{goals[1]:.0%} of test digits", _to_accuracy)):
        result = Table(box=box.MARKDOWN)
        result.add_column(f"times as fast to {what} as", no_wrap=True)
        for name in against:
            result.add_column(name, no_wrap=True, justify="right")
        for name, rows in of.items():
            result.add_row(name, *(times_as_fast(rows, _paired(of, name, base), seconds) for base in against))
        tables.append(result)
    return tables


def _by_contender(runs: Sequence[Run], goals: tuple[float, float]) -> dict[str, list[Figures]]:
    names = dict.fromkeys(run["contender"] for run in runs)
    return {name: [figures(run, *goals) for run in runs if run["contender"] == name] for name in names}


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
