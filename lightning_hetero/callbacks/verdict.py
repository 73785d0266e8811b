"""Verdict of the report: the slowest rank and the cause, where the time goes, the gain of the split, and advice."""

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Literal, NamedTuple

from lightning_hetero.batching.shares import Cost, Stepwise, TooSlow, passes
from lightning_hetero.callbacks.monitor_data import FitRecord, ReportedChange, StepSpan, merge_spans
from lightning_hetero.comm.topology import group_of
from lightning_hetero.strategies.recovery_policy import sentence

Cause = Literal["compute", "data", "network"]
#: All ranks begin the settled part within this fraction of its length of each other.
TOGETHER = 0.05
#: A fit ``a + k n`` is trusted this far beyond the batch sizes that the rank has had, as a fraction of them.
BEYOND = 0.1
#: A rank stands out if it needs at least so many times as long as the median of the others.
NOTABLE = 1.15
#: From this fraction of the job's time on, something is worth a word.
WORTH_A_WORD = 0.1
#: Steps that differ by less than this fraction are called equally long.
ALIKE = 0.03
_BETWEEN = "between steps: waiting at the end of an epoch, validation, checkpoints"
_NAMES = {"compute": "its compute", "data": "its data loading", "network": "its network"}
_DOES: dict[Cause, str] = {
    "compute": "computing",
    "data": "loading data",
    "network": "in exchanges with other replicas",
}


class RankTotals(NamedTuple):
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
    cost: Cost | Stepwise | None = None
    seen: tuple[float, float] = (0.0, 0.0)

    @property
    def share(self) -> float:
        """Samples per step, mean."""
        return self.samples / max(self.steps, 1)

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

    def scale(self, samples: float) -> float | None:
        """Time of its work on a batch of so many samples over that now, by the fitted cost.

        None where the fit says nothing: there is none, or the rank has never had a batch of about this size; in passes,
        a pass of about this size.
        """
        limit = self.cost.limit if isinstance(self.cost, Stepwise) else 0
        size, *seen = (n / passes(n, limit) for n in (samples, *self.seen))
        if abs(samples - self.share) <= BEYOND * self.share:
            known: Cost | Stepwise = self.cost or Cost(0.0, 1.0)  # so near that the ratio hardly matters
        elif self.cost and (1 - BEYOND) * min(seen) <= size <= (1 + BEYOND) * max(seen) and self.share:
            known = self.cost
        else:
            return None
        return known.seconds(samples) / max(known.seconds(self.share), 1e-12)


def settled(fit: FitRecord) -> list[list[StepSpan]]:
    """The second half of the steps of each view, when shares have settled.

    Ranks that wait for each other only at the ends of epochs may come to the half of the steps at different times; then
    what some of them still have to do would count as time without samples. So the part begins at the latest step, up to
    the half, that all ranks begin together.
    """
    ended = max(view.ended for view in fit.views)
    whole = merge_spans(fit.views[0].stretches)
    known = [{s.first: s.began for s in view.stretches} for view in fit.views]
    half = min(whole.first + whole.steps / 2, fit.views[0].stretches[-1].first)
    shared = sorted(set.intersection(*map(set, known)))
    at_half = next((first for first in shared if first >= half), shared[-1])
    for first in reversed(shared):
        times = [began[first] for began in known]
        if first <= at_half and max(times) - min(times) <= TOGETHER * (ended - min(times)):
            break
    return [[s for s in view.stretches if s.first >= first] for view in fit.views]


def totals(fit: FitRecord) -> list[RankTotals]:
    """Sums over the settled part of each rank's steps.

    What communication itself takes of a step is what even the rank waits that waits least: all others also wait for a
    slower one. Stretches cover the same steps on all ranks, and up to 512 steps are stretches of their own.
    """
    late = {view.rank: stretches for view, stretches in zip(fit.views, settled(fit), strict=True)}
    sums = {rank: merge_spans(stretches) for rank, stretches in late.items()}
    # A GPU's work may be longer than what the host's clock shows for its last steps.
    wall = max(view.ended for view in fit.views) - min(own.began for own in sums.values())
    wall = max(wall, *(own.seconds for own in sums.values()))

    def least(ranks: Iterable[int], name: str) -> float:
        columns = zip(*(late[rank] for rank in ranks if rank in late), strict=False)
        return sum(min(getattr(stretch, name) for stretch in column) for column in columns)

    if fit.lockstep:
        exchanges = [least(late, "exchange")] * len(sums)
    else:
        exchanges = _own_exchanges([s.data + s.compute for s in sums.values()], [s.exchange for s in sums.values()])
    found = []
    for view, exchange in zip(fit.views, exchanges, strict=True):
        own, replica = sums[view.rank], fit.replicas[group_of(view.rank, fit.replicas)]
        network = least(replica if len(replica) > 1 else late, "wait") + exchange  # alone it waits for no gradients
        sizes = [s.samples / s.steps for s in (*view.stretches, *view.beginning, *view.end) if s.samples] or [0.0]
        times = own.data, own.compute, own.wait, own.exchange, network, wall - own.seconds
        found.append(RankTotals(view.rank, own.steps, own.samples, *times, view.cost, (min(sizes), max(sizes))))
    return found


def _own_exchanges(work: Sequence[float], exchange: Sequence[float]) -> list[float]:
    """Seconds of exchanges one by one, of each rank, without what it may have waited for a slower partner.

    While the slowest rank still works, a partner may wait for it. So much of the partner's exchanges does not count.
    But as much as the rank with the shortest exchanges spends always counts: that is the network's.
    """
    slowest, least = max(work), min(exchange)
    return [max(least, spent - (slowest - own)) for own, spent in zip(work, exchange, strict=True)]


def even_scales(ranks: Sequence[RankTotals]) -> list[float] | None:
    """Time of each rank's work on a step with an even split, over that now; None if this is not known."""
    scales = [rank.scale(_even(ranks)) for rank in ranks]
    known = [scale for scale in scales if scale is not None]
    return known if len(known) == len(scales) else None


def _even(ranks: Sequence[RankTotals]) -> float:
    """Samples per step of each rank if the batches were split evenly."""
    return sum(rank.share for rank in ranks) / max(len(ranks), 1)


class Verdict(NamedTuple):
    """The report's words.

    Attributes:
        headline: one sentence on the slowest rank.
        sentences: what the split gains, how close the job comes to its ranks' speeds, and where the time goes.
        advice: what to do next, at least one sentence.
        efficiency: the job's samples per second over the sum of the ranks' own speeds.
        spent: parts of all ranks' time, which add up to 1: ``compute``, ``data``, ``waiting`` (for slower ranks),
            ``network`` (what even the ranks that nobody waits for spend on communication) and ``between`` steps.
        slowest: the rank that takes longest; None for one rank alone.
        cause: what sets it apart; None if it does not stand out.
        times: how many times as long as the others' median it takes.
        gain: how many times as fast the slowest rank is done with a step as it would be with an even split; None if
            this is not known.
    """

    headline: str
    sentences: tuple[str, ...]
    advice: tuple[str, ...]
    efficiency: float
    spent: dict[str, float]
    slowest: int | None = None
    cause: Cause | None = None
    times: float = 1.0
    gain: float | None = None


def verdict_of(fit: FitRecord) -> Verdict:
    """The verdict on the second half of the steps, when shares have settled; first it says who was lost, and joined."""
    missing = fit.living - len(fit.views)
    verdict = judge(totals(fit), fit.lockstep, fit.automatic, missing=missing, slow=fit.slow)
    return verdict._replace(sentences=(*map(_told, fit.changes), *verdict.sentences, *_of_costs(fit)))


def _of_costs(fit: FitRecord) -> tuple[str, ...]:
    """A sentence on how well costs of samples explain times, where they are known."""
    known = [view.by_cost for view in fit.views if view.by_cost is not None]
    if not known:
        return ()
    by_cost, by_samples = (max(column) for column in zip(*(one[:2] for one in known), strict=True))
    dealt = "split by samples in the end" if known[0].left else "dealt by cost"
    return (
        f"Step times are within {by_cost:.0%} of what the cost of a rank's samples explains, and within "
        f"{by_samples:.0%} of what their number explains. Batches were {dealt}.",
    )


def judge(
    ranks: Sequence[RankTotals], lockstep: bool, automatic: bool, missing: int = 0, slow: TooSlow | None = None
) -> Verdict:
    """Verdict on ranks by their sums, as ``docs/monitoring.md`` explains it.

    The slowest rank has the greatest sum of compute, data and own exchanges per step, with equal shares of the batch
    where the fitted costs cover these; the cause is the part by which it exceeds the median of the others most.

    Args:
        ranks: one per rank.
        lockstep: whether replicas exchange all at once.
        automatic: whether batches are split by measured speed.
        missing: ranks of which nothing is known.
        slow: ranks without which the job would be faster.
    """
    spent, reached, possible = _spent(ranks), sum(r.pace for r in ranks), sum(r.speed for r in ranks)
    efficiency = reached / max(possible, 1e-12)
    if missing:
        return _in_part(ranks[0], missing, efficiency, spent)
    where = (
        f"Of all ranks' time, {spent['compute']:.0%} is computing, {spent['data']:.0%} loading data, "
        f"{spent['waiting']:.0%} waiting for slower ranks, {spent['network']:.0%} communication that nothing hides, "
        f"and {spent['between']:.0%} {_BETWEEN}."
    )
    network = [0.0] * len(ranks) if lockstep else _own_exchanges([r.work for r in ranks], [r.exchange for r in ranks])
    at_work = [i for i, r in enumerate(ranks) if r.samples or not automatic]  # a rank without samples has no speed
    taking = [ranks[i] for i in at_work]
    scales = even_scales(taking)
    gain, faster, words = _gain(taking, scales, automatic)
    if len(taking) < 2:
        own = taking[0] if taking else ranks[0]
        does = _DOES["data" if own.data > own.compute else "compute"]
        each = f", {1e3 * max(own.data, own.compute) / own.samples:.2f} ms per sample {does}" if own.samples else ""
        who = "One rank alone" if len(ranks) == 1 else f"Rank {own.rank} alone has samples"
        headline = f"{who}: {own.pace:,.0f} samples/s{each}."
        advice = _advice(ranks, spent, automatic, gain, faster, slow, None)
        return Verdict(headline, (where,), advice, efficiency, spent)
    even = None if scales is None else _even(taking)  # without it, the shares are taken as they are
    parts = [_parts(ranks[i], network[i], s) for i, s in zip(at_work, scales or [1.0] * len(taking), strict=True)]
    at = max(range(len(parts)), key=lambda i: sum(parts[i].values()))
    slowest, takes, others = taking[at], parts[at], parts[:at] + parts[at + 1 :]
    usual = {name: median(part[name] for part in others) for name in takes}
    times = sum(takes.values()) / max(median(sum(part.values()) for part in others), 1e-12)
    most = max(takes, key=lambda name: takes[name] - usual[name])
    cause = most if times >= NOTABLE else None
    sentences = [
        *words,
        f"Together the ranks process {reached:,.0f} samples/s: {efficiency:.0%} of the {possible:,.0f} that they would "
        "if each worked all the time and never waited or communicated.",
        where,
    ]
    if cause is None:
        headline = (
            f"No rank stands out: the slowest, rank {slowest.rank}, takes {max(times - 1, 0):.0%} longer per step than "
            f"the median of the others{'' if even is None else ' with equal shares of the batch'}."
        )
    else:
        headline = (
            f"Rank {slowest.rank} is the slowest, because of {_NAMES[cause]}: "
            f"{_takes(slowest, cause, takes[cause], even)}, the others {1e3 * usual[cause]:.3g} ms (median)."
        )
        same = "with the shares as they are" if even is None else "with equal shares"
        sentences.insert(0, f"Altogether, {same}, its steps take {times:.1f} times as long as the others'.")
    advice = _advice(ranks, spent, automatic, gain, faster, slow, cause)
    return Verdict(headline, tuple(sentences), advice, efficiency, spent, slowest.rank, cause, times, gain)


def _told(change: ReportedChange) -> str:
    """A change of who takes part, in words."""
    rest = f"{change.ranks} rank{'' if change.ranks == 1 else 's'}"
    left = sentence(change.samples, change.bound, f"that were drawn for {change.who}")
    when = "after its start" if change.at >= 0 else "before others joined, when the time lines begin"
    return (
        f"{change.how[0].upper()}{change.how[1:]}. Training went on with {rest} after step {change.step}, "
        f"{abs(change.at):.1f} s {when}; ranks paused for at most {change.seconds:.2f} s.{left} Since then rank "
        f"{change.writer} writes checkpoints and logs."
    )


def _in_part(own: RankTotals, missing: int, efficiency: float, spent: dict[str, float]) -> Verdict:
    """The verdict on one of several ranks: not for whom it waited, nor what the network took of that."""
    spent = {**spent, "waiting": spent["waiting"] + spent["network"], "network": 0.0}
    headline = (
        f"Only rank {own.rank}'s view is there, not those of the {missing} other{'s' if missing > 1 else ''}, since "
        "the fit ended by an error: no verdict on who is slowest."
    )
    where = (
        f"It processed {own.pace:,.0f} samples/s. Of its time, {spent['compute']:.0%} was computing, "
        f"{spent['data']:.0%} loading data, {spent['waiting']:.0%} waiting for other ranks and communication, and "
        f"{spent['between']:.0%} {_BETWEEN}."
    )
    advice = ("Read the error first. For a verdict, a fit must end without one.",)
    return Verdict(headline, (where,), advice, efficiency, spent)


def _parts(rank: RankTotals, network: float, scale: float) -> dict[Cause, float]:
    """Seconds per step, the rank's own work scaled to another share of the batch."""
    steps = max(rank.steps, 1)
    return {"compute": scale * rank.compute / steps, "data": scale * rank.data / steps, "network": network / steps}


def _takes(rank: RankTotals, cause: Cause, seconds: float, even: float | None) -> str:
    """The rank's time per step for what sets it apart, in words."""
    spends = f"spends {1e3 * seconds:.3g} ms of each step"
    if cause == "network":
        return f"it {spends} {_DOES[cause]}"
    if even is not None and abs(even - rank.share) > 0.02 * rank.share:
        return f"with an even share of {even:.3g} samples it {spends.replace('spends', 'would spend')} {_DOES[cause]}"
    samples = f"its {rank.share:.3g} samples" if rank.samples else "a padding batch, without a sample of its own"
    return f"it {spends} {'computing' if cause == 'compute' else 'loading'} {samples}"


def _spent(ranks: Sequence[RankTotals]) -> dict[str, float]:
    """Parts of all ranks' time."""
    names = "network", "data", "compute", "between"
    network, data, compute, between = (sum(getattr(r, name) for r in ranks) for name in names)
    waiting = max(sum(r.wait + r.exchange for r in ranks) - network, 0.0)
    spent = {"compute": compute, "data": data, "waiting": waiting, "network": network, "between": between}
    total = max(sum(spent.values()), 1e-12)
    return {name: seconds / total for name, seconds in spent.items()}


def _gain(
    ranks: Sequence[RankTotals], scales: Sequence[float] | None, automatic: bool
) -> tuple[float | None, float, tuple[str, ...]]:
    """Gain of the split over an even one (None: unknown), of a split by speed (infinite: unknown), and the words."""
    if len(ranks) < 2:
        return None, 1.0, ()
    even, now = _even(ranks), max(rank.work / rank.steps for rank in ranks)
    if scales is None:
        unknown = (
            "How long an even split would take is not known, because some rank has never had a share of about "
            f"{even:.3g} samples."
        )
        return None, 1.0 if automatic else math.inf, (unknown,)
    slowest = max(scale * rank.work / rank.steps for scale, rank in zip(scales, ranks, strict=True))
    times = slowest / max(now, 1e-12)
    # All would be done together at their speeds, as long as these do not depend on the samples per step.
    by_speed = now * sum(rank.speed for rank in ranks) / max(sum(rank.share for rank in ranks), 1e-12)
    possible = 1.0 if automatic else max(by_speed, 1 / max(times, 1e-12))  # an even split is one by speed, too
    if max(rank.share for rank in ranks) <= (1 + ALIKE) * even:
        if automatic:
            could = ""
        elif possible < 1 + ALIKE:
            could = " A split by speed would gain nothing, because on average all ranks are equally fast."
        else:
            could = (
                f" By the ranks' speeds now, a split by speed would make steps about {possible:.1f} times as fast. "
                "What a batch costs whatever its size makes this more or less."
            )
        return times, possible, (f"The batches are split evenly.{could}",)
    if abs(times - 1) < ALIKE:
        said = "gains nothing over an even one"
    else:
        said = "is slower than an even one" if times < 1 else f"makes steps {times:.2f} times as fast as an even one"
    split = f"the slowest rank works {1e3 * now:.3g} ms per step, with an even split {1e3 * slowest:.3g} ms"
    return times, possible, (f"This split {said}: {split}.",)


def _advice(
    ranks: Sequence[RankTotals],
    spent: dict[str, float],
    automatic: bool,
    gain: float | None,
    faster: float,
    slow: TooSlow | None,
    cause: Cause | None,
) -> tuple[str, ...]:
    """Advice, the most promising first; at least one sentence."""
    # Of all ranks' time, what some spend between steps while others work, and what all spend there alike.
    total = max(sum(r.seconds for r in ranks), 1e-12)
    common = len(ranks) * min(r.between for r in ranks) / total
    uneven = sum(r.between for r in ranks) / total - common
    advice = []
    if gain is not None and gain < 1 - ALIKE:
        advice.append("Set balance='off': an even split is faster here.")
    if slow is not None:
        advice.append(str(slow))
    elif max(spent["waiting"], uneven) >= WORTH_A_WORD:
        at_ends = f" at the ends of epochs ({uneven:.0%} of all ranks' time)" if uneven >= WORTH_A_WORD else ""
        also = ", also" if at_ends and spent["waiting"] >= WORTH_A_WORD else ""
        if automatic:
            do = (
                " although batches are split by speed: see whether min_batch_size, max_batch_size or very few samples "
                "per rank limit the split, or whether speeds change faster than it can follow."
            )
        elif faster < 1 + ALIKE:
            do = ", but on average all are equally fast: look for what stalls them from time to time."
        else:
            do = ": set balance='auto', which splits batches by measured speed."
        advice.append(f"Ranks wait for slower ones{also}{at_ends}{do}")
    if common >= WORTH_A_WORD:
        advice.append(
            f"All ranks spend {common:.0%} of their time between steps: validate or save less often, make epochs "
            "longer, or set DataLoader(persistent_workers=True)."
        )
    if cause == "data" or spent["data"] >= WORTH_A_WORD:
        advice.append("Loading data takes time from training: give the DataLoader more workers (num_workers).")
    if cause == "network" or spent["network"] >= WORTH_A_WORD:
        advice.append(
            "Communication takes time from training: use larger batches, exchange less often, or take a strategy that "
            "exchanges in the background, such as hetero_daso."
        )
    nothing = (
        f"Nothing to change: ranks work {spent['compute'] + spent['data']:.0%} of the time, and no cause of delay "
        f"takes {WORTH_A_WORD:.0%} of it."
    )
    return tuple(advice) or (nothing,)
