"""The pictures of the report: matplotlib, drawn without a display."""

import io
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from lightning_hetero.callbacks.record import Exchanged, Fit, Stretch, View, coarser

#: Okabe and Ito's colours, which colour-blind people can tell apart, too.
RANKS = ("#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#F0E442", "#555555")
PARTS = {
    "data": ("#E69F00", "loads data"),
    "compute": ("#0072B2", "computes"),
    "wait": ("#D9D9D9", "waits for other ranks"),
    "exchange": ("#D55E00", "waits for an exchange between replicas (exposed)"),
}
HIDDEN = ("#009E73", "exchange in the background (hidden)")
#: Most lanes of a time line, and most points of a curve.
LANES, POINTS = 16, 80
#: A time line shows about so many steps.
SHOWN = 16


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


def draw(fit: Fit) -> list[Picture]:
    """All pictures that this fit has something to show in."""
    return [
        picture
        for artist in (_time_lines, _parts, _shares, _speeds, _exchanges, _course, _pairs)
        if (picture := artist(fit))
    ]


def lane(axis: Axes, row: float, spans: Sequence[tuple[float, float]], colour: str, height: float = 0.8) -> None:
    """Draw spans of time, each as (start, length) in seconds, in one row of a time line."""
    axis.broken_barh(list(spans), (row - height / 2, height), facecolor=colour)


def lanes(axis: Axes, labels: Sequence[str]) -> None:
    """Make a plot a time line with one labelled row per rank."""
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    axis.tick_params("y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)


def colours(count: int) -> list[str]:
    """One colour per rank."""
    if count <= len(RANKS):
        return list(RANKS[:count])
    return [to_hex(colormaps["viridis"](i / (count - 1))) for i in range(count)]


def _time_lines(fit: Fit) -> Picture:
    views = sorted(sorted(fit.views, key=_speed)[:LANES])  # the slowest, if there are too many
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
        axis.set_title(title, loc="left", weight="bold")
        axis.set_xlabel("seconds since the ranks started together")
    lanes(axes[0], [f"rank {view.rank}" for view in views])
    axes[1].spines[["top", "right", "left"]].set_visible(False)
    axes[1].tick_params("y", length=0)
    shown = [part for part in PARTS if any(getattr(s, part) > 0 for v in views for s in v.stretches)]
    handles = [Patch(color=PARTS[part][0], label=PARTS[part][1]) for part in shown]
    handles += [Patch(color=HIDDEN[0], label=HIDDEN[1])] if any(v.background for v in views) else []
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    fewer = f" The {LANES} slowest ranks of {len(fit.views)} are shown." if len(views) < len(fit.views) else ""
    return _picture(
        figure,
        "timeline",
        "Who works and who waits",
        "One row per rank, time from left to right: the less grey and red, the better. Blank is what lies between "
        "steps, such as validation. Within a step the parts are drawn in a fixed order." + fewer,
    )


def _speed(view: View) -> float:
    own = view.settled
    return own.samples / max(own.data + own.compute, 1e-12)


def _window(ranks: Sequence[Sequence[Stretch]], at_the_end: bool) -> tuple[float, float]:
    """A span of time in which every rank's steps are known, and about ``SHOWN`` of the slowest's lie."""
    covered = [(steps[0].began, steps[-1].began + steps[-1].seconds) for steps in ranks]
    length = SHOWN * max((end - began) / len(steps) for (began, end), steps in zip(covered, ranks, strict=True))
    if at_the_end:
        last = max(end for _, end in covered)
        return max(last - length, min(began for began, _ in covered)), last
    first = min(began for began, _ in covered)
    return first, min(first + length, max(end for _, end in covered))


def _spans(steps: Sequence[Stretch]) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """For each part of a step, in the order in which parts are drawn, its (start, length) in all steps."""
    at = [step.began for step in steps]
    for part in ("exchange", "data", "compute", "wait"):  # an exchange follows the step whose lap is over
        lengths = [getattr(step, part) for step in steps]
        yield part, list(zip(at, lengths, strict=True))
        at = [start + length for start, length in zip(at, lengths, strict=True)]


def _parts(fit: Fit) -> Picture:
    figure = Figure(figsize=(12, 1.3 + 0.36 * len(fit.views)), layout="constrained")
    axis = figure.subplots()
    left = [0.0] * len(fit.views)
    for part, (colour, label) in PARTS.items():
        widths = [100 * getattr(v.settled, part) / max(v.settled.seconds, 1e-12) for v in fit.views]
        if any(widths):
            axis.barh(range(len(widths)), widths, left=left, color=colour, label=label, height=0.8)
        for row, (start, width) in enumerate(zip(left, widths, strict=True)):
            if width >= 4:
                dark = part in ("compute", "exchange")
                axis.text(start + width / 2, row, f"{width:.0f}%", ha="center", va="center", color="w" if dark else "k")
        left = [a + b for a, b in zip(left, widths, strict=True)]
    lanes(axis, [f"rank {view.rank}" for view in fit.views])
    axis.set_xlim(0, 100)
    axis.set_xlabel("% of the time of the second half's steps")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return _picture(
        figure,
        "parts",
        "What each rank's time goes to",
        "Blue is useful work. Much grey on all ranks but one: that one holds them up. Much orange: data come too "
        "slowly. Much red: exchanges between replicas, or the wait for others at them, are not hidden.",
    )


def _shares(fit: Fit) -> Picture:
    rows = [coarser(view.stretches, POINTS) for view in fit.views]
    count = min(len(row) for row in rows)
    shares = [[s.samples / s.steps for s in row[:count]] for row in rows]
    steps = [s.first + 1 for s in rows[0][:count]]
    figure, axis = _plane("step", "samples per step")
    # Twice the last point, so that its step has a width, too.
    axis.stackplot(
        [*steps, rows[0][count - 1].first + rows[0][count - 1].steps + 1],
        [[*row, row[-1]] for row in shares[::-1]],
        colors=colours(len(shares))[::-1],
        step="post",
    )
    top = total = sum(row[-1] for row in shares)
    for view, row in zip(fit.views, shares, strict=True):
        if row[-1] > 0.03 * total:
            axis.annotate(
                f"rank {view.rank}: {row[-1]:.3g}",
                (1.01, top - row[-1] / 2),
                va="center",
                xycoords=axis.get_yaxis_transform(),
            )
        top -= row[-1]
    axis.set_xlim(1, steps[-1] + rows[0][count - 1].steps)
    axis.set_ylim(0, max(map(sum, zip(*shares, strict=True))))
    return _picture(
        figure,
        "shares",
        "How batches are split",
        "Each band is one rank's part of the batches, on the right at the end of the fit: wide bands are fast ranks. "
        "Bands that settle have found the split; bands that move follow speeds that change.",
    )


def _speeds(fit: Fit) -> Picture:
    rows = [coarser(view.stretches, POINTS) for view in fit.views]
    groups = list(zip(*rows, strict=False))
    steps = [group[0].first + group[0].steps / 2 for group in groups]
    figure, axis = _plane("step", "samples/s")
    solo = [sum(s.samples / max(s.data + s.compute, 1e-12) for s in group) for group in groups]
    job = [sum(s.samples / max(s.seconds, 1e-12) for s in group) for group in groups]
    axis.fill_between(steps, job, solo, color="#EEEEEE")
    axis.plot(steps, solo, color="#888888", ls="--", label="sum of the ranks' speeds while they work")
    axis.plot(steps, job, color="#0072B2", lw=2, label="the whole job")
    axis.set_ylim(0, 1.1 * max(_typical(solo), _typical(job)))
    axis.legend(frameon=False, loc="lower right")
    return _picture(
        figure,
        "speed",
        "How fast the job is, and how fast it could be",
        "The dashed line is what the ranks would reach together if none ever waited or communicated; the blue line is "
        "what they reach. The gap is lost to waiting and communication.",
    )


def _typical(values: Sequence[float]) -> float:
    """The greatest value but for outliers."""
    return sorted(values)[math.ceil(0.97 * len(values)) - 1]


def _exchanges(fit: Fit) -> Picture | None:
    leaders = _leaders(fit)
    if not any(view.exchanges for view in leaders):
        return None
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    alike = len({view.latest[1:3] for view in leaders}) == 1
    for i, (view, colour) in enumerate(zip(leaders[:1] if alike else leaders, colours(len(leaders)), strict=False)):
        label = "each replica" if alike else f"replica {i}"
        steps = [0, *(e.step for e in view.exchanges)]
        left.plot(steps, [0, *(e.exchanges for e in view.exchanges)], color=colour, drawstyle="steps-post", label=label)
        right.plot(steps, [0, *(e.bytes / 1e6 for e in view.exchanges)], color=colour, drawstyle="steps-post")
    _dress(left, "step", "exchanges so far")
    _dress(right, "step", "MB sent so far")
    left.legend(frameon=False)
    return _picture(
        figure,
        "exchanges",
        "Exchanges between replicas",
        "How often replicas have exchanged parameters, and how much each has sent. Steep parts are where they meet "
        "often; a replica whose line is lower meets others more rarely.",
    )


def _course(fit: Fit) -> Picture | None:
    """The algorithm's own numbers."""
    leaders = [view for view in _leaders(fit) if view.exchanges]
    if not leaders:
        return None
    panels: list[tuple[str, str, Callable[[Exchanged], float]]] = []
    known = leaders[0].exchanges[-1].status
    if "global_every" in known:
        panels.append(("daso", "steps", lambda e: math.nan))
    for name, label in (
        ("center_distance", "distance from the center"),
        ("peer_distance", "distance from the latest partner"),
    ):
        if name in known:
            panels.append((name, label, lambda e, name=name: float(e.status.get(name, math.nan))))  # type: ignore[misc]
    if any(math.isfinite(e.distance) for e in leaders[0].exchanges):
        panels.append(("consensus", "distance from the mean", lambda e: e.distance))
    if not panels:
        return None
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    for axis, (name, label, value) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _dress(axis, "step", label)
        if name == "daso":
            _rates(axis, leaders[0].exchanges)
            continue
        rows = [[value(e) for e in view.exchanges] for view in leaders]
        rows = rows[:1] if all(row == rows[0] for row in rows) else rows
        for i, (view, row, colour) in enumerate(zip(leaders, rows, colours(len(leaders)), strict=False)):
            axis.plot([e.step for e in view.exchanges], row, color=colour, lw=1.2, label=f"replica {i}")
        axis.set_ylim(bottom=0)
        if len(rows) > 1:
            axis.legend(frameon=False, fontsize="small")
    return _picture(
        figure,
        "course",
        "Where the algorithm stands",
        " ".join(_READ[name] for name, *_ in panels) + " Distances are Euclidean, over all parameters.",
    )


_READ = {
    "daso": "B is the number of steps between global exchanges, W how many steps later their result is mixed in; the "
    "shades are the phases.",
    "center_distance": "How far replicas are from the center that pulls them: a line that grows without end means that "
    "they explore more than the center can hold.",
    "peer_distance": "How far two replicas were from each other when they met: it should fall, or "
    "stay level, as they agree.",
    "consensus": "How far replicas are from their mean when they meet: it should fall, or stay level.",
}


def _rates(axis: Axes, exchanges: Sequence[Exchanged]) -> None:
    """B and W of DASO, over its phases."""
    steps = [e.step for e in exchanges]
    phases = [str(e.status["phase"]) for e in exchanges]
    shades = {"warm-up": "#FBE9D0", "cycling": "#E3F1FA", "cool-down": "#E2F3EC"}
    began = 0
    for i, phase in enumerate(phases):
        if i + 1 == len(phases) or phases[i + 1] != phase:
            axis.axvspan(began, steps[i], color=shades.get(phase, "#F4F4F4"), lw=0)
            axis.annotate(
                phase,
                ((began + steps[i]) / 2, 0.97),
                ha="center",
                va="top",
                xycoords=axis.get_xaxis_transform(),
                size="small",
            )
            began = steps[i]
    for name, label, colour in (("global_every", "B", RANKS[0]), ("wait", "W", RANKS[3])):
        cycling = [float(e.status[name]) if e.status["phase"] == "cycling" else math.nan for e in exchanges]
        axis.plot(steps, cycling, color=colour, drawstyle="steps-pre", label=label, lw=2)
    axis.set_ylim(0, 1.35 * max(float(e.status["global_every"]) for e in exchanges))
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(frameon=False, loc="center right")


def _pairs(fit: Fit) -> Picture | None:
    if not fit.pairings:
        return None
    count = len(fit.pairings)
    figure = Figure(figsize=(6, 4.4), layout="constrained")
    axis = figure.subplots()
    values = [[math.nan if i == j else n for j, n in enumerate(row)] for i, row in enumerate(fit.pairings)]
    image = axis.imshow(values, cmap="Blues", vmin=0, vmax=max(1.0, *(n for row in fit.pairings for n in row)))
    if count <= 12:
        middle = max(n for row in fit.pairings for n in row) / 2
        for i, row in enumerate(fit.pairings):
            for j, n in enumerate(row):
                axis.text(j, i, "" if i == j else str(n), ha="center", va="center", color="w" if n > middle else "k")
    axis.set_xlabel("with replica")
    axis.set_ylabel("replica")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, label="completed exchanges")
    return _picture(
        figure,
        "pairings",
        "Who has met whom",
        "Completed exchanges of each replica with each other one. A pale row is a replica that is rarely met: a slow "
        "one, or one behind a slow link.",
    )


def _leaders(fit: Fit) -> list[View]:
    """The view of each replica's first rank, as far as known."""
    views = {view.rank: view for view in fit.views}
    return [views[ranks[0]] for ranks in fit.replicas if ranks[0] in views]


def _plane(x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    axis = figure.subplots()
    _dress(axis, x, y)
    return figure, axis


def _dress(axis: Axes, x: str, y: str) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.spines[["top", "right"]].set_visible(False)


def _picture(figure: Figure, name: str, title: str, caption: str) -> Picture:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return Picture(name, title, caption, file.getvalue())
