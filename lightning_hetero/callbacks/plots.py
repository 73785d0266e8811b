"""Plots of the report, drawn by matplotlib without a display."""

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from lightning_hetero.callbacks.monitor_data import (
    FitRecord,
    RankRecord,
    ReportedChange,
    StepSpan,
    coarsen,
)
from lightning_hetero.callbacks.verdict import RankTotals, even_scales, totals

#: Causes of a step's length. These colours mean nothing else in any picture; colour-blind people can tell them apart.
CAUSES = {"compute": "#0072B2", "data": "#F0C800", "exchange": "#D81B78", "hidden": "#3FA34D"}
WAITING = "#D9D9D9"
PARTS = {
    "data": (CAUSES["data"], "loads data"),
    "compute": (CAUSES["compute"], "computes"),
    "wait": (WAITING, "waits for other ranks"),
    "exchange": (CAUSES["exchange"], "exposed exchange between replicas"),
}
#: Time that belongs to no step.
BETWEEN = {"facecolor": "white", "edgecolor": "#BBBBBB", "hatch": "////", "linewidth": 0.5}
#: Ranks and replicas, from dark to light and back: earth and violet, so that none looks like a cause.
RANKS = ("#4B2E83", "#C2A5CF", "#8C510A", "#DFC27D", "#7A0C2E", "#B8906F", "#9970AB", "#3B3B3B")
#: Moments at which ranks were lost.
LOST = "#C00000"
#: Most lanes of a time line, most points of a curve, and about as many steps as a time line shows.
LANES, POINTS, SHOWN = 16, 60, 16
_CLOCK = "seconds since the ranks started together"


class Picture(NamedTuple):
    """A picture with its words.

    Attributes:
        name: of its file, without the ending.
        title: what it shows.
        caption: how to read it.
        png: the file.
    """

    name: str
    title: str
    caption: str
    png: bytes


def draw(fit: FitRecord) -> list[Picture]:
    """The pictures of a fit."""
    return [_time_lines(fit), _parts(fit), _shares(fit)]


def colours(count: int) -> list[str]:
    """One colour per rank, none of which is a cause's."""
    if count <= len(RANKS):
        return list(RANKS[:count])
    return [to_hex(colormaps["copper"](i / (count - 1))) for i in range(count)]


def lane(axis: Axes, row: float, spans: Sequence[tuple[float, float]], colour: str, height: float = 0.8) -> None:
    """Draw spans of time, each as (start, length) in seconds, in one row of a time line."""
    axis.broken_barh(list(spans), (row - height / 2, height), facecolor=colour)


def lanes(axis: Axes, labels: Sequence[str]) -> None:
    """Make a plot a time line with one labelled row per rank."""
    axis.set_yticks(range(len(labels)), labels)
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.tick_params("y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)


# -- ranks -----------------------------------------------------------------------------------------


def _time_lines(fit: FitRecord) -> Picture:
    views = [view for view, _ in _slowest(fit)]
    figure, axes = _plots(2, 1.6 + 0.5 * len(views), sharey=True)
    for axis, name in zip(axes, ("beginning", "end"), strict=True):
        steps = [getattr(view, name) for view in views]
        window = _window(steps, at_the_end=name == "end")
        for row, (view, own) in enumerate(zip(views, steps, strict=True)):
            at = [step.began for step in own]
            for part in ("exchange", "data", "compute", "wait"):  # an exchange follows the end of a step's lap
                lengths = [getattr(step, part) for step in own]
                lane(axis, row, list(zip(at, lengths, strict=True)), PARTS[part][0])
                at = [start + length for start, length in zip(at, lengths, strict=True)]
            lane(axis, row + 0.46, [(a, b - a) for a, b in view.background], CAUSES["hidden"], height=0.1)
        lanes(axis, [f"rank {view.rank}" for view in views])
        axis.set_xlim(*window)
        for change in fit.shown:
            if window[0] <= change.at and change.at - change.seconds <= window[1]:
                _mark(axis, change.at, change, change.at - change.seconds)
        axis.set_title(f"the {name}", loc="left", weight="bold")
        axis.set_xlabel(_CLOCK)
    shown = [part for part in PARTS if any(getattr(s, part) > 0 for v in views for s in v.stretches)]
    handles = [Patch(color=PARTS[part][0], label=PARTS[part][1]) for part in shown]
    if any(view.background for view in views):
        handles.append(Patch(color=CAUSES["hidden"], label="hidden exchange, in the background"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return _picture(
        figure,
        "timeline",
        "Who works and who waits",
        "One row per rank, time from left to right: the less grey and pink, the better. Blank is what lies between "
        "steps, such as validation and waiting at the end of an epoch. The parts of a step are drawn in a fixed order."
        + _marks(fit, " The shaded time before it is the longest stall.")
        + _fewer(fit),
    )


def _slowest(fit: FitRecord) -> list[tuple[RankRecord, RankTotals]]:
    """The slowest ranks with their sums over the settled part, compared as in the verdict, in the order of ranks."""
    own = totals(fit)
    work = [scale * r.work / r.steps for scale, r in zip(even_scales(own) or [1.0] * len(own), own, strict=True)]
    slowest = sorted(range(len(own)), key=lambda i: -work[i])[:LANES]
    return [(fit.views[i], own[i]) for i in sorted(slowest, key=lambda i: fit.views[i].rank)]


def _window(ranks: Sequence[Sequence[StepSpan]], at_the_end: bool) -> tuple[float, float]:
    """A span of time in which every rank's steps are known, and about ``SHOWN`` of the slowest's lie."""
    covered = [(steps[0].began, steps[-1].began + steps[-1].seconds) for steps in ranks]
    length = SHOWN * max((end - began) / len(steps) for (began, end), steps in zip(covered, ranks, strict=True))
    begins, ends = zip(*covered, strict=True)
    if at_the_end:
        return max(max(ends) - length, *begins), max(ends)
    return min(begins), min(min(begins) + length, *ends)


def _parts(fit: FitRecord) -> Picture:
    rows = _slowest(fit)
    figure, [axis] = _plots(1, 1.3 + 0.36 * len(rows))
    left = np.zeros(len(rows))
    for part, (colour, label) in {**PARTS, "between": ("white", "between steps")}.items():
        widths = np.array([100 * getattr(own, part) / max(own.seconds, 1e-12) for _, own in rows])
        style: dict[str, Any] = BETWEEN if part == "between" else {"color": colour}
        if widths.any():
            bars = axis.barh(range(len(rows)), widths, left=left, label=label, height=0.8, **style)
            axis.bar_label(
                bars,
                [f"{width:.0f}%" if width >= 4 else "" for width in widths],
                label_type="center",
                color="w" if part in ("compute", "exchange") else "k",
            )
        left += widths
    lanes(axis, [f"rank {view.rank}" for view, _ in rows])
    axis.set_xlim(0, 100)
    axis.set_xlabel("% of the time of the second half of the steps")
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    return _picture(
        figure,
        "parts",
        "What each rank's time goes to",
        "Much grey on all ranks but one: that one holds them up. Much yellow: data come too slowly. Much pink: "
        "exchanges between replicas are not hidden. Hatched is between steps: if only some ranks have it, they wait at "
        "the ends of epochs; if all have it, it is validation and the like. Averaging gradients is part of the grey; "
        "the verdict estimates it." + _fewer(fit),
    )


def _shares(fit: FitRecord) -> Picture:
    rows = [coarsen(view.stretches, POINTS) for view in fit.views]
    count = min(map(len, rows))
    shares = [[s.samples / s.steps for s in row[:count]] for row in rows]
    steps = [s.first + 1 for s in rows[0][:count]]
    end = steps[-1] + rows[0][count - 1].steps
    figure, [axis] = _plots(1, 3.4, "step", "samples per step")
    bands = [[*row, row[-1]] for row in shares[::-1]]  # twice the last point, so that its step has a width, too
    shades = colours(len(shares))[::-1]
    axis.stackplot([*steps, end], bands, colors=shades, step="post", edgecolor="white", linewidth=0.6)
    full = _last_full_batch(fit.views)
    top = total = sum(full)
    for view, share in zip(fit.views, full, strict=True):
        if share > 0.03 * total:
            where = (1.01, top - share / 2)
            text = f"rank {view.rank}: {share:.3g}"
            axis.annotate(text, where, va="center", xycoords=axis.get_yaxis_transform())
        top -= share
    for change in fit.shown:
        after = (s.first for s in fit.views[0].stretches if s.began + s.seconds >= change.at)
        _mark(axis, 1 + next(after, steps[-1]), change)
    axis.set_xlim(1, end)
    axis.set_ylim(0, max(total, *map(sum, zip(*shares, strict=True))))
    return _picture(
        figure,
        "shares",
        "How batches are split",
        "Each band is one rank's part of the batches; the numbers on the right are those of the last full batch. Once "
        "bands stay level the split has settled. Notches are the short last batches of epochs."
        + _marks(fit, " What the lost ranks took before is not drawn."),
    )


def _last_full_batch(views: Sequence[RankRecord]) -> list[float]:
    """Samples of each rank in the latest of the largest batches near the end."""
    batches = list(zip(*([s.samples / s.steps for s in view.end or view.stretches] for view in views), strict=False))
    return list(max(reversed(batches), key=sum))


# -- what all have in common -----------------------------------------------------------------------


def _plots(count: int, height: float, x: str = "", y: str = "", **options: Any) -> tuple[Figure, Sequence[Axes]]:
    """A wide figure of so many labelled plots side by side."""
    figure = Figure(figsize=(12, height), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False, **options)[0]
    for axis in axes if x else ():
        axis.set_xlabel(x)
        axis.set_ylabel(y)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _mark(axis: Axes, at: float, change: ReportedChange, since: float | None = None) -> None:
    """Mark a change of who takes part by a line with a word; if asked, with the time that led to it."""
    text = change.who if change.joined else f"{change.who} lost" if change.lost else "connections lost"
    if since is not None:
        axis.axvspan(since, at, color=LOST, alpha=0.12, lw=0)
    axis.axvline(at, color=LOST, lw=1.2, ls=(0, (4, 2)))
    place: dict[str, Any] = {"xycoords": axis.get_xaxis_transform(), "textcoords": "offset points", "va": "top"}
    box = {"fc": "w", "ec": "none", "alpha": 0.8, "pad": 1}
    axis.annotate(text, (at, 1.0), (3, -3), color=LOST, size="small", bbox=box, annotation_clip=True, **place)


def _marks(fit: FitRecord, more: str) -> str:
    """The part of a caption that explains the marks."""
    return f" A red line marks where the ranks went on after others were lost, or joined.{more}" if fit.shown else ""


def _fewer(fit: FitRecord) -> str:
    return f" Of {len(fit.views)} ranks the {LANES} slowest are shown." if len(fit.views) > LANES else ""


def _picture(figure: Figure, name: str, title: str, caption: str) -> Picture:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return Picture(name, title, caption, file.getvalue())
