"""Rows of ranks with time to the right, for docs/images/timelines.py."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from lightning_hetero.callbacks.plots import CAUSES, WAITING, lanes

COLOURS = {"compute": CAUSES["compute"], "wait": WAITING, "exchange": CAUSES["exchange"], "hidden": CAUSES["hidden"]}
LABELS = {
    "compute": "computes a step",
    "wait": "waits for others",
    "exchange": "exchanges; training stands still",
    "hidden": "exchanges in the background",
}
GRADIENTS, MIXES = "averages gradients", "takes in what has come"
MARK: dict[str, Any] = {
    "marker": "v",
    "ls": "",
    "ms": 6,
    "color": "w",
    "mec": CAUSES["hidden"],
    "mew": 1.4,
    "zorder": 6,
}
BELOW = 0.43  # of the middle of a row: where the background is drawn


class Lane:
    """Ranks as rows, time to the right.

    Args:
        title: of the plot.
        rows: names.
        until: where the plot ends.
        unit: of the time, if it has one.
    """

    def __init__(self, title: str, rows: Sequence[str], until: float, unit: str = "") -> None:
        self.title, self.rows, self.until, self.unit = title, list(rows), until, unit
        self.now = [0.0] * len(rows)
        self._random = Random(3)
        self.center: int | None = None  # the row of a center, if there is one
        self.spans: list[tuple[int, float, float, str]] = []
        self.texts: list[tuple[float, float, str, str]] = []
        self.links: list[tuple[float, list[int], str]] = []
        self.arrows: list[tuple[int, float, int, float, str]] = []
        self.mixed: list[tuple[int, float]] = []

    @property
    def running(self) -> bool:
        """Whether some rank has not come to the end of the plot."""
        return min(self.now) < self.until

    def add(self, row: int, length: float, kind: str = "compute", text: str = "") -> None:
        """Let a rank do something."""
        self.spans.append((row, self.now[row], length, kind))
        if text and self.now[row] + length <= self.until:
            self.texts.append((self.now[row] + length / 2, row, text, "w"))
        self.now[row] += length

    def step(self, row: int, times: float = 1.0) -> None:
        """Let a rank compute a step; steps differ a little, as they do on any machine."""
        self.add(row, times * self._random.uniform(0.88, 1.12))

    def wait(self, row: int, until: float) -> None:
        """Let a rank wait."""
        if until > self.now[row]:
            self.add(row, until - self.now[row], "wait")

    def behind(self, row: int, began: float, ended: float) -> None:
        """Let an exchange pass in the background of a rank."""
        self.spans.append((row, began, ended - began, "hidden"))

    def begin(self, rows: Sequence[int], lasts: float, text: str = "", drawn: float = 0.0) -> float:
        """Let ranks begin an exchange in the background; returns when it will be over. ``drawn`` as for ``meet``."""
        at = max(self.now[row] for row in rows)
        for row in rows:
            self.behind(row, self.now[row], at + lasts)
        self.links.append((at + drawn * lasts, list(rows), "hidden"))
        if text and at <= self.until:
            self.texts.append((at, min(rows) - 0.6, text, COLOURS["hidden"]))
        return at + lasts

    def meet(self, rows: Sequence[int], length: float, drawn: float = 0.5) -> None:
        """Let ranks wait for each other, and exchange; ``drawn`` is the part of it at which the link is drawn."""
        at = max(self.now[row] for row in rows)
        self.links.append((at + drawn * length, list(rows), "exchange"))
        for row in rows:
            self.wait(row, at)
            self.add(row, length, "exchange")

    def average(self, rows: Sequence[int]) -> None:
        """Let ranks wait for each other's gradients."""
        at = max(self.now[row] for row in rows)
        self.links.append((at, list(rows), GRADIENTS))
        for row in rows:
            self.wait(row, at)

    def mix(self, rows: Sequence[int]) -> None:
        """Mark where ranks take in what has come."""
        self.mixed += [(row, self.now[row]) for row in rows]

    def kinds(self) -> list[str]:
        """What is in the plot, for the legend."""
        found = {kind for *_, kind in self.spans} | {GRADIENTS for *_, kind in self.links if kind == GRADIENTS}
        return [*(kind for kind in COLOURS if kind in found), *([GRADIENTS] if GRADIENTS in found else [])] + (
            [MIXES] if self.mixed else []
        )

    def draw(self, axis: Axes, last: bool) -> None:
        """Draw it.

        Args:
            axis: where.
            last: whether nothing is drawn below it.
        """
        for row, at, length, kind in self.spans:
            thin = kind == "hidden" and row != self.center
            middle, height = (row + BELOW, 0.14) if thin else (row, 0.3 if row == self.center else 0.62)
            axis.barh(middle, length, height, at, color=COLOURS[kind], ec="w", lw=0 if thin else 0.8, zorder=2 + thin)
        for at, row, text, colour in self.texts:
            axis.text(at, row, text, color=colour, size=9, ha="center", va="center", zorder=7, clip_on=True)
        for at, rows, kind in self.links:
            if at <= self.until:
                self._link(axis, at, rows, kind)
        for row, at, to, then, kind in self.arrows:
            if then <= self.until:
                style = "<|-|>" if at == then else "-|>"
                arrow = {"arrowstyle": style, "color": COLOURS[kind], "lw": 1.3, "shrinkA": 0, "shrinkB": 0}
                drawn = axis.annotate("", (then, to), (at, row), arrowprops=arrow, zorder=5)
                drawn.arrow_patch.set_path_effects(_halo(1.3))
        shown = [(row, at) for row, at in self.mixed if at <= self.until]
        axis.plot([at for _, at in shown], [row for row, _ in shown], **MARK)
        lanes(axis, self.rows)
        if self.center is not None:
            axis.axhline(self.center, color=WAITING, lw=1, zorder=1)
        axis.set_xlim(0, self.until)
        axis.set_ylim(axis.get_ylim()[0], min([-0.45, *(row - 0.35 for _, row, *_ in self.texts)]))
        axis.set_title(self.title, loc="left", size=10.5, weight="bold")
        if self.unit and last:
            axis.set_xlabel(self.unit)
        elif self.unit:
            axis.set_xticklabels([])
        else:
            axis.set_xticks([])
            axis.spines["bottom"].set_visible(False)
            if last:
                axis.annotate("time →", (1, 0), (0, -4), "axes fraction", "offset points", ha="right", va="top", size=9)

    @staticmethod
    def _link(axis: Axes, at: float, rows: Sequence[int], kind: str) -> None:
        colour, width, size = ("#222222", 1.1, 2.2) if kind == GRADIENTS else (COLOURS[kind], 1.6, 4.5)
        places = [row + (BELOW if kind == "hidden" else 0) for row in rows]
        halo = {} if kind == GRADIENTS else {"path_effects": _halo(width)}
        axis.plot([at, at], [min(places), max(places)], color=colour, lw=width, zorder=4, **halo)
        face = "w" if kind == "exchange" else colour
        axis.plot([at] * len(rows), places, "o", ms=size, color=face, mec=colour, zorder=5)


def _halo(width: float) -> list[Any]:
    return [withStroke(linewidth=width + 1.8, foreground="w")]


def draw(found: Sequence[Lane], columns: int, path: Path) -> None:
    """Draw some plots.

    Args:
        found: the plots, row by row.
        columns: of plots.
        path: of the picture, a PNG.
    """
    rows = [max(len(lane.rows) for lane in found[i : i + columns]) for i in range(0, len(found), columns)]
    heights = [0.34 * count + 0.45 + 0.1 * bool(found[0].unit) for count in rows]
    figure = Figure(figsize=(12.5 if columns > 1 else 10, sum(heights) + 0.45), layout="constrained")
    axes = figure.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
    for axis, lane in zip(axes.flat, found, strict=True):
        lane.draw(axis, axis in axes[-1])
    kinds = list(dict.fromkeys(kind for lane in found for kind in lane.kinds()))
    order = [*COLOURS, GRADIENTS, MIXES]
    handles = [_handle(kind) for kind in sorted(kinds, key=order.index)]
    style = {"frameon": False, "fontsize": 8 if len(handles) > 5 else 8.5, "columnspacing": 1.1, "handlelength": 1.5}
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), **style)
    figure.savefig(path, dpi=140, pil_kwargs={"optimize": True})


def _handle(kind: str) -> Patch | Line2D:
    if kind == GRADIENTS:
        return Line2D([], [], color="#222222", lw=1.1, marker="o", ms=2.2, label=kind)
    if kind == MIXES:
        return Line2D([], [], **MARK, label=kind)
    return Patch(color=COLOURS[kind], label=LABELS[kind])
