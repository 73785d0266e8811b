"""Monitor callback: logs each rank's samples, speed and waiting and the cost of exchanges, and writes the report."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_hetero.callbacks.export import PrometheusEndpoint, add_dashboard
from lightning_hetero.callbacks.monitor_data import (
    DealtByCost,
    ExchangeRecord,
    FitRecord,
    MembershipHistory,
    RankRecord,
    Record,
    StepHistory,
    thin,
)
from lightning_hetero.callbacks.report import Summary, facts, notebook_html, report_folder, write
from lightning_hetero.comm.agreement import gather, raise_on_all
from lightning_hetero.comm.all_reduce import Traffic
from lightning_hetero.errors import ConfigurationError, MembershipLostError, UnsupportedError
from lightning_hetero.lightning_compat import logged_step
from lightning_hetero.strategies.base import HeteroStrategy
from lightning_hetero.strategies.recovery_policy import MembershipChange
from lightning_hetero.strategies.replica import ReplicaStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl


class _Watch(NamedTuple):
    """Records of a fit that is to be reported: where to, its steps, and who took part."""

    folder: str
    steps: StepHistory
    attendance: MembershipHistory


class HeteroMonitor(Callback):
    """Callback that logs how batches are split and what exchanges cost, and writes a report at the end of a fit.

    Loggers get ``hetero/...`` numbers of each rank, of the job, and of exchanges between replicas, as often as
    Lightning's own metrics (``log_every_n_steps``), when ranks have exchanged their measurements; the progress bar
    shows the main ones. ``docs/monitoring.md`` lists them. It exchanges nothing itself while ranks train. With
    accumulation, a step here is one batch. If ranks are lost and the fit goes on, all keep the numbers here that they
    had at first.

    At the end of a fit rank 0 writes ``report.html``: who was slowest and why, who waited, how batches were split, what
    exchanges cost; its pictures as PNG (with matplotlib, extra ``plots``); its figures as ``figures.json``. For this
    the ranks meet once before the first step, to set their clocks, and once after the last, so give the callback to all
    of them. If rank 0 is lost, the lowest rank that remains writes the report. If an error ends the fit, nobody meets:
    rank 0 reports what it has seen itself; a rank that the others have left out writes nothing.

    Args:
        report: folder for the report, relative to the logger's folder of this run, or without a logger to
            ``Trainer(default_root_dir)``; an earlier fit's is replaced. None, and ``fast_dev_run``, write nothing.
        prometheus_port: port at which rank 0 offers the latest numbers of a fit to Prometheus, at its address in the
            job's network; needs the extra ``prometheus``. If rank 0 is lost, its successor does. None: nobody does.

    Raises:
        ConfigurationError: ``report`` is no folder, or ``prometheus_port`` no port. When a fit begins, on every rank:
            ``prometheus_client`` is not installed, or the port is taken.

    Attributes:
        history: all that ranks have told each other, on every rank; older records are thinned out, so that there
            are never more than 2048.
        exchanges: a record per exchange between replicas, as this rank has seen it; older records are thinned out, too.
        losses: of other ranks in the latest fit, as this rank has seen them.
        pairings: under gossip, once a fit has ended: of each replica, its completed exchanges with each.
        summary: of the latest fit's report, on the rank that has written it: its path, its verdict, its first picture.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import HeteroMonitor

        trainer = Trainer(strategy="hetero_ddp", accelerator="cpu", devices=2, callbacks=[HeteroMonitor()])
    """

    def __init__(self, report: str | Path | None = "hetero_report", prometheus_port: int | None = None) -> None:
        if not (report is None or isinstance(report, str | Path)):
            raise ConfigurationError(f"report={report!r}: give a folder, or None for no report.")
        if not (prometheus_port is None or (type(prometheus_port) is int and 0 < prometheus_port < 2**16)):
            raise ConfigurationError(f"prometheus_port={prometheus_port!r}: give a port from 1 to 65535, or None.")
        self.history: list[Record] = []
        self.exchanges: list[ExchangeRecord] = []
        self.losses: list[MembershipChange] = []
        self.pairings: list[list[int]] | None = None
        self.summary: Summary | None = None
        self.report, self.prometheus_port = report, prometheus_port
        self._endpoint: PrometheusEndpoint | None = None  # of the running fit, on rank 0
        self._watch: _Watch | None = None  # of the running fit, if it is to be reported
        self._attendance: MembershipHistory | None = None  # in the running fit
        self._seen: list[Any] = []
        self._before = Traffic()  # what exchanges had cost at the latest one that was seen
        self._at = math.nan  # when that was
        self._log_from: dict[str, int] = {}  # the step from which on loggers get it again

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Refuse strategies that have nothing to show.

        Raises:
            UnsupportedError: the strategy does not split batches by speed.
        """
        strategy = _strategy_of(trainer)
        # An earlier fit's exchanges may have been another strategy's, or this one's that are counted on.
        self._before = replace(strategy.traffic) if isinstance(strategy, ReplicaStrategy) else Traffic()
        self._at = math.nan
        self._log_from = {}

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Set all ranks' clocks to 0, as near to each other as one meeting allows."""
        strategy = _strategy_of(trainer)
        raise_on_all(self._open_endpoint(trainer, strategy), "HeteroMonitor's endpoint for Prometheus")
        for logger in trainer.loggers:
            add_dashboard(logger)
        folder = trainer.log_dir or trainer.default_root_dir  # collective
        wanted = self.report if not trainer.fast_dev_run else None  # type: ignore[attr-defined]
        losses, ticket, told = strategy.recovery.losses, strategy.ticket, None
        if ticket is not None and ticket.replica is not None and self._attendance is not None:
            told = self._attendance.until(time.perf_counter(), losses)  # others have just joined
        everyone = gather((wanted, told), "the ranks to set their clocks for HeteroMonitor")
        self.summary, start = None, time.perf_counter()  # it is of an earlier fit
        self._attendance = MembershipHistory(strategy.job.view, start, [told for _, told in everyone])
        self.losses = [] if ticket is None else list(losses)
        if (report := everyone[0][0]) is not None:
            self._watch = _Watch(
                report_folder(report, folder), StepHistory(start, strategy.accounting.step), self._attendance
            )
            strategy.accounting.watchers.append(self._watch.steps.add)

    def _open_endpoint(self, trainer: "pl.Trainer", strategy: HeteroStrategy) -> ConfigurationError | None:
        """Open the endpoint if this is rank 0 and one is wanted; the reason, if it cannot be opened."""
        if self.prometheus_port is not None and trainer.is_global_zero and self._endpoint is None:
            try:
                self._endpoint = PrometheusEndpoint(strategy.interface, self.prometheus_port)
            except ConfigurationError as error:
                return error
        return None

    def _close_endpoint(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    @override
    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        self._close_endpoint()

    @override
    def on_train_batch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", *_: Any) -> None:
        """Log what is new."""
        strategy = _strategy_of(trainer)
        self._see_losses(trainer, strategy)
        self._see_reports(trainer, strategy)
        if isinstance(strategy, ReplicaStrategy):
            self._see_exchanges(trainer, strategy)

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Say who has met whom, under gossip, and write the report (collective)."""
        strategy = _strategy_of(trainer)
        if isinstance(strategy, ReplicaStrategy):
            self.pairings = strategy.pairings
            if self.pairings:
                rank_zero_info(_pairing_table(self.pairings))
        self._see_losses(trainer, strategy)
        if (watch := self._watch) is not None:
            view = self._stop_watching(strategy, watch)
            views = gather(view, "what HeteroMonitor has seen")
            if trainer.is_global_zero and all(views):
                self._write(strategy, pl_module, watch, views)

    @override
    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Write what this rank has seen, if it is rank 0 and was not left out; the others may be gone."""
        self._close_endpoint()
        strategy = trainer.strategy
        if (watch := self._watch) is not None and isinstance(strategy, HeteroStrategy):
            view = self._stop_watching(strategy, watch)
            # The others may go on without a rank that was left out, and write the report themselves.
            if trainer.is_global_zero and view is not None and not isinstance(exception, MembershipLostError):
                what = str(exception).strip().split("\n")[0]
                self._write(strategy, pl_module, watch, [view], f"{type(exception).__name__}{what and f': {what}'}")

    def give_back(self) -> dict[str, Any]:
        """Records for the process of a notebook, where ranks are forked or spawned."""
        return {name: getattr(self, name) for name in ("history", "exchanges", "losses", "pairings", "summary")}

    def take_back(self, given: dict[str, Any]) -> None:
        """Know what the first rank has seen."""
        vars(self).update(given)

    def _repr_html_(self) -> str:
        """Show the latest fit in a notebook."""
        return notebook_html(self.history, self.summary)

    def _stop_watching(self, strategy: HeteroStrategy, watch: _Watch) -> RankRecord | None:
        """All that has been seen; nothing if there was no step."""
        self._watch, steps = None, watch.steps
        strategy.accounting.watchers.remove(steps.add)
        if not steps.beginning:
            return None
        members, accounting = strategy.job.view, strategy.accounting
        return RankRecord(
            rank=members.ids[members.rank],
            stretches=steps.stretches,
            beginning=steps.beginning,
            end=steps.end,
            background=steps.background,
            exchanges=list(self.exchanges),
            cost=accounting.fitted and accounting.planner.cost_of_part(members.rank, accounting.fitted),
            losses=tuple(watch.attendance.since(strategy.recovery.losses)),
            by_cost=DealtByCost.of(accounting),
        )

    def _write(
        self,
        strategy: HeteroStrategy,
        module: "pl.LightningModule",
        watch: _Watch,
        views: list[RankRecord],
        ended: str | None = None,
    ) -> None:
        try:
            self.summary = write(watch.folder, self._record(strategy, module, watch, views, ended))
        except Exception as error:  # whatever it is, the training is worth more than its report
            rank_zero_warn(f"HeteroMonitor could not write its report to {watch.folder}: {error!r}")
        else:
            rank_zero_info(f"HeteroMonitor: who was slowest and why, who waited, what it cost: {self.summary.path}")

    def _record(
        self,
        strategy: HeteroStrategy,
        module: "pl.LightningModule",
        watch: _Watch,
        views: list[RankRecord],
        ended: str | None,
    ) -> FitRecord:
        """All that is known of a fit."""
        options, attendance = strategy.options, watch.attendance
        averager, pairings = None, None  # there are none where gradients are averaged
        if isinstance(strategy, ReplicaStrategy):
            averager, pairings = strategy.averager, strategy.pairings
        chosen = {"balance": options.balance, "global_batch_size": options.global_batch_size}
        chosen |= {"rebalance_every_n_steps": options.rebalance_every_n_steps, **strategy.algorithm_options()}
        slow, ids = strategy.accounting.planner.too_slow, strategy.collaborators.sharing.ids
        changes = attendance.changes(strategy.recovery.losses, views)
        return FitRecord(
            views=views,
            replicas=attendance.replicas,
            places=attendance.places,
            lockstep=averager is None or averager.traits.lockstep,
            automatic=options.balance == "auto",
            facts=facts(type(module).__name__, type(strategy).__name__, chosen, attendance, changes),
            pairings=pairings,
            ended=ended,
            changes=changes,
            slow=slow and slow._replace(ranks=tuple(ids[rank] for rank in slow.ranks)),
        )

    def _see_losses(self, trainer: "pl.Trainer", strategy: HeteroStrategy) -> None:
        for loss in strategy.recovery.losses[len(self.losses) :]:
            if problem := self._open_endpoint(trainer, strategy):  # rank 0 was lost, and this is its successor
                rank_zero_warn(str(problem))
            self.losses.append(loss)
            numbers = {"view": loss.view, "ranks": loss.ranks, "replicas": loss.replicas}
            self._log(trainer, {**numbers, "stall_s": loss.seconds, "lost_samples": loss.samples}, due=True)
            _show(trainer, {"lost ranks": " ".join(str(rank) for loss in self.losses for rank in loss.lost)})

    def _see_exchanges(self, trainer: "pl.Trainer", strategy: ReplicaStrategy) -> None:
        traffic, before = strategy.traffic, self._before
        if traffic.exchanges == before.exchanges:
            return
        hidden, hidden_before = (max(at.seconds - at.exposed, 0.0) for at in (traffic, before))
        costs = traffic.exchanges, traffic.bytes, hidden, traffic.exposed, traffic.distance
        status = strategy.status()
        self.exchanges.append(ExchangeRecord(strategy.accounting.step, *costs, status))
        thin(self.exchanges)
        now, spent = time.perf_counter(), (hidden - hidden_before, traffic.exposed - before.exposed)
        if self._watch is not None and spent[0] > 0:
            self._watch.steps.hidden(now - sum(spent), now - spent[1])  # its wait, if any, came last
        pace = (traffic.exchanges - before.exchanges) / (now - self._at)
        self._before, self._at = replace(traffic), now
        names = "exchanges", "bytes_sent", "hidden_s", "exposed_s", "consensus_distance"
        numbers = {name: value for name, value in status.items() if not isinstance(value, str)}
        known = {**dict(zip(names, costs, strict=True)), "exchanges_per_s": pace, **numbers}
        finite = {name: value for name, value in known.items() if math.isfinite(value)}
        self._log(trainer, finite, self._due(trainer, "exchanges"))
        short = {name: value for name, value in status.items() if "/" not in name}  # not of each replica
        shown = {name: f"{value:.3g}" if isinstance(value, float) else str(value) for name, value in short.items()}
        shown["hidden"] = f"{max(spent[0], 0.0) / sum(spent):.0%}" if sum(spent) > 0 else ""
        _show(trainer, shown)

    def _see_reports(self, trainer: "pl.Trainer", strategy: HeteroStrategy) -> None:
        """Record the ranks' latest reports, once; they arrive at the same step on every rank."""
        accounting, before = strategy.accounting, self._seen
        if accounting.reports is before:
            return
        self._seen = accounting.reports
        if before and all(any(report is one for one in before) for report in accounting.reports):
            return  # those of the ranks that remain
        if not accounting.reports or not all(report.steps for report in accounting.reports):
            return  # nothing yet, or the first times of a GPU are still to come
        samples, compute, wait = zip(*((r.samples, r.compute, r.wait) for r in accounting.reports), strict=True)
        planned = accounting.planner.total > 0  # but not for streams: no plan sizes their batches
        shares = tuple(accounting.planner.shares(accounting.step - 1) if planned else map(round, samples))
        record = Record(accounting.step, shares, samples, compute, wait, strategy.collaborators.sharing.ids)
        self.history.append(record)
        thin(self.history)
        columns = {"share": shares, "samples_per_s": record.samples_per_s, "compute_s": compute, "wait_s": wait}
        numbers = {
            f"{name}/rank{i}": x for name, row in columns.items() for i, x in zip(record.ranks, row, strict=False)
        }
        numbers |= {"samples_per_s": record.throughput, "waiting": record.waiting}
        view = strategy.job.view
        numbers |= {"ranks": view.world, "replicas": view.count}
        self._log(trainer, numbers, self._due(trainer, "reports"))
        shown = {"samples/s": f"{record.throughput:.0f}", "waiting": f"{record.waiting:.0%}"}
        _show(trainer, {**shown, "shares": " ".join(map(str, shares))})

    def _due(self, trainer: "pl.Trainer", what: str) -> bool:
        """Whether loggers are to get such a thing again: the first time, then as often as Lightning's own metrics."""
        step, every = logged_step(trainer), trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not (trainer.loggers and every and step >= self._log_from.get(what, 0)):
            return False
        self._log_from[what] = step + every
        return True

    def _log(self, trainer: "pl.Trainer", metrics: Mapping[str, float], due: bool) -> None:
        if self._endpoint is not None:
            self._endpoint.update(metrics)
        for logger in trainer.loggers if due else ():
            named = {f"hetero/{name}": float(value) for name, value in metrics.items()}
            logger.log_metrics(named, step=logged_step(trainer))


def _strategy_of(trainer: "pl.Trainer") -> HeteroStrategy:
    if not isinstance(trainer.strategy, HeteroStrategy):
        raise UnsupportedError(
            f"HeteroMonitor shows how batches are split by speed, which {type(trainer.strategy).__name__} does not do. "
            "Use a strategy of this package, such as Trainer(strategy='hetero_ddp'), or leave the callback out."
        )
    return trainer.strategy


def _show(trainer: "pl.Trainer", texts: dict[str, str]) -> None:
    """Show texts on the progress bar; ``self.log(..., prog_bar=True)`` takes numbers only and costs far more."""
    if trainer.progress_bar_callback is not None:
        trainer.progress_bar_metrics.update(texts)  # type: ignore[arg-type]


def _pairing_table(pairings: Sequence[Sequence[int]]) -> str:
    """Completed exchanges of each replica with each, to be printed."""
    width = max(len(str(count)) for row in pairings for count in (*row, len(pairings))) + 2
    head = "replica" + "".join(f"{i:{width}}" for i in range(len(pairings)))
    rows = [
        f"{i:7}" + "".join(f"{'-' if i == j else count:>{width}}" for j, count in enumerate(row))
        for i, row in enumerate(pairings)
    ]
    return "\n".join(["Completed exchanges of each replica with each:", head, *rows])
