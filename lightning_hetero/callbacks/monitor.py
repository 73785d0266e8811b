"""Shows who computes how much, how fast, who waits, and what exchanges between replicas cost."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.strategies.hetero import HeteroStrategy
from lightning_hetero.strategies.replicas import ReplicaStrategy
from lightning_hetero.strategies.workshare import Workshare

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Record(NamedTuple):
    """What the ranks told each other at one exchange; of times and samples, the mean per step since the one before.

    Attributes:
        step: batches done when it was taken in.
        shares: samples of a full batch that each rank is to take, by the plan in force.
        samples: samples that each rank processed.
        compute: seconds of each rank's own work.
        wait: seconds that each rank waited for others.
    """

    step: int
    shares: tuple[int, ...]
    samples: tuple[float, ...]
    compute: tuple[float, ...]
    wait: tuple[float, ...]

    @property
    def samples_per_s(self) -> tuple[float, ...]:
        """Speed of each rank while it works."""
        return tuple(n / seconds for n, seconds in zip(self.samples, self.compute, strict=True))

    @property
    def throughput(self) -> float:
        """Samples per second of the whole job."""
        return sum(self.samples) * len(self.samples) / (sum(self.compute) + sum(self.wait))

    @property
    def waiting(self) -> float:
        """Fraction of all ranks' time that was spent waiting."""
        return sum(self.wait) / (sum(self.compute) + sum(self.wait))


class Exchanged(NamedTuple):
    """What replicas' exchanges have cost this one since the start of the fit, and where the algorithm stands.

    Attributes:
        step: batches done.
        exchanges: with other replicas, averages for validation and checkpoints among them.
        bytes: sent to other replicas.
        hidden: seconds for which an exchange was under way while this rank trained.
        exposed: seconds for which this rank waited for one.
        distance: RMS distance of the replicas from their mean at the latest exchange (Euclidean, over all values).
        status: the algorithm's own numbers and words, such as its phase.
    """

    step: int
    exchanges: int
    bytes: int
    hidden: float
    exposed: float
    distance: float
    status: dict[str, float | str]


class HeteroMonitor(Callback):
    """Logs how a strategy of this package splits batches and brings replicas together, and what comes of it.

    Whenever the ranks have exchanged their measurements (``rebalance_every_n_steps``; where there are several replicas,
    when they meet) the Trainer's loggers get, of
    each rank ``i``::

        hetero/share/rank{i}          samples per step
        hetero/samples_per_s/rank{i}  its own speed while it works
        hetero/compute_s/rank{i}      seconds per step of its own work
        hetero/wait_s/rank{i}         seconds per step that it waits for others

    and of the job ``hetero/samples_per_s`` and ``hetero/waiting``, the fraction of all ranks' time spent waiting. The
    progress bar shows the last two and the shares.

    Where there are several replicas, the loggers also get, after each exchange between them, as seen by rank 0::

        hetero/exchanges              so far
        hetero/bytes_sent             by this replica so far, the network's own headers not counted
        hetero/hidden_s               seconds so far for which an exchange was under way while it trained
        hetero/exposed_s              seconds so far for which it waited for an exchange
        hetero/consensus_distance     RMS distance of the replicas from their mean, where all exchange at once
        hetero/exchanges_per_s        lately
        hetero/...                    the algorithm's own numbers: for DASO ``global_every`` (B) and ``wait`` (W); for
                                      the elastic family ``center_distance`` (RMS over replicas; of rank 0 where they
                                      come one by one) and ``exchanges_per_s/replica{i}``

    Under gossip ``hetero/missed`` counts exchanges that were not completed in time, ``hetero/met/replica{i}`` those
    with each other replica, and at the end a table says who has met whom.

    The progress bar shows the algorithm's numbers and words, and the part of the latest exchange's time that was
    hidden.

    It exchanges nothing itself. With accumulation, a step here is one batch.

    Attributes:
        history: everything logged so far of shares, on every rank; in memory only.
        exchanges: likewise of exchanges, of this rank.
        pairings: under gossip, once a fit has ended: of each replica, its completed exchanges with each.
    """

    def __init__(self) -> None:
        self.history: list[Record] = []
        self.exchanges: list[Exchanged] = []
        self._seen: object = None
        self.pairings: list[list[int]] | None = None
        self._at = math.nan  # when the latest exchange was seen

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Refuse strategies that have nothing to show.

        Raises:
            UnsupportedError: the strategy does not split batches by speed.
        """
        if not isinstance(trainer.strategy, HeteroStrategy):
            raise UnsupportedError(
                f"HeteroMonitor shows how batches are split by speed, which {type(trainer.strategy).__name__} does not "
                "do. Use a strategy of this package, such as Trainer(strategy='hetero_ddp'), or leave the callback out."
            )

    @override
    def on_train_batch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", *_: Any) -> None:
        """Log what is new."""
        strategy = trainer.strategy
        assert isinstance(strategy, HeteroStrategy)
        self._see_reports(trainer, strategy.share)
        if isinstance(strategy, ReplicaStrategy):
            self._see_exchanges(trainer, strategy)

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Say who has met whom, under gossip."""
        strategy = trainer.strategy
        if isinstance(strategy, ReplicaStrategy):
            self.pairings = strategy.pairings
            if self.pairings:
                rank_zero_info(_pairing_table(self.pairings))

    def _see_exchanges(self, trainer: "pl.Trainer", strategy: ReplicaStrategy) -> None:
        traffic = strategy.traffic
        if traffic.exchanges == (self.exchanges[-1].exchanges if self.exchanges else 0):
            return
        hidden = max(traffic.seconds - traffic.exposed, 0.0)
        costs = traffic.exchanges, traffic.bytes, hidden, traffic.exposed, traffic.distance
        record = Exchanged(strategy.share.step, *costs, strategy.status())
        last = self.exchanges[-1] if self.exchanges else record._replace(exchanges=0, hidden=0.0, exposed=0.0)
        self.exchanges.append(record)
        names = "exchanges", "bytes_sent", "hidden_s", "exposed_s", "consensus_distance"
        numbers = {name: value for name, value in record.status.items() if not isinstance(value, str)}
        now = time.perf_counter()
        pace = (traffic.exchanges - last.exchanges) / (now - self._at)
        self._at = now
        known = {**dict(zip(names, costs, strict=True)), "exchanges_per_s": pace, **numbers}
        self._log(trainer, {name: value for name, value in known.items() if math.isfinite(value)})
        short = {name: value for name, value in record.status.items() if "/" not in name}  # not of each replica
        shown = {name: f"{value:.3g}" if isinstance(value, float) else str(value) for name, value in short.items()}
        lately = hidden - last.hidden, traffic.exposed - last.exposed
        shown["hidden"] = f"{max(lately[0], 0.0) / sum(lately):.0%}" if sum(lately) > 0 else ""
        trainer.progress_bar_metrics.update(shown)  # type: ignore[arg-type]

    def _see_reports(self, trainer: "pl.Trainer", share: Workshare) -> None:
        """The ranks' latest reports, once; they arrive at the same step on every rank."""
        if share.reports is self._seen:
            return
        self._seen = share.reports
        if not share.reports or not all(report.samples for report in share.reports):
            return  # nothing yet, or a GPU whose first times are still to come
        _, _, _, _, samples, compute, wait, _ = zip(*share.reports, strict=True)
        planned = share.planner.total > 0  # but for streams, whose batches no plan sizes
        shares = share.planner.shares(share.step - 1) if planned else map(round, samples)
        record = Record(share.step, tuple(shares), samples, compute, wait)
        self.history.append(record)
        self._log(trainer, _metrics(record))
        # `self.log(..., prog_bar=True)` takes numbers only and costs a hundred times as much; bars show text as well.
        trainer.progress_bar_metrics.update(_texts(record))  # type: ignore[arg-type]

    @staticmethod
    def _log(trainer: "pl.Trainer", metrics: Mapping[str, float]) -> None:
        for logger in trainer.loggers:
            named = {f"hetero/{name}": float(value) for name, value in metrics.items()}
            logger.log_metrics(named, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def _metrics(record: Record) -> dict[str, float]:
    columns = {
        "share": record.shares,
        "samples_per_s": record.samples_per_s,
        "compute_s": record.compute,
        "wait_s": record.wait,
    }
    per_rank = {f"{name}/rank{i}": float(x) for name, row in columns.items() for i, x in enumerate(row)}
    return {**per_rank, "samples_per_s": record.throughput, "waiting": record.waiting}


def _pairing_table(pairings: Sequence[Sequence[int]]) -> str:
    width = max(len(str(count)) for row in pairings for count in row) + 2
    width = max(width, len(str(len(pairings))) + 2)
    head = "replica" + "".join(f"{i:{width}}" for i in range(len(pairings)))
    rows = [
        f"{i:7}" + "".join(f"{'-' if i == j else count:>{width}}" for j, count in enumerate(row))
        for i, row in enumerate(pairings)
    ]
    return "\n".join(["Completed exchanges of each replica with each:", head, *rows])


def _texts(record: Record) -> dict[str, str]:
    return {
        "samples/s": f"{record.throughput:.0f}",
        "waiting": f"{record.waiting:.0%}",
        "shares": " ".join(map(str, record.shares)),
    }
