"""The report of a fit: a page with its pictures, the figures as JSON, and a summary for notebooks."""

import json
import math
import platform
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from datetime import datetime
from html import escape
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem

from lightning_hetero.callbacks.monitor_data import (
    FitRecord,
    MembershipHistory,
    Record,
    ReportedChange,
    merge_spans,
)
from lightning_hetero.callbacks.verdict import Verdict, settled, totals, verdict_of
from lightning_hetero.comm.topology import group_of

_COST = ("fixed", "per_sample", "bends", "limit")  # the last: most samples of a pass, where there are several
#: What pictures may be called.
PICTURES = ("timeline", "parts", "shares")


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


def facts(
    module: str,
    strategy: str,
    options: Mapping[str, Any],
    attendance: MembershipHistory,
    changes: Sequence[ReportedChange],
) -> dict[str, str]:
    """Head of the page: the model, the strategy and its options, the ranks, versions.

    Args:
        module: the name of the LightningModule.
        strategy: the name of its class.
        options: of the strategy; those that are ``None`` are left out.
        attendance: who took part.
        changes: of the view.
    """
    hosts = {attendance.places[rank][0] for rank in attendance.ranks}
    left = f"; {_count(changes[-1].ranks, 'rank')} at the end" if changes else ""
    ranks = f"{len(attendance.ranks)}, in {_count(len(attendance.replicas), 'replica')}"
    return {
        "model": module,
        "strategy": strategy,
        "options": ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None),
        "ranks": f"{ranks}, on {_count(len(hosts), 'host')}{left}",
        "written": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "versions": f"lightning-hetero {version('lightning-hetero')}, PyTorch {torch.__version__}, "
        f"Lightning {version('lightning')}, Python {platform.python_version()}",
    }


def report_folder(report: str | Path, folder: str) -> str:
    """The folder of a report; a relative path counts from a folder. Both may be remote."""
    if "://" in str(report):
        return str(report)
    return f"{folder.rstrip('/')}/{report}" if "://" in folder else str(Path(folder) / report)


def figures(fit: FitRecord, verdict: Verdict) -> dict[str, Any]:
    """All that the report shows, of builtins only."""
    late = settled(fit)
    views = [
        {
            **view._asdict(),
            "cost": view.cost and {name: getattr(view.cost, name, None) for name in _COST},
            "settled": merge_spans(part),
            "samples_per_s": own.speed,
            "pace": own.pace,
            "network": own.network,
            "between": own.between,
        }
        for view, part, own in zip(fit.views, late, totals(fit), strict=True)
    ]
    span = {"began": min(part[0].began for part in late), "ended": max(view.ended for view in fit.views)}
    found: dict[str, Any] = _plain({**fit._asdict(), "verdict": verdict, "settled": span, "views": views})
    return found


def write(folder: str, fit: FitRecord) -> Summary:
    """Write ``report.html``, ``figures.json`` and the pictures.

    Args:
        folder: made if missing; what an earlier fit has written there is replaced. May be remote, as Lightning's may.
        fit: what to report.

    Returns:
        The page in short, and where it is.
    """
    verdict, pictures = verdict_of(fit), []
    if find_spec("matplotlib"):
        from lightning_hetero.callbacks.plots import draw  # takes a second, and only the one rank that writes needs it

        pictures = draw(fit)
    contents = {f"{picture.name}.png": picture.png for picture in pictures}
    contents["figures.json"] = json.dumps(figures(fit, verdict), allow_nan=False).encode()
    shown = [_section(p.title, f"<p>{escape(p.caption)}</p>\n{_image(p.title, p.png)}") for p in pictures]
    contents["report.html"] = _page(fit, verdict, "\n".join(shown) or _NO_PICTURES).encode()
    system = get_filesystem(folder)
    system.makedirs(folder, exist_ok=True)
    for name in PICTURES:  # an earlier fit may have had more of them
        if system.exists(f"{folder}/{name}.png"):
            system.rm(f"{folder}/{name}.png")
    for name, content in contents.items():
        with system.open(f"{folder}/{name}", "wb") as file:
            file.write(content)
    return Summary(f"{folder}/report.html", _title(fit), verdict, contents.get("timeline.png"))


def notebook_html(history: Sequence[Record], summary: Summary | None) -> str:
    """The latest fit for a notebook: HTML that needs no styles and no other file.

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
        last = history[-1]
        ids = last.ranks or range(len(last.samples))
        rows = [
            (rank, f"{samples:.3g}", f"{speed:,.0f}", f"{1e3 * work:.1f}", f"{1e3 * wait:.1f}")
            for rank, samples, speed, work, wait in zip(
                ids, last.samples, last.samples_per_s, last.compute, last.wait, strict=True
            )
        ]
        head = ("rank", "samples per step", "samples/s while it works", "work, ms per step", "waiting, ms per step")
        parts.append(
            f"<p>After {last.step} steps: {last.throughput:,.0f} samples/s; {last.waiting:.0%} of all ranks&#x27; time "
            f"is waiting.</p>{_table(head, rows)}"
        )
    if summary is not None:
        if summary.picture is not None:
            parts.append(_image("Who works and who waits", summary.picture, ' style="width:100%;background:#fff"'))
        # No link: a notebook's server would look for the path below its own folder.
        parts.append(f'<p style="opacity:.7">All pictures and numbers: <code>{escape(summary.path)}</code></p>')
    return f'<div style="max-width:60rem">{"".join(parts)}</div>'


_NO_PICTURES = (
    "<section><h2>Pictures</h2><p>There are none, because matplotlib is not installed: "
    "<code>pip install 'lightning-hetero[plots]'</code>.</p></section>"
)
_RANKS = (
    "rank", "replica", "host", "device", "samples per step", "samples/s while it works", "compute, ms per step",
    "loading data, ms", "waiting for ranks, ms", "exposed exchange, ms", "between steps, ms",
)  # fmt: skip
_CHANGES = (
    "view", "after step", "s", "lost or joined", "ranks", "replicas", "longest stall, s", "samples lost", "now writes",
)  # fmt: skip


def _page(fit: FitRecord, verdict: Verdict, pictures: str) -> str:
    steps = sum(stretch.steps for stretch in fit.views[0].stretches)
    facts = {"steps": f"{steps:,} in {max(view.ended for view in fit.views):,.1f} s", **fit.facts}
    sentences = [f"<p>{escape(sentence)}</p>" for sentence in verdict.sentences]
    if fit.ended:
        early = f"The fit was ended early by {escape(fit.ended)}. What rank {fit.views[0].rank} saw:"
        sentences.insert(0, f'<p class="ended">{early}</p>')
    ranks = []
    for view, own in zip(fit.views, totals(fit), strict=True):
        times = own.compute, own.data, own.wait, own.exchange, own.between
        per_step = [f"{1e3 * seconds / own.steps:.2f}" for seconds in times]
        place = view.rank, group_of(view.rank, fit.replicas), *fit.places[view.rank]
        ranks.append((*place, f"{own.share:.1f}", f"{own.speed:,.0f}", *per_step))
    exchanges = [
        (view.rank, e.exchanges, f"{e.bytes / 1e6:,.3f}", f"{e.hidden:.2f}", f"{e.exposed:.2f}")
        for view in fit.views
        if (e := view.latest).exchanges
    ]
    head = ("rank", "exchanges", "MB sent over the network", "hidden, s", "exposed, s")
    replicas = ("replica", *(f"with {i}" for i in range(len(fit.pairings or ()))))
    met = [[i, *("" if i == j else n for j, n in enumerate(row))] for i, row in enumerate(fit.pairings or ())]
    page = Template(files("lightning_hetero.callbacks").joinpath("report.html").read_text(encoding="utf-8"))
    return page.substitute(
        title=escape(_title(fit)),
        headline=escape(verdict.headline),
        sentences="".join(sentences),
        advice="".join(f"<li>{escape(sentence)}</li>" for sentence in verdict.advice),
        pictures=pictures,
        ranks=_table(_RANKS, ranks),
        changes=_changes(fit),
        exchanges=_section("Exchanges between replicas, whole fit", _table(head, exchanges)) if exchanges else "",
        pairings=_section("Completed exchanges of each replica with each", _table(replicas, met)) if met else "",
        facts=_table((), facts.items()),
    )


def _changes(fit: FitRecord) -> str:
    rows = []
    for c in fit.changes:
        counts = c.ranks, c.replicas, f"{c.seconds:.2f}", f"{c.bound}{c.samples}", f"rank {c.writer}"
        rows.append((c.view, c.step, f"{c.at:.2f}", c.how, *counts))
    told = (
        "<p>Ranks keep the numbers that they had at first; when others join, all are renumbered, and pictures, sums "
        "and seconds begin again. A stall is the time from the beginning of the step or exchange that broke, or from "
        "when a rank stopped for others to join, until it went on; it counts as time between steps. Samples that are "
        "lost were drawn for the lost ranks, and nobody trains on them. The last column is the rank that writes "
        "checkpoints and logs from then on.</p>"
    )
    return _section("Who was lost, and who joined", told + _table(_CHANGES, rows)) if rows else ""


def _title(fit: FitRecord) -> str:
    return f"{fit.facts['strategy']}: {fit.facts['model']} on {_count(sum(map(len, fit.replicas)), 'rank')}"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{content}</section>"


def _image(title: str, png: bytes, style: str = "") -> str:
    return f'<img alt="{escape(title)}"{style} src="data:image/png;base64,{b64encode(png).decode()}">'


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{f'<thead><tr>{top}</tr></thead>' if top else ''}<tbody>\n{body}\n</tbody></table>"


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _plain(value: Any) -> Any:
    """The value as JSON has it: records by their names, and null for numbers that JSON lacks."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    elif is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
