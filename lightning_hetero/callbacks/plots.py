"""The pictures of the report: matplotlib, drawn without a display."""

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from lightning_hetero.callbacks.canvas import (
    BETWEEN,
    CAUSES,
    NEUTRAL,
    WAITING,
    Picture,
    above,
    colours,
    lane,
    lanes,
    mark,
    picture,
    plane,
)
from lightning_hetero.callbacks.exchange_plots import course, exchanges, pairs
from lightning_hetero.callbacks.lineup import Change
from lightning_hetero.callbacks.record import Fit, Stretch, View, coarser
from lightning_hetero.callbacks.totals import Totals, end_of, even_work, totals

FloatArray = NDArray[np.float64]

PARTS = {
    "data": (CAUSES["data"], "loads data"),
    "compute": (CAUSES["compute"], "computes"),
    "wait": (WAITING, "waits for other ranks"),
    "exchange": (CAUSES["exchange"], "exposed exchange between replicas"),
}
HIDDEN = (CAUSES["hidden"], "hidden exchange, in the background")
#: Most lanes of a time line, and most points of a curve.
LANES, POINTS = 16, 60
#: A time line shows about so many steps.
SHOWN = 16


def draw(fit: Fit) -> list[Picture]:
    """All pictures that this fit has something to show in."""
    return [
        picture
        for artist in (_time_lines, _parts, _shares, _speeds, exchanges, course, pairs)
        if (picture := artist(fit))
    ]


def _time_lines(fit: Fit) -> Picture:
    views = _slowest(fit)
    figure = Figure(figsize=(12, 1.6 + 0.5 * len(views)), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    windows = _window([v.beginning for v in views], False), _window([v.end for v in views], True)
    for axis, steps, window, title in zip(
        axes, ([v.beginning for v in views], [v.end for v in views]), windows, ("the beginning", "the end"), strict=True
    ):
        for row, (view, own) in enumerate(zip(views, steps, strict=True)):
            for part, spans in _spans(own):
                lane(axis, row, spans, PARTS[part][0])
            lane(axis, row + 0.46, [(a, b - a) for a, b in view.background], HIDDEN[0], height=0.1)
        axis.set_xlim(*window)
        for change in fit.shown:
            if window[0] <= change.at and change.at - change.stall <= window[1]:
                mark(axis, change.at, _lost(change), change.at - change.stall)
        axis.set_title(title, loc="left", weight="bold")
        axis.set_xlabel("seconds since the ranks started together")
    lanes(axes[0], [f"rank {view.rank}" for view in views])
    axes[1].spines[["top", "right", "left"]].set_visible(False)
    axes[1].tick_params("y", length=0)
    shown = [part for part in PARTS if any(getattr(s, part) > 0 for v in views for s in v.stretches)]
    handles = [Patch(color=PARTS[part][0], label=PARTS[part][1]) for part in shown]
    handles += [Patch(color=HIDDEN[0], label=HIDDEN[1])] if any(v.background for v in views) else []
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return picture(
        figure,
        "timeline",
        "Who works and who waits",
        "One row per rank, time from left to right: the less grey and pink, the better. Blank is what lies between "
        "steps, such as validation and waiting at the end of an epoch. The parts of a step are drawn in a fixed order."
        + _marks(fit, " The shaded time before it is the longest stall.")
        + _fewer(fit),
    )


def _slowest(fit: Fit) -> list[View]:
    """The slowest ranks, where there are too many, in the order of ranks."""
    return [view for view, _ in _rows(fit)]


def _rows(fit: Fit) -> list[tuple[View, Totals]]:
    """The slowest ranks with their sums over the settled part; compared as in the verdict."""
    own = totals(fit)
    work = even_work(own) or [rank.work for rank in own]
    slowest = sorted(range(len(own)), key=lambda i: -work[i])[:LANES]
    return [(fit.views[i], own[i]) for i in sorted(slowest, key=lambda i: fit.views[i].rank)]


def _lost(change: Change) -> str:
    if change.joined:
        return change.who
    return f"{change.who} lost" if change.lost else "connections lost"


def _marks(fit: Fit, more: str = "") -> str:
    """The part of a caption that explains the marks."""
    return f" A red line marks where the ranks went on after others were lost, or joined.{more}" if fit.shown else ""


def _fewer(fit: Fit) -> str:
    return f" Of {len(fit.views)} ranks the {LANES} slowest are shown." if len(fit.views) > LANES else ""


def _window(ranks: Sequence[Sequence[Stretch]], at_the_end: bool) -> tuple[float, float]:
    """A span of time in which every rank's steps are known, and about ``SHOWN`` of the slowest's lie."""
    covered = [(steps[0].began, steps[-1].began + steps[-1].seconds) for steps in ranks]
    length = SHOWN * max((end - began) / len(steps) for (began, end), steps in zip(covered, ranks, strict=True))
    if at_the_end:
        last = max(end for _, end in covered)
        return max(last - length, max(began for began, _ in covered)), last
    first = min(began for began, _ in covered)
    return first, min(first + length, min(end for _, end in covered))


def _spans(steps: Sequence[Stretch]) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """For each part of a step, in the order in which parts are drawn, its (start, length) in all steps."""
    at = [step.began for step in steps]
    for part in ("exchange", "data", "compute", "wait"):  # an exchange follows the end of a step's lap
        lengths = [getattr(step, part) for step in steps]
        yield part, list(zip(at, lengths, strict=True))
        at = [start + length for start, length in zip(at, lengths, strict=True)]


def _parts(fit: Fit) -> Picture:
    rows = _rows(fit)
    figure = Figure(figsize=(12, 1.3 + 0.36 * len(rows)), layout="constrained")
    axis = figure.subplots()
    left = [0.0] * len(rows)
    for part, (colour, label) in {**PARTS, "between": ("white", "between steps")}.items():
        widths = [100 * getattr(own, part) / max(own.seconds, 1e-12) for _, own in rows]
        style: dict[str, Any] = BETWEEN if part == "between" else {"color": colour}
        if any(widths):
            axis.barh(range(len(widths)), widths, left=left, label=label, height=0.8, **style)
        for row, (start, width) in enumerate(zip(left, widths, strict=True)):
            if width >= 4:
                axis.text(
                    start + width / 2,
                    row,
                    f"{width:.0f}%",
                    ha="center",
                    va="center",
                    color="w" if part in ("compute", "exchange") else "k",
                    bbox={"fc": "w", "ec": "none", "pad": 1} if part == "between" else None,
                )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    lanes(axis, [f"rank {view.rank}" for view, _ in rows])
    axis.set_xlim(0, 100)
    axis.set_xlabel("% of the time of the second half of the steps")
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    return picture(
        figure,
        "parts",
        "What each rank's time goes to",
        "Blue is useful work. Much grey on all ranks but one: that one holds them up. Much yellow: data come too "
        "slowly. Much pink: exchanges between replicas, and the wait for others at them, are not hidden. Hatched is "
        "between steps: if only some ranks have it, they wait at the ends of epochs; if all have it, it is validation "
        "and the like. Where ranks average gradients, that communication is part of the grey, because in a single step "
        "it looks like waiting; the verdict estimates it." + _fewer(fit),
    )


def _shares(fit: Fit) -> Picture:
    rows = [coarser(view.stretches, POINTS) for view in fit.views]
    count = min(len(row) for row in rows)
    shares = [[s.samples / s.steps for s in row[:count]] for row in rows]
    steps = [s.first + 1 for s in rows[0][:count]]
    figure, axis = plane("step", "samples per step")
    # Twice the last point, so that its step has a width, too.
    axis.stackplot(
        [*steps, rows[0][count - 1].first + rows[0][count - 1].steps + 1],
        [[*row, row[-1]] for row in shares[::-1]],
        colors=colours(len(shares))[::-1],
        step="post",
        edgecolor="white",
        linewidth=0.6,
    )
    full = _last_full_batch(fit.views)
    top = total = sum(full)
    for view, share in zip(fit.views, full, strict=True):
        if share > 0.03 * total:
            axis.annotate(
                f"rank {view.rank}: {share:.3g}",
                (1.01, top - share / 2),
                va="center",
                xycoords=axis.get_yaxis_transform(),
            )
        top -= share
    for change in fit.shown:
        after = (s.first for s in fit.views[0].stretches if s.began + s.seconds >= change.at)
        mark(axis, 1 + next(after, steps[-1]), _lost(change))
    axis.set_xlim(1, steps[-1] + rows[0][count - 1].steps)
    axis.set_ylim(0, max(total, *map(sum, zip(*shares, strict=True))))
    return picture(
        figure,
        "shares",
        "How batches are split",
        "Each band is one rank's part of the batches; the numbers on the right are those of the last full batch. Wide "
        "bands are fast ranks. Once bands stay level the split has settled; bands that move follow speeds that change. "
        "Notches are the short last batches of epochs." + _marks(fit, " What the lost ranks took before is not drawn."),
    )


def _last_full_batch(views: Sequence[View]) -> list[float]:
    """Samples of each rank in the latest of the largest batches near the end."""
    batches = list(zip(*([s.samples / s.steps for s in view.end or view.stretches] for view in views), strict=False))
    return list(max(reversed(batches), key=sum))


def _speeds(fit: Fit) -> Picture:
    ended = max(map(end_of, fit.views))
    began = min(view.stretches[0].began for view in fit.views)
    steps = sum(stretch.steps for stretch in fit.views[0].stretches)
    edges = np.linspace(began, ended, 1 + max(1, min(POINTS, steps // 4)))  # of spans of a few steps each
    per_rank = [_during(view, edges) for view in fit.views]
    job = np.sum([samples for samples, _ in per_rank], axis=0) / np.diff(edges)
    solo = np.sum([_held(samples, work) for samples, work in per_rank], axis=0)
    figure, axis = plane("seconds since the ranks started together", "samples/s")
    alone = len(fit.views) == 1
    axis.stairs(solo, edges, baseline=job, fill=True, color="#EEEEEE")
    solo_label = "its speed while it works" if alone else "sum of the ranks' speeds while they work"
    axis.stairs(solo, edges, baseline=None, color="#888888", ls="--", label=solo_label)
    who = f"rank {fit.views[0].rank}" if alone else "the whole job"
    axis.stairs(job, edges, baseline=None, color=NEUTRAL[0], lw=2, label=who)
    for change in fit.shown:
        mark(axis, change.at, _lost(change), change.at - change.stall)
    axis.set_xlim(began, ended)
    axis.set_ylim(0, 1.1 * max(_typical(list(solo)), _typical(list(job)), 1e-12))
    above(axis)
    return picture(
        figure,
        "speed",
        "How fast the job is, and how fast it could be",
        "The solid line is how many samples per second the ranks process together, in wall time. The dashed line is "
        "what they would process if each worked all the time. The gap is lost to waiting, communication, and what lies "
        "between steps, such as waiting at the end of an epoch and validation."
        + _marks(fit, " Samples of the lost ranks are not counted."),
    )


def _during(view: View, edges: FloatArray) -> tuple[FloatArray, FloatArray]:
    """A rank's samples and seconds of work between each two edges, as if each stretch went on evenly."""
    at, samples, work = [], [0.0], [0.0]
    for stretch, following in zip_longest(view.stretches, view.stretches[1:]):
        ends = end_of(view) if following is None else following.began
        # Within one step there is no gap; within more, such as validation is spread over them all.
        at += [stretch.began, min(ends, stretch.began + stretch.seconds) if stretch.steps == 1 else ends]
        samples += [samples[-1], samples[-1] + stretch.samples]
        work += [work[-1], work[-1] + stretch.data + stretch.compute]
    times = np.maximum.accumulate(at)  # a GPU may be at a step for longer than the host
    return np.diff(np.interp(edges, times, samples[1:])), np.diff(np.interp(edges, times, work[1:]))


def _held(samples: FloatArray, work: FloatArray) -> FloatArray:
    """Speed in each span; where a rank does not work, as before."""
    speeds, speed = [], 0.0
    for n, seconds in zip(samples, work, strict=True):
        speed = n / seconds if seconds > 1e-9 else speed
        speeds.append(speed)
    return np.array(speeds)


def _typical(values: Sequence[float]) -> float:
    """The greatest value, without outliers."""
    return sorted(values)[math.ceil(0.97 * len(values)) - 1]
