"""What the monitor records, in memory that does not grow with the length of a fit."""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_hetero.strategies.survival import Loss
from lightning_hetero.workload.curve import Curve
from lightning_hetero.workload.shares import Cost, TooSlow
from lightning_hetero.workload.timer import Lap

if TYPE_CHECKING:
    from lightning_hetero.callbacks.lineup import Change


class Record(NamedTuple):
    """What the ranks told each other at one exchange; of times and samples, the mean per step since the one before.

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
    """What replicas' exchanges have cost this one since the start of the fit, and the algorithm's own numbers.

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
        from lightning_hetero.callbacks import Exchanged

        monitor = HeteroMonitor()  # give it to the Trainer, and fit
        latest: Exchanged | None = monitor.exchanges[-1] if monitor.exchanges else None
    """

    step: int
    exchanges: int
    bytes: int
    hidden: float
    exposed: float
    distance: float
    status: dict[str, float | str]


class Stretch(NamedTuple):
    """Consecutive steps of one rank, taken together.

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
    def of(cls, lap: Lap, first: int, start: float) -> "Stretch":
        """One step, on a clock that shows ``start`` when the fit starts."""
        data = min(lap.data, lap.work)
        wait = max(lap.wait - lap.exchange, 0.0)
        samples = 0 if lap.padding else lap.samples
        return cls(first, 1, lap.began - start, samples, data, lap.work - data, wait, lap.exchange)


def together(stretches: Sequence[Stretch]) -> Stretch:
    """Consecutive stretches as one."""
    first, _, began, *_ = stretches[0]
    _, steps, _, *amounts = zip(*stretches, strict=True)
    return Stretch(first, sum(steps), began, *map(sum, amounts))


def coarser(stretches: Sequence[Stretch], most: int) -> list[Stretch]:
    """At most ``most`` stretches, of equally many of the given ones each (the last may have fewer)."""
    size = max(1, -(-len(stretches) // most))
    return [together(stretches[i : i + size]) for i in range(0, len(stretches), size)]


class StepRecord:
    """One rank's steps: the first and the latest one by one, all of them in stretches that double as the fit goes on.

    Memory: at most ``STRETCHES + 2 ENDS`` stretches and ``2 ENDS`` spans, about 0.2 MB, however long the fit.

    Args:
        start: what the laps' clock shows at the start of the fit.
        first: number of the first step.

    Attributes:
        beginning: the fit's first steps.
    """

    #: Most stretches kept of a fit.
    STRETCHES = 512
    #: Steps kept one by one, at the beginning and at the end.
    ENDS = 64

    def __init__(self, start: float, first: int = 0) -> None:
        self._start = start
        self._stretches: list[Stretch] = []
        self._open: Stretch | None = None
        self._width = 1
        self._count = first
        self.beginning: list[Stretch] = []
        self._latest: deque[Stretch] = deque(maxlen=self.ENDS)
        self._background: tuple[list[tuple[float, float]], deque[tuple[float, float]]] = ([], deque(maxlen=self.ENDS))

    def add(self, lap: Lap) -> None:
        """Record a step."""
        step = Stretch.of(lap, self._count, self._start)
        self._count += 1
        if len(self.beginning) < self.ENDS:
            self.beginning.append(step)
        self._latest.append(step)
        self._open = step if self._open is None else together((self._open, step))
        if self._open.steps == self._width:
            self._stretches.append(self._open)
            self._open = None
            if len(self._stretches) == self.STRETCHES:
                self._stretches, self._width = coarser(self._stretches, self.STRETCHES // 2), 2 * self._width

    def hidden(self, began: float, ended: float) -> None:
        """Record that an exchange was under way in the background; times on the clock of the laps."""
        first, latest = self._background
        span = began - self._start, ended - self._start
        (first if len(first) < self.ENDS else latest).append(span)

    @property
    def stretches(self) -> list[Stretch]:
        """The whole fit."""
        return self._stretches if self._open is None else [*self._stretches, self._open]

    @property
    def end(self) -> list[Stretch]:
        """Its latest steps."""
        return list(self._latest)

    @property
    def background(self) -> list[tuple[float, float]]:
        """When exchanges were under way while the rank trained, as (began, ended), near the fit's two ends."""
        first, latest = self._background
        return [*first, *latest]


def thin(records: list[Any], most: int = 2048) -> None:
    """Once there are ``most`` records, drop every second one, but keep the first and the last."""
    if len(records) >= most:
        del records[1:-1:2]


class View(NamedTuple):
    """What one rank has seen of a fit; picklable, so that it can be gathered.

    Attributes:
        rank: which, by the number that it had when it joined the job.
        stretches: all its steps.
        beginning: its first steps, one by one.
        end: its latest steps, one by one.
        background: when exchanges were under way while it trained, as (began, ended) in seconds since the start.
        exchanges: between replicas, as it has seen them.
        cost: its fitted seconds per step and per sample at the end; None if there were too few steps for a fit.
        losses: of other ranks, as it has seen them; times in seconds since the start.
    """

    rank: int
    stretches: list[Stretch]
    beginning: list[Stretch]
    end: list[Stretch]
    background: list[tuple[float, float]]
    exchanges: list[Exchanged]
    cost: Cost | Curve | None = None
    losses: tuple[Loss, ...] = ()

    @property
    def latest(self) -> Exchanged:
        """What its exchanges have cost altogether."""
        return self.exchanges[-1] if self.exchanges else Exchanged(0, 0, 0, 0.0, 0.0, float("nan"), {})


class Fit(NamedTuple):
    """All that a report is made of. Ranks have the numbers that they had when they joined the job.

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

    views: list[View]
    replicas: tuple[tuple[int, ...], ...]
    places: list[tuple[str, str]]
    lockstep: bool
    automatic: bool
    facts: dict[str, str]
    pairings: list[list[int]] | None
    ended: str | None
    changes: "Sequence[Change]" = ()
    slow: TooSlow | None = None

    @property
    def living(self) -> int:
        """How many ranks there were at the end."""
        return self.changes[-1].ranks if self.changes else sum(map(len, self.replicas))

    @property
    def shown(self) -> "list[Change]":
        """The changes since the time lines begin."""
        return [change for change in self.changes if change.at >= 0]
