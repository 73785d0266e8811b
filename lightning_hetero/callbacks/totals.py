"""Sums of seconds over the settled part of a fit: what the verdict is made of."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightning_hetero.callbacks.record import Fit, Stretch, View, together
from lightning_hetero.comm.topology import group_of
from lightning_hetero.workload.curve import Curve
from lightning_hetero.workload.shares import Cost

#: All ranks begin the settled part within this fraction of its length of each other.
TOGETHER = 0.05
#: A fit ``a + k n`` is trusted this far beyond the batch sizes that the rank has had, as a fraction of them.
BEYOND = 0.1


class Totals(NamedTuple):
    """Sums over some steps of one rank.

    Attributes:
        rank: which.
        steps: how many.
        samples: that it processed.
        data: seconds in which it loaded data.
        compute: seconds of the rest of its own work.
        wait: seconds in which it waited for the other ranks of its replica.
        exchange: seconds that exchanges between replicas took from training.
        network: of the last two, seconds in which it waited for no slower rank: what communication itself took.
        between: seconds that belong to no step: waiting at the end of an epoch or of the fit, validation, checkpoints.
        cost: the fit: seconds of its work on a batch of ``n`` samples; None while nothing is known.
        seen: the least and the most samples per step that it has had, which the fit is made from.
    """

    rank: int
    steps: int
    samples: float
    data: float
    compute: float
    wait: float
    exchange: float
    network: float
    between: float = 0.0
    cost: Cost | Curve | None = None
    seen: tuple[float, float] = (0.0, 0.0)

    @property
    def share(self) -> float:
        """Samples per step, mean."""
        return self.samples / max(self.steps, 1)

    def scale(self, samples: float) -> float | None:
        """How many times as long as now the rank would work on a batch of so many samples, by the fitted cost.

        The fit gives the ratio only, and the measured times the level. Returns None where the fit says nothing: there
        is none, or the rank has never had a batch of about this size.
        """
        if abs(samples - self.share) <= BEYOND * self.share:
            known: Cost | Curve = self.cost or Cost(0.0, 1.0)  # so near that the ratio hardly matters
        elif self.cost and (1 - BEYOND) * self.seen[0] <= samples <= (1 + BEYOND) * self.seen[1] and self.share:
            known = self.cost
        else:
            return None
        return known.seconds(samples) / max(known.seconds(self.share), 1e-12)

    @property
    def work(self) -> float:
        """Seconds of its own work."""
        return self.data + self.compute

    @property
    def seconds(self) -> float:
        """Wall time in seconds."""
        return self.work + self.wait + self.exchange + self.between

    @property
    def speed(self) -> float:
        """Samples per second while it works, which it would reach if it never waited."""
        return self.samples / max(self.work, 1e-12)

    @property
    def pace(self) -> float:
        """Samples per second that it does reach."""
        return self.samples / max(self.seconds, 1e-12)


class Settled(NamedTuple):
    """The part of a fit on which the verdict is passed.

    Attributes:
        stretches: of each view.
        began: when the first rank began it, in seconds since the ranks started together.
        ended: when the last rank ended it.
    """

    stretches: list[list[Stretch]]
    began: float
    ended: float


def settled(fit: Fit) -> Settled:
    """The second half of the steps, when shares have settled.

    Ranks that wait for each other only at the ends of epochs may come to the half of the steps at different times; then
    what some of them still have to do would count as time without samples. So the part begins at the latest step, up to
    the half, that all ranks begin together.
    """
    ended = max(map(end_of, fit.views))
    whole = together(fit.views[0].stretches)
    known = [{s.first: s.began for s in view.stretches} for view in fit.views]
    half = min(whole.first + whole.steps / 2, fit.views[0].stretches[-1].first)
    shared = sorted(set.intersection(*map(set, known)))
    at_half = next((first for first in shared if first >= half), shared[-1])
    for first in reversed(shared):
        times = [began[first] for began in known]
        if first <= at_half and max(times) - min(times) <= TOGETHER * (ended - min(times)):
            break
    late = [[s for s in view.stretches if s.first >= first] for view in fit.views]
    return Settled(late, min(stretches[0].began for stretches in late), ended)


def end_of(view: View) -> float:
    """When a rank ended its last step."""
    return max(last.began + last.seconds for last in (*view.stretches[-1:], *view.end[-1:]))


def totals(fit: Fit) -> list[Totals]:
    """Sums over the settled part of each rank's steps.

    What communication itself takes of a step is what even the rank waits that waits least: all others also wait for a
    slower one. Stretches cover the same steps on all ranks, and up to 512 steps are stretches of their own.
    """
    part = settled(fit)
    late = {view.rank: stretches for view, stretches in zip(fit.views, part.stretches, strict=True)}
    sums = {rank: together(stretches) for rank, stretches in late.items()}
    views = {view.rank: view for view in fit.views}
    # A GPU's work may be longer than what the host's clock shows for its last steps.
    wall = max(part.ended - part.began, *(own.seconds for own in sums.values()), 0.0)

    def least(ranks: Iterable[int], name: str) -> float:
        columns = zip(*(late[rank] for rank in ranks if rank in late), strict=False)
        return sum(min(getattr(stretch, name) for stretch in column) for column in columns)

    exchanges = (
        [least(late, "exchange")] * len(sums)
        if fit.lockstep
        else own_exchanges([own.data + own.compute for own in sums.values()], [own.exchange for own in sums.values()])
    )
    found = []
    for (rank, own), exchange in zip(sums.items(), exchanges, strict=True):
        replica = fit.replicas[group_of(rank, fit.replicas)]
        network = least(replica if len(replica) > 1 else late, "wait") + exchange  # alone it waits for no gradients
        times = own.data, own.compute, own.wait, own.exchange
        view = views[rank]
        sums_of_rank = own.steps, own.samples, *times, network, wall - own.seconds
        found.append(Totals(rank, *sums_of_rank, view.cost, _seen(view)))
    return found


def even_share(ranks: Sequence[Totals]) -> float:
    """Samples per step of each rank if the batches were split evenly."""
    return sum(rank.share for rank in ranks) / max(len(ranks), 1)


def even_scales(ranks: Sequence[Totals]) -> list[float] | None:
    """How many times as long as now each rank would work on a step with an even split; None if this is not known."""
    even = even_share(ranks)
    scales = [scale for rank in ranks if (scale := rank.scale(even)) is not None]
    return scales if len(scales) == len(ranks) else None


def even_work(ranks: Sequence[Totals]) -> list[float] | None:
    """Seconds that each rank would work on a step if the batches were split evenly; None if this is not known."""
    scales = even_scales(ranks)
    return scales and [scale * rank.work / rank.steps for scale, rank in zip(scales, ranks, strict=True)]


def _seen(view: View) -> tuple[float, float]:
    """The least and the most samples per step of a rank, batches without a sample left out."""
    samples = [s.samples / s.steps for s in (*view.stretches, *view.beginning, *view.end) if s.samples]
    return (min(samples), max(samples)) if samples else (0.0, 0.0)


def own_exchanges(work: Sequence[float], exchange: Sequence[float]) -> list[float]:
    """What exchanges one by one cost each rank, without what it may have waited for a slower partner.

    While the slowest rank still works, a partner may wait for it. So much of the partner's exchanges does not count.
    But as much as the rank with the shortest exchanges spends always counts: that is the network's.

    Args:
        work: seconds of each rank's own work.
        exchange: seconds that exchanges took from each rank's training.
    """
    slowest, least = max(work), min(exchange)
    return [max(least, spent - (slowest - own)) for own, spent in zip(work, exchange, strict=True)]
