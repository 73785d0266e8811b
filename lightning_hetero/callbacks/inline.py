"""What a monitor shows of itself in a notebook: the verdict, a line per rank, and who worked and who waited."""

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from lightning_hetero.callbacks.record import Record
from lightning_hetero.callbacks.verdict import Verdict

_HEAD = ("rank", "samples per step", "samples/s while it works", "work, ms per step", "waiting, ms per step")


class Summary(NamedTuple):
    """A report in short; the rank that has written it knows it, and the process of a notebook.

    Attributes:
        path: of the report's page.
        title: which strategy, which model, how many ranks.
        verdict: who is slowest and why, where the time goes, what to do next.
        picture: who worked and who waited, as PNG; None without matplotlib.

    Example::

        from lightning_hetero import HeteroMonitor
        from lightning_hetero.callbacks import Summary

        monitor = HeteroMonitor()  # give it to the Trainer, and fit
        summary: Summary | None = monitor.summary
        if summary is not None:
            print(summary.path, summary.verdict.headline)
    """

    path: str
    title: str
    verdict: Verdict
    picture: bytes | None


def html(history: Sequence[Record], summary: Summary | None) -> str:
    """A piece of HTML that needs no styles and no other file.

    Args:
        history: what ranks have told each other.
        summary: of the report, if one was written.
    """
    if not history and summary is None:
        return (
            "<p><b>HeteroMonitor</b> has seen no fit yet. Give it to <code>Trainer(callbacks=[...])</code> and fit; "
            "then it shows who worked, who waited, and how batches were split.</p>"
        )
    parts = []
    if summary is not None:
        parts.append(f'<div style="opacity:.7">{escape(summary.title)}</div>')
        parts.append(f'<p style="font-size:115%;font-weight:600">{escape(summary.verdict.headline)}</p>')
        parts += [f"<p>{escape(sentence)}</p>" for sentence in summary.verdict.sentences]
    if history:
        parts += [f"<p>{_course(_latest_fit(history))}</p>", _table(history[-1])]
    if summary is not None:
        if summary.picture is not None:
            png = b64encode(summary.picture).decode()
            parts.append(
                '<img alt="Who works and who waits" style="width:100%;background:#fff" '
                f'src="data:image/png;base64,{png}">'
            )
        # No link: a notebook's server would look for the path below its own folder.
        parts.append(f'<p style="opacity:.7">All pictures and numbers: <code>{escape(summary.path)}</code></p>')
    return f'<div style="max-width:60rem">{"".join(parts)}</div>'


def _latest_fit(history: Sequence[Record]) -> Sequence[Record]:
    """Its records; those of an earlier fit end with a higher step."""
    first = len(history)
    while first and (first == len(history) or history[first - 1].step < history[first].step):
        first -= 1
    return history[first:]


def _course(history: Sequence[Record]) -> str:
    """The first and the last of what is known."""
    first, last = history[0], history[-1]
    now = (
        f"After {last.step} steps: {last.throughput:,.0f} samples/s; {last.waiting:.0%} of all ranks' time is waiting."
    )
    if len(history) == 1:
        return escape(now)
    then = f" After {first.step} steps it was {first.throughput:,.0f} samples/s and {first.waiting:.0%}."
    return escape(now + then)


def _table(record: Record) -> str:
    ranks = record.ranks or range(len(record.samples))
    cells = zip(ranks, record.samples, record.samples_per_s, record.compute, record.wait, strict=True)
    rows = [
        (f"{rank}", f"{samples:.3g}", f"{speed:,.0f}", f"{1e3 * work:.1f}", f"{1e3 * wait:.1f}")
        for rank, samples, speed, work, wait in cells
    ]
    head = "".join(f"<th>{escape(name)}</th>" for name in _HEAD)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
