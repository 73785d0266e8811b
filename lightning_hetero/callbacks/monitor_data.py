"""Data of the monitor: steps and exchanges of each rank, in bounded memory, and changes of membership."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from lightning_hetero.batching.accounting import BatchAccounting
from lightning_hetero.batching.shares import Cost, Stepwise, TooSlow
from lightning_hetero.batching.timer import StepTiming
from lightning_hetero.comm.view import View as Members
from lightning_hetero.strategies.recovery_policy import MembershipChange


class Record(NamedTuple):
    """Measurements that the ranks told each other at one exchange; times and samples are means per step since the last.

    Attributes:
        step: batches done when it was taken in.
        shares: samples of a full batch that each rank is to take, by the plan in force.
        samples: samples that each rank processed.
        compute: seconds of each rank's own work.
        wait: seconds that each rank waited for others.
        ranks: which ranks these are, by the numbers that they had when they joined the job; empty: 0, 1, and so on.

    Example::

        from lightning_hetero.callbacks import Record

        record = Record(step=8, shares=(24, 8), samples=(24.0, 8.0), compute=(0.03, 0.03), wait=(0.0, 0.01))
        print(record.samples_per_s, record.waiting)
    """

    step: int
    shares: tuple[int, ...]
    samples: tuple[float, ...]
    compute: tuple[float, ...]
    wait: tuple[float, ...]
    ranks: tuple[int, ...] = ()

    @property
    def samples_per_s(self) -> tuple[float, ...]:
        """Speed of each rank while it works."""
        return tuple(n and n / seconds for n, seconds in zip(self.samples, self.compute, strict=True))

    @property
    def throughput(self) -> float:
        """Samples per second of the whole job."""
        return sum(self.samples) * len(self.samples) / (sum(self.compute) + sum(self.wait))

    @property
    def waiting(self) -> float:
        """Fraction of all ranks' time that was spent waiting."""
        return sum(self.wait) / (sum(self.compute) + sum(self.wait))


class ExchangeRecord(NamedTuple):
    """Cost of a replica's exchanges since the start of the fit, and the algorithm's own numbers.

    Attributes:
        step: batches done.
        exchanges: with other replicas, averages for validation and checkpoints among them.
        bytes: sent to other replicas.
        hidden: seconds for which an exchange was under way while this rank trained.
        exposed: seconds for which this rank waited for one.
        distance: RMS distance of the replicas from their mean at the latest exchange (Euclidean, over all values).
        status: the algorithm's own numbers and words, such as its phase.

    Example::

        from lightning_hetero import HeteroMonitor
        from lightning_hetero.callbacks import ExchangeRecord

        monitor = HeteroMonitor()  # give it to the Trainer, and fit
        latest: ExchangeRecord | None = monitor.exchanges[-1] if monitor.exchanges else None
    """

    step: int
    exchanges: int
    bytes: int
    hidden: float
    exposed: float
    distance: float
    status: dict[str, float | str]


class StepSpan(NamedTuple):
    """Consecutive steps of one rank, added up.

    Attributes:
        first: the first of them, counted from 0 since the start of the fit.
        steps: how many.
        began: seconds since the ranks started together.
        samples: samples that the rank processed; padding batches have none.
        data: seconds in which it loaded data.
        compute: seconds of the rest of its own work: forward, backward, optimizer, callbacks.
        wait: seconds in which it waited for the other ranks within a step: for gradients and the like.
        exchange: seconds that exchanges between replicas took from training ("exposed" communication).
    """

    first: int
    steps: int
    began: float
    samples: float
    data: float
    compute: float
    wait: float
    exchange: float

    @property
    def seconds(self) -> float:
        """Seconds of these steps; what lies between them, such as validation, does not count."""
        return self.data + self.compute + self.wait + self.exchange

    @classmethod
    def of(cls, timing: StepTiming, first: int, start: float) -> "StepSpan":
        """One step, on a clock that shows ``start`` when the fit starts."""
        data = min(timing.data, timing.work)
        wait = max(timing.wait - timing.exchange, 0.0)
        samples = 0 if timing.padding else timing.samples
        return cls(first, 1, timing.began - start, samples, data, timing.work - data, wait, timing.exchange)


def merge_spans(stretches: Sequence[StepSpan]) -> StepSpan:
    """Consecutive stretches as one."""
    first, _, began, *_ = stretches[0]
    _, steps, _, *amounts = zip(*stretches, strict=True)
    return StepSpan(first, sum(steps), began, *map(sum, amounts))


def coarsen(stretches: Sequence[StepSpan], most: int) -> list[StepSpan]:
    """At most ``most`` stretches, of equally many of the given ones each (the last may have fewer)."""
    size = max(1, -(-len(stretches) // most))
    return [merge_spans(stretches[i : i + size]) for i in range(0, len(stretches), size)]


def thin(records: list[Any], most: int = 2048) -> None:
    """Drop every second of ``most`` records or more, but keep the first and the last."""
    if len(records) >= most:
        del records[1:-1:2]


class StepHistory:
    """One rank's steps: the first and the latest one by one, all of them in stretches that double as the fit goes on.

    Args:
        start: what `time.perf_counter()` shows at the start of the fit.
        first: number of the first step.
    """

    #: Most stretches kept of a fit, and steps kept one by one at each end of it.
    STRETCHES, ENDS = 512, 64

    def __init__(self, start: float, first: int = 0) -> None:
        self._start, self._count, self._width = start, first, 1
        self._full: list[StepSpan] = []
        self._open: StepSpan | None = None
        self.beginning: list[StepSpan] = []
        self._latest: deque[StepSpan] = deque(maxlen=self.ENDS)
        self._early: list[tuple[float, float]] = []
        self._late: deque[tuple[float, float]] = deque(maxlen=self.ENDS)

    def add(self, timing: StepTiming) -> None:
        """Record a step."""
        step = StepSpan.of(timing, self._count, self._start)
        self._count += 1
        if len(self.beginning) < self.ENDS:
            self.beginning.append(step)
        self._latest.append(step)
        self._open = step if self._open is None else merge_spans((self._open, step))
        if self._open.steps == self._width:
            self._full.append(self._open)
            self._open = None
            if len(self._full) == self.STRETCHES:
                self._full, self._width = coarsen(self._full, self.STRETCHES // 2), 2 * self._width

    def hidden(self, began: float, ended: float) -> None:
        """Record that an exchange was under way in the background; times by `time.perf_counter()`."""
        spans = self._early if len(self._early) < self.ENDS else self._late
        spans.append((began - self._start, ended - self._start))

    @property
    def stretches(self) -> list[StepSpan]:
        """All steps."""
        return self._full if self._open is None else [*self._full, self._open]

    @property
    def end(self) -> list[StepSpan]:
        """The latest steps, one by one."""
        return list(self._latest)

    @property
    def background(self) -> list[tuple[float, float]]:
        """Exchanges in the background, near the fit's two ends."""
        return [*self._early, *self._late]


class DealtByCost(NamedTuple):
    """Fit of a rank's times to costs of samples, and to numbers of samples.

    Attributes:
        off_by_cost: how far its times are from what costs explain, as a fraction.
        off_by_samples: how far they are from what numbers of samples explain.
        left: whether batches were split by samples in the end, since costs explain less.
    """

    off_by_cost: float
    off_by_samples: float
    left: bool

    @classmethod
    def of(cls, accounting: BatchAccounting) -> "DealtByCost | None":
        """The fit that a rank's accounting knows; ``None``: none."""
        off = accounting.by_cost.off()
        return cls(*off, accounting.planner.plans[-1].by_samples) if any(off) else None


class RankRecord(NamedTuple):
    """Measurements of one rank in a fit; gathered on the rank that writes the report.

    Attributes:
        rank: which, by the number that it had when it joined the job.
        stretches: all its steps.
        beginning: its first steps, one by one.
        end: its latest steps, one by one.
        background: when exchanges were under way while it trained, as (began, ended) in seconds since the start.
        exchanges: between replicas, as it has seen them.
        cost: its fitted seconds per step, or per pass, and per sample at the end; None if there were too few steps.
        losses: of other ranks, as it has seen them; times in seconds since the start.
        by_cost: how well costs of samples explain its times, where they are known.
    """

    rank: int
    stretches: list[StepSpan]
    beginning: list[StepSpan]
    end: list[StepSpan]
    background: list[tuple[float, float]]
    exchanges: list[ExchangeRecord]
    cost: Cost | Stepwise | None = None
    losses: tuple[MembershipChange, ...] = ()
    by_cost: DealtByCost | None = None

    @property
    def latest(self) -> ExchangeRecord:
        """All that its exchanges have cost."""
        return self.exchanges[-1] if self.exchanges else ExchangeRecord(0, 0, 0, 0.0, 0.0, float("nan"), {})

    @property
    def ended(self) -> float:
        """The end of its last step, in seconds since the start."""
        return max(last.began + last.seconds for last in (*self.stretches[-1:], *self.end[-1:]))


@dataclass(frozen=True)
class ReportedChange(MembershipChange):
    """A change of who takes part, as all ranks know it.

    ``seconds`` is the longest stall. ``at`` counts from when the ranks started together, and is negative if others have
    joined since then. Ranks have the numbers that they kept until others joined.

    Args:
        stalls: seconds for which each rank paused, as far as known.
        writer: the rank that writes checkpoints and logs from then on.
    """

    stalls: dict[int, float] = field(default_factory=dict)
    writer: int = 0

    @property
    def who(self) -> str:
        """The lost ranks, or those that have joined, in few words."""
        ids = self.joined or tuple(self.lost)
        named = f"rank{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"
        return f"{named} joined" if self.joined else named if ids else "nobody"

    @property
    def how(self) -> str:
        """Causes of the losses, by rank."""
        told = "; ".join(f"rank {id} {why}" for id, why in sorted(self.lost.items()))
        return self.who if self.joined else told or "connections broke, and all came again"


class MembershipHistory:
    """Changes of membership in a fit, as one rank knows them. Its clock and the ranks' numbers start over at a join.

    Args:
        view: of the ranks that start together.
        start: what ``time.perf_counter()`` shows then.
        told: by each of them, if others have joined: the changes before (:meth:`until`); None of those that join.

    Attributes:
        replicas: the ranks of each, at the start.
        places: host and device of each rank.
    """

    def __init__(self, view: Members, start: float, told: Sequence[list[ReportedChange] | None] = ()) -> None:
        self.replicas = tuple(tuple(view.ids[rank] for rank in ranks) for ranks in view.ranks)
        places = {id: (at.host, at.device) for id, at in zip(view.ids, view.places, strict=True)}
        # A rank that an earlier fit has lost keeps its place in the list.
        self.places = [places.get(id, ("", "")) for id in range(max(places) + 1)]
        self._view, self._rank, self._start = view.number, view.ids[view.rank], start
        known = [changes for changes in told if changes is not None]
        self._earlier: list[ReportedChange] = []
        for change in known[0] if known else ():
            same = [one.stalls for changes in known for one in changes if one.view == change.view]
            self._earlier.append(_stood(change, {rank: seconds for own in same for rank, seconds in own.items()}))

    @property
    def ranks(self) -> list[int]:
        """The ranks at the start."""
        return sorted(rank for ranks in self.replicas for rank in ranks)

    def since(self, losses: Sequence[MembershipChange]) -> list[MembershipChange]:
        """Those since the start; times in seconds since then."""
        return [replace(loss, at=loss.at - self._start) for loss in losses if loss.at >= self._start]

    def changes(self, losses: Sequence[MembershipChange], views: Sequence[RankRecord] = ()) -> list[ReportedChange]:
        """All changes, in order; those before the start have negative times.

        Args:
            losses: of the fit, as this rank has seen them.
            views: of all ranks, which tell how long each paused.
        """
        stalls: dict[int, dict[int, float]] = {}
        own = self.since(losses)
        for rank, seen in ((self._rank, own), *((view.rank, view.losses) for view in views)):
            for loss in seen:
                stalls.setdefault(loss.view, {})[rank] = loss.seconds
        living, found = set(self.ranks), [*self._earlier]
        for loss in own:
            if loss.view > self._view:  # else the ranks at the start are what has come of it
                living -= set(loss.lost)
            found.append(_stood(ReportedChange(**vars(loss), writer=min(living)), stalls[loss.view]))
        return found

    def until(self, now: float, losses: Sequence[MembershipChange]) -> list[ReportedChange]:
        """All changes as this rank knows them, in seconds before ``now`` by ``time.perf_counter()``."""
        return [replace(change, at=change.at + self._start - now) for change in self.changes(losses)]


def _stood(change: ReportedChange, stalls: dict[int, float]) -> ReportedChange:
    """The change, with how long each rank paused."""
    return replace(change, stalls=dict(sorted(stalls.items())), seconds=max(stalls.values()))


class FitRecord(NamedTuple):
    """Data of a report. Ranks have the numbers that they had when they joined the job.

    Attributes:
        views: of the ranks that have come to the end; after an error only this rank's.
        replicas: the ranks of each replica, when the fit began.
        places: host and device of each rank, when the fit began.
        lockstep: whether replicas exchange all at once.
        automatic: whether batches are split by measured speed.
        facts: what to say of the run, by name, such as versions and options.
        pairings: under gossip, of each replica, its completed exchanges with each.
        ended: the error that ended the fit early, if one did.
        changes: of who took part, from the fit's beginning; all else is since others have last joined.
        slow: ranks without which the job would be faster, by their latest measurements.
    """

    views: list[RankRecord]
    replicas: tuple[tuple[int, ...], ...]
    places: list[tuple[str, str]]
    lockstep: bool
    automatic: bool
    facts: dict[str, str]
    pairings: list[list[int]] | None
    ended: str | None
    changes: Sequence[ReportedChange] = ()
    slow: TooSlow | None = None

    @property
    def living(self) -> int:
        """Number of ranks at the end."""
        return self.changes[-1].ranks if self.changes else sum(map(len, self.replicas))

    @property
    def shown(self) -> list[ReportedChange]:
        """The changes since the time lines begin."""
        return [change for change in self.changes if change.at >= 0]
