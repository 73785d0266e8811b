"""What the report's pictures have in common."""

import io
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

#: What a rank's time goes to. These colours mean nothing else in any picture; colour-blind people can tell them apart.
CAUSES = {"compute": "#0072B2", "data": "#F0C800", "exchange": "#D81B78", "hidden": "#3FA34D"}
WAITING = "#D9D9D9"
#: Time that belongs to no step.
BETWEEN = {"facecolor": "white", "edgecolor": "#BBBBBB", "hatch": "////", "linewidth": 0.5}
#: Ranks and replicas, from dark to light and back: earth and violet, so that none looks like a cause.
RANKS = ("#4B2E83", "#C2A5CF", "#8C510A", "#DFC27D", "#7A0C2E", "#B8906F", "#9970AB", "#3B3B3B")
#: Where ranks were lost.
LOST = "#C00000"
#: What belongs to no single rank: the job, or an algorithm's own numbers.
NEUTRAL = ("#222222", "#888888")


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


def plane(x: str, y: str) -> tuple[Figure, Axes]:
    """A wide plot with labelled axes."""
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    axis = figure.subplots()
    dress(axis, x, y)
    return figure, axis


def dress(axis: Axes, x: str, y: str) -> None:
    """Label the axes of a plot, and take away what is not needed."""
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.spines[["top", "right"]].set_visible(False)


def above(axis: Axes) -> None:
    """A legend that covers no curve."""
    labels = axis.get_legend_handles_labels()[1]
    axis.legend(
        frameon=False, fontsize="small", ncols=max(1, min(4, len(labels))), loc="lower left", bbox_to_anchor=(0, 1)
    )


def mark(axis: Axes, at: float, text: str, since: float | None = None) -> None:
    """Mark a moment, such as the loss of a rank, by a line with a word; if asked, with the time that led to it."""
    if since is not None:
        axis.axvspan(since, at, color=LOST, alpha=0.12, lw=0)
    axis.axvline(at, color=LOST, lw=1.2, ls=(0, (4, 2)))
    axis.annotate(
        text,
        (at, 1.0),
        (3, -3),
        xycoords=axis.get_xaxis_transform(),
        textcoords="offset points",
        va="top",
        color=LOST,
        size="small",
        bbox={"fc": "w", "ec": "none", "alpha": 0.8, "pad": 1},
        annotation_clip=True,
    )


def picture(figure: Figure, name: str, title: str, caption: str) -> Picture:
    """The figure as a file with its words."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return Picture(name, title, caption, file.getvalue())
