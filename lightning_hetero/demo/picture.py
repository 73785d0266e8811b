"""The demo's picture: who worked, who waited, and how the batches were split."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_hetero.callbacks.plots import WAITING, colours, lane, lanes
from lightning_hetero.demo.result import DEVICES, GLOBAL_BATCH, Result

COLOURS = colours(len(DEVICES))
#: The part of the trainings that the time lines show, in seconds: long enough to see the split change.
SHOWN = 4.0


def draw(results: Sequence[Result], path: Path) -> Path:
    """Draw a row per training: a time line of every rank, and the split of every batch.

    Args:
        results: one per strategy.
        path: where to save the picture, as PNG.

    Returns:
        ``path``.
    """
    figure = Figure(figsize=(12, 3.4 * len(results) + 1.2), layout="constrained")
    names = ", ".join(result.strategy for result in results)
    figure.suptitle(f"The same training under {names}, on emulated devices of unequal speed", size=15)
    axes = figure.subplots(len(results), 2, squeeze=False, width_ratios=(5, 2))
    for (left, right), result in zip(axes, results, strict=True):
        _draw_time_line(left, result)
        _draw_split(right, result)
    figure.legend(
        handles=[
            *(Patch(color=colour, label=f"rank {rank} computes") for rank, colour in enumerate(COLOURS)),
            Patch(color=WAITING, label="waits for other ranks"),
        ],
        loc="outside lower center",
        ncols=len(COLOURS) + 1,
        frameon=False,
    )
    figure.savefig(path, dpi=150)
    return path


def _draw_time_line(axis: Axes, result: Result) -> None:
    began = min(steps[0].start for steps in result.ranks)
    for rank, (steps, colour) in enumerate(zip(result.ranks, COLOURS, strict=True)):
        lane(axis, rank, [(s.start - began, s.work + s.wait) for s in steps], WAITING)
        lane(axis, rank, [(s.start - began, s.work) for s in steps], colour)
    done = sum(step.start + step.work + step.wait <= began + SHOWN for step in result.ranks[0])
    axis.set_title(f"{result.strategy}: {done} steps in the first {SHOWN:.0f} seconds", loc="left", weight="bold")
    axis.set_xlabel("seconds since training began")
    axis.set_xlim(0, SHOWN)
    speeds = [f"rank {rank}\n{1e3 * cost.per_sample:.0f} ms per image" for rank, cost in enumerate(DEVICES)]
    lanes(axis, speeds)


def _draw_split(axis: Axes, result: Result) -> None:
    shares = [[step.samples for step in steps] for steps in result.ranks]
    axis.stackplot(range(1, len(shares[0]) + 1), shares[::-1], colors=COLOURS[::-1], step="mid")
    top = GLOBAL_BATCH
    for rank, row in enumerate(shares):
        axis.text(len(row), top - row[-1] / 2, f"  {row[-1]} on rank {rank}", va="center")
        top -= row[-1]
    axis.set_title(f"the split of {GLOBAL_BATCH} images", loc="left", weight="bold")
    axis.set_xlabel("step")
    axis.set_ylabel("images per step")
    axis.set_xlim(1, len(shares[0]))
    axis.set_ylim(0, GLOBAL_BATCH)
    axis.spines[["top", "right"]].set_visible(False)
