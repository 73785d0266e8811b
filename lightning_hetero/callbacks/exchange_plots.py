"""The report's pictures of what happens between replicas."""

import math
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightning_hetero.callbacks.canvas import NEUTRAL, RANKS, Picture, above, colours, dress, picture
from lightning_hetero.callbacks.record import Exchanged, Fit, View


def exchanges(fit: Fit) -> Picture | None:
    """How many, and how many bytes."""
    leaders = _leaders(fit)
    if not any(view.exchanges for view in leaders):
        return None
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    alike = len({view.latest[1:3] for view in leaders}) == 1
    for i, (view, colour) in enumerate(zip(leaders[:1] if alike else leaders, colours(len(leaders)), strict=False)):
        colour, label = (NEUTRAL[0], "each replica") if alike else (colour, f"replica {i}")
        steps = [0, *(e.step for e in view.exchanges)]
        left.plot(steps, [0, *(e.exchanges for e in view.exchanges)], color=colour, drawstyle="steps-post", label=label)
        right.plot(steps, [0, *(e.bytes / 1e6 for e in view.exchanges)], color=colour, drawstyle="steps-post")
    dress(left, "step", "exchanges so far")
    dress(right, "step", "MB sent over the network so far")
    right.set_ylim(0, 1.05 * max(view.latest.bytes for view in leaders) / 1e6 or 1)
    if alike or len(leaders) <= len(RANKS):
        above(left)
    return picture(
        figure,
        "exchanges",
        "Exchanges between replicas",
        "How often replicas have exchanged parameters, and how much each has sent over the network. Within a host, "
        "gossip and asynchronous centers use shared memory, which does not count. The steeper a line, the more often "
        "replicas exchange; a replica with a lower line exchanges less often.",
    )


def course(fit: Fit) -> Picture | None:
    """The algorithm's own numbers, and how far replicas are apart."""
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
        dress(axis, "step", label)
        if name == "daso":
            _rates(axis, leaders[0].exchanges)
            continue
        rows = [[value(e) for e in view.exchanges] for view in leaders]
        rows = rows[:1] if all(row == rows[0] for row in rows) else rows
        shades = list(NEUTRAL[:1]) if len(rows) == 1 else colours(len(leaders))
        for i, (view, row, colour) in enumerate(zip(leaders, rows, shades, strict=False)):
            axis.plot([e.step for e in view.exchanges], row, color=colour, lw=1.2, label=f"replica {i}")
        axis.set_ylim(bottom=0)
        if 1 < len(rows) <= len(RANKS):
            above(axis)
    return picture(
        figure,
        "course",
        "The algorithm's own numbers",
        " ".join(_READ[name] for name, *_ in panels) + " Distances are Euclidean, over all parameters.",
    )


_READ = {
    "daso": "B is the number of steps between global exchanges, and W is how many steps later their result is mixed "
    "in. The shaded areas are the phases.",
    "center_distance": "The distance of replicas from the center: if it grows without end, the center pulls too weakly "
    "(moving_rate) or too rarely (tau).",
    "peer_distance": "The distance of two replicas when they exchanged: it should fall or stay level.",
    "consensus": "The distance of replicas from their mean when they exchanged: it should fall or stay level.",
}


def _rates(axis: Axes, exchanges: Sequence[Exchanged]) -> None:
    """B and W of DASO, over its phases."""
    steps = [e.step for e in exchanges]
    phases = [str(e.status["phase"]) for e in exchanges]
    shades = {"warm-up": "#EFEFEF", "cycling": "#FFFFFF", "cool-down": "#E4E4E4"}
    began = 0
    for i, phase in enumerate(phases):
        if i + 1 == len(phases) or phases[i + 1] != phase:
            axis.axvspan(began, steps[i], color=shades.get(phase, "#F4F4F4"), lw=0)
            narrow = steps[i] - began < 0.2 * steps[-1]
            axis.annotate(
                phase,
                ((began + steps[i]) / 2, 0.97),
                ha="center",
                va="top",
                xycoords=axis.get_xaxis_transform(),
                size="small",
                rotation=90 if narrow else 0,
            )
            began = steps[i]
    for name, label, colour in (("global_every", "B", NEUTRAL[0]), ("wait", "W", NEUTRAL[1])):
        cycling = [float(e.status[name]) if e.status["phase"] == "cycling" else math.nan for e in exchanges]
        axis.plot(steps, cycling, color=colour, drawstyle="steps-pre", label=label, lw=2)
    axis.set_ylim(0, 1.35 * max(float(e.status["global_every"]) for e in exchanges))
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    above(axis)


def pairs(fit: Fit) -> Picture | None:
    """Under gossip, completed exchanges of each with each."""
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
    return picture(
        figure,
        "pairings",
        "Who has met whom",
        "Completed exchanges of each replica with each other one. A pale row is a replica that takes part in few "
        "exchanges: it is slow, or its link is.",
    )


def _leaders(fit: Fit) -> list[View]:
    """The view of each replica's first rank, as far as known."""
    views = {view.rank: view for view in fit.views}
    return [views[ranks[0]] for ranks in fit.replicas if ranks[0] in views]
