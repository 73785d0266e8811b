"""The report of a fit: one page that explains itself, the pictures in it, and the figures as JSON."""

import json
import math
import platform
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from html import escape
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem

from lightning_hetero.callbacks.attendance import Attendance
from lightning_hetero.callbacks.inline import Summary
from lightning_hetero.callbacks.lineup import sentence_of
from lightning_hetero.callbacks.record import Fit, View, together
from lightning_hetero.callbacks.totals import Totals, settled, totals
from lightning_hetero.callbacks.verdict import Verdict, judge
from lightning_hetero.comm.topology import group_of
from lightning_hetero.strategies.base import HeteroStrategy
from lightning_hetero.strategies.replica import ReplicaStrategy

Row = Sequence[object]
#: What pictures may be called.
PICTURES = ("timeline", "parts", "shares", "speed", "exchanges", "course", "pairings")


def fit_of(strategy: HeteroStrategy, module: str, views: list[View], ended: str | None, attendance: Attendance) -> Fit:
    """What is known of a fit.

    Args:
        strategy: with which it ran.
        module: the name of the LightningModule.
        views: of the ranks.
        ended: the error that ended it early, if one did.
        attendance: who took part.
    """
    options, lineup = strategy.options, attendance.lineup
    lost = attendance.changes(strategy.survival.losses, views)
    averager = strategy.averager if isinstance(strategy, ReplicaStrategy) else None
    chosen = {"balance": options.balance, "global_batch_size": options.global_batch_size}
    chosen |= {"rebalance_every_n_steps": options.rebalance_every_n_steps, **strategy.algorithm_options()}
    hosts = {lineup.places[rank][0] for rank in lineup.ranks}
    slow, ids = strategy.share.planner.too_slow, () if strategy.job is None else strategy.job.view.ids
    left = f"; {_count(lost[-1].ranks, 'rank')} at the end" if lost else ""
    facts = {
        "model": module,
        "strategy": type(strategy).__name__,
        "options": ", ".join(f"{name}={value!r}" for name, value in chosen.items() if value is not None),
        "ranks": f"{len(lineup.ranks)}, in {_count(len(lineup.replicas), 'replica')}, on {_count(len(hosts), 'host')}"
        + left,
        "written": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "versions": f"lightning-hetero {version('lightning-hetero')}, PyTorch {torch.__version__}, "
        f"Lightning {version('lightning')}, Python {platform.python_version()}",
    }
    return Fit(
        views,
        lineup.replicas,
        lineup.places,
        averager is None or averager.facts.lockstep,
        options.balance == "auto",
        facts,
        strategy.pairings if isinstance(strategy, ReplicaStrategy) else None,
        ended,
        lost,
        slow and slow._replace(ranks=tuple(ids[rank] for rank in slow.ranks)),
    )


def folder_of(report: str | Path, folder: str) -> str:
    """Where a report is to be written; a relative path counts from a folder. Both may be remote."""
    if "://" in str(report):
        return str(report)
    return f"{folder.rstrip('/')}/{report}" if "://" in folder else str(Path(folder) / report)


def verdict_of(fit: Fit) -> Verdict:
    """The verdict on the second half of the steps, when shares have settled; first it says who was lost, and joined."""
    missing = fit.living - len(fit.views)
    verdict = judge(totals(fit), fit.lockstep, fit.automatic, missing=missing, slow=fit.slow)
    return verdict._replace(sentences=(*map(sentence_of, fit.changes), *verdict.sentences))


def figures(fit: Fit, verdict: Verdict) -> dict[str, Any]:
    """All that the report shows, of builtins only."""
    part = settled(fit)
    return {
        **fit._asdict(),
        "verdict": verdict._asdict(),
        "slow": fit.slow and fit.slow._asdict(),
        "settled": {"began": part.began, "ended": part.ended},
        "changes": [
            {**change._asdict(), "lost": _named(change.lost), "stalls": _named(change.stalls)} for change in fit.changes
        ],
        "views": [
            {
                **view._asdict(),
                **{
                    name: [stretch._asdict() for stretch in getattr(view, name)]
                    for name in ("stretches", "beginning", "end")
                },
                "exchanges": [exchanged._asdict() for exchanged in view.exchanges],
                "losses": [{**asdict(loss), "lost": _named(loss.lost)} for loss in view.losses],
                "cost": {**view.cost._asdict(), "bends": view.cost.bends} if view.cost else None,
                "settled": together(late)._asdict(),
                "samples_per_s": own.speed,
                "pace": own.pace,
                "network": own.network,
                "between": own.between,
            }
            for view, late, own in zip(fit.views, part.stretches, totals(fit), strict=True)
        ],
    }


def write(folder: str, fit: Fit) -> Summary:
    """Write ``report.html``, ``figures.json`` and the pictures.

    Args:
        folder: made if missing; what an earlier fit has written there is replaced. May be remote, as Lightning's may.
        fit: what to report.

    Returns:
        The page in short, and where it is.
    """
    verdict = verdict_of(fit)
    pictures = []
    if find_spec("matplotlib"):
        from lightning_hetero.callbacks.plots import draw  # takes a second, and only the one rank that writes needs it

        pictures = draw(fit)
    contents = {f"{picture.name}.png": picture.png for picture in pictures}
    contents["figures.json"] = json.dumps(_plain(figures(fit, verdict)), allow_nan=False).encode()
    shown = "\n".join(
        f'<section><h2>{escape(p.title)}</h2>\n<p>{escape(p.caption)}</p>\n<img alt="{escape(p.title)}" '
        f'src="data:image/png;base64,{b64encode(p.png).decode()}"></section>'
        for p in pictures
    )
    contents["report.html"] = _page(fit, verdict, shown or _NO_PICTURES).encode()
    system = get_filesystem(folder)
    system.makedirs(folder, exist_ok=True)
    for name in PICTURES:  # an earlier fit may have had more of them
        if system.exists(f"{folder}/{name}.png"):
            system.rm(f"{folder}/{name}.png")
    for name, content in contents.items():
        with system.open(f"{folder}/{name}", "wb") as file:
            file.write(content)
    drawn = {picture.name: picture.png for picture in pictures}
    return Summary(f"{folder}/report.html", _title(fit), verdict, drawn.get("timeline"))


_NO_PICTURES = (
    "<section><h2>Pictures</h2><p>There are none, because matplotlib is not installed: "
    "<code>pip install 'lightning-hetero[plots]'</code>.</p></section>"
)


def _page(fit: Fit, verdict: Verdict, pictures: str) -> str:
    ends = [last.began + last.seconds for view in fit.views for last in view.end[-1:]]
    steps = sum(stretch.steps for stretch in fit.views[0].stretches)
    facts = {"steps": f"{steps:,} in {max(ends):,.1f} s", **fit.facts}
    ended = (
        f'<p class="ended">The fit was ended early by {escape(fit.ended)}. What rank {fit.views[0].rank} saw:</p>'
        if fit.ended
        else ""
    )
    rest = "".join(f"<p>{escape(sentence)}</p>" for sentence in verdict.sentences)
    advice = "".join(f"<li>{escape(sentence)}</li>" for sentence in verdict.advice)
    pairings = ""
    if fit.pairings:
        head = ["replica", *(f"with {i}" for i in range(len(fit.pairings)))]
        rows = [[i, *("" if i == j else n for j, n in enumerate(row))] for i, row in enumerate(fit.pairings)]
        pairings = f"<section><h2>Completed exchanges of each replica with each</h2>{_table(head, rows)}</section>"
    page = Template(files("lightning_hetero.callbacks").joinpath("report.html").read_text(encoding="utf-8"))
    return page.substitute(
        title=escape(_title(fit)),
        headline=escape(verdict.headline),
        sentences=ended + rest,
        advice=advice,
        pictures=pictures,
        ranks=_table(_HEAD, [_row(fit, *both) for both in zip(fit.views, totals(fit), strict=True)]),
        changes=_changes(fit),
        exchanges=_exchanges(fit),
        pairings=pairings,
        facts=_table((), facts.items()),
    )


def _title(fit: Fit) -> str:
    return f"{fit.facts['strategy']}: {fit.facts['model']} on {_count(sum(map(len, fit.replicas)), 'rank')}"


_HEAD = (
    "rank", "replica", "host", "device", "samples per step", "samples/s while it works", "compute, ms per step",
    "loading data, ms", "waiting for ranks, ms", "exposed exchange, ms", "between steps, ms",
)  # fmt: skip


def _row(fit: Fit, view: View, own: Totals) -> Row:
    times = [
        f"{1e3 * getattr(own, part) / own.steps:.2f}" for part in ("compute", "data", "wait", "exchange", "between")
    ]
    return (
        view.rank,
        group_of(view.rank, fit.replicas),
        *fit.places[view.rank],
        f"{own.samples / own.steps:.1f}",
        f"{own.speed:,.0f}",
        *times,
    )


def _exchanges(fit: Fit) -> str:
    rows = [
        (view.rank, e.exchanges, f"{e.bytes / 1e6:,.3f}", f"{e.hidden:.2f}", f"{e.exposed:.2f}")
        for view in fit.views
        if (e := view.latest).exchanges
    ]
    if not rows:
        return ""
    head = ("rank", "exchanges", "MB sent over the network", "hidden, s", "exposed, s")
    return f"<section><h2>Exchanges between replicas, whole fit</h2>{_table(head, rows)}</section>"


def _changes(fit: Fit) -> str:
    if not fit.changes:
        return ""
    head = (
        "view",
        "after step",
        "s",
        "lost or joined",
        "ranks",
        "replicas",
        "longest stall, s",
        "samples lost",
        "now writes",
    )
    rows = [
        (c.view, c.step, f"{c.at:.2f}", c.how, c.ranks, c.replicas, f"{c.stall:.2f}", c.amount, f"rank {c.writer}")
        for c in fit.changes
    ]
    again = any(change.at < 0 for change in fit.changes)
    joined = "Pictures and sums begin when others have last joined; what was before has negative seconds. "
    return (
        "<section><h2>Who was lost, and who joined</h2><p>Ranks keep the numbers that they had at first; when others "
        f"join, all are numbered anew. {joined if again else ''}A stall is the time from the beginning of the step or "
        "exchange that broke, or from when a rank stopped for others to join, until it went on; it counts as time "
        "between steps. Samples that are lost were drawn for the lost ranks, and nobody trains on them. The last "
        f"column is the rank that writes checkpoints and logs from then on.</p>{_table(head, rows)}</section>"
    )


def _named(values: Mapping[int, Any]) -> dict[str, Any]:
    """As JSON has it."""
    return {str(rank): value for rank, value in values.items()}


def _table(head: Sequence[str], rows: Iterable[Row]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{f'<thead><tr>{top}</tr></thead>' if top else ''}<tbody>\n{body}\n</tbody></table>"


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _plain(value: Any) -> Any:
    """Numbers that JSON lacks become null."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
