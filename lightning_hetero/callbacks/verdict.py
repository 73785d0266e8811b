"""Who is slowest and why, and where the job's time goes: in words, from sums of seconds."""

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

from lightning_hetero.callbacks.next_steps import WORTH_A_WORD, Cause, gain_of, next_steps
from lightning_hetero.callbacks.totals import Totals, even_scales, even_share, own_exchanges
from lightning_hetero.workload.shares import TooSlow

#: A rank stands out if it needs at least so many times as long as the median of the others.
NOTABLE = 1.15
BETWEEN = "between steps: waiting at the end of an epoch, validation, checkpoints"
NAMES: dict[Cause, str] = {"compute": "its compute", "data": "its data loading", "network": "its network"}
DOES: dict[Cause, str] = {"compute": "computing", "data": "loading data", "network": "in exchanges with other replicas"}


class Verdict(NamedTuple):
    """The report's words.

    Attributes:
        slowest: the rank that takes longest; None for one rank alone.
        cause: what sets it apart; None if it does not stand out.
        times: how many times as long as the others' median it takes.
        headline: one sentence on the slowest rank.
        sentences: what the split gains, how close the job comes to its ranks' speeds, and where the time goes.
        advice: what to do next, at least one sentence.
        gain: how many times as fast the slowest rank is done with a step as it would be with an even split; None if
            this is not known.
        efficiency: the job's samples per second over the sum of the ranks' own speeds.
        spent: parts of all ranks' time, which add up to 1: ``compute``, ``data``, ``waiting`` (for slower ranks),
            ``network`` (what even the ranks that nobody waits for spend on communication) and ``between`` steps.
    """

    slowest: int | None
    cause: Cause | None
    times: float
    headline: str
    sentences: tuple[str, ...]
    advice: tuple[str, ...]
    gain: float | None
    efficiency: float
    spent: dict[str, float]


def judge(
    ranks: Sequence[Totals], lockstep: bool, automatic: bool, missing: int = 0, slow: TooSlow | None = None
) -> Verdict:
    """Name the slowest rank and why, say where the time goes, what the split gains, and what to do next.

    A rank's time in a step has three parts: compute, data, and what exchanges between replicas take from training. The
    slowest rank is the one with the greatest sum; the cause is the part by which it exceeds the median of the others
    most. Waiting for the slowest rank is not a part. Where replicas exchange all at once, an exchange takes the same
    from all of them; where they meet one by one, the time that a rank may have waited there for a slower one does not
    count (``own_exchanges``).

    Ranks are compared with equal shares of the batch, by their fitted cost: cost per sample would take a rank
    with few samples for slow, because its fixed cost ``a`` is spread over few. If a rank has never had a share of about
    this size, the fit says nothing about it, and the ranks are compared with the shares that they have.

    Args:
        ranks: one per rank.
        lockstep: whether replicas exchange all at once.
        automatic: whether batches are split by measured speed.
        missing: ranks of which nothing is known.
        slow: ranks without which the job would be faster.
    """
    spent = _spent(ranks)
    reached, possible = sum(r.pace for r in ranks), sum(r.speed for r in ranks)
    efficiency = reached / max(possible, 1e-12)
    if missing:
        return _in_part(ranks[0], missing, efficiency, spent)
    uneven, common = _between(ranks)
    network = [0.0] * len(ranks) if lockstep else own_exchanges([r.work for r in ranks], [r.exchange for r in ranks])
    taking = [r for r in ranks if r.samples or not automatic]  # a rank without samples has no speed
    own_network = [own for r, own in zip(ranks, network, strict=True) if r in taking]
    gain = gain_of(taking, automatic)
    advise = partial(next_steps, spent, uneven, common, automatic, gain, slow)
    if len(taking) < 2:
        own = taking[0] if taking else ranks[0]
        does = DOES["data" if own.data > own.compute else "compute"]
        each = f", {1e3 * max(own.data, own.compute) / own.samples:.2f} ms per sample {does}" if own.samples else ""
        who = "One rank alone" if len(ranks) == 1 else f"Rank {own.rank} alone has samples"
        headline = f"{who}: {own.pace:,.0f} samples/s{each}."
        return Verdict(None, None, 1.0, headline, (_where(spent),), advise(None), None, efficiency, spent)
    scales = even_scales(taking)  # or else the shares as they are
    even = None if scales is None else even_share(taking)
    parts = [_parts(*each) for each in zip(taking, own_network, scales or [1.0] * len(taking), strict=True)]
    at = max(range(len(parts)), key=lambda i: sum(parts[i].values()))
    slowest, takes = taking[at], parts[at]
    others = [part for i, part in enumerate(parts) if i != at]
    usual = {name: median(part[name] for part in others) for name in takes}
    times = sum(takes.values()) / max(median(sum(part.values()) for part in others), 1e-12)
    sentences = [*gain.sentences, _job(reached, possible, efficiency), _where(spent)]
    if times < NOTABLE:
        equal = "" if even is None else " with equal shares of the batch"
        headline = (
            f"No rank stands out: the slowest, rank {slowest.rank}, takes {max(times - 1, 0):.0%} longer per step than "
            f"the median of the others{equal}."
        )
        outcome = tuple(sentences), advise(None), gain.times, efficiency, spent
        return Verdict(slowest.rank, None, times, headline, *outcome)
    cause = max(takes, key=lambda name: takes[name] - usual[name])
    headline = (
        f"Rank {slowest.rank} is the slowest, because of {NAMES[cause]}: {_takes(slowest, cause, takes[cause], even)}, "
        f"the others {1e3 * usual[cause]:.3g} ms (median)."
    )
    same = "with the shares as they are" if even is None else "with equal shares"
    first = [f"Altogether, {same}, its steps take {times:.1f} times as long as the others'."]
    if automatic and even is not None and spent["waiting"] + uneven < WORTH_A_WORD:
        everyone = sum(r.share for r in ranks)
        first.append(f"The others hardly wait for it, because it has {slowest.share:.3g} of {everyone:.4g} samples.")
    outcome = (*first, *sentences), advise(cause), gain.times, efficiency, spent
    return Verdict(slowest.rank, cause, times, headline, *outcome)


def _in_part(own: Totals, missing: int, efficiency: float, spent: dict[str, float]) -> Verdict:
    """What can be said of one of several ranks: not for whom it waited, nor what the network took of that."""
    spent = {**spent, "waiting": spent["waiting"] + spent["network"], "network": 0.0}
    headline = (
        f"Only rank {own.rank}'s view is there, not those of the {missing} other{'s' if missing > 1 else ''}, since "
        "the fit ended by an error: no verdict on who is slowest."
    )
    where = (
        f"It processed {own.pace:,.0f} samples/s. Of its time, {spent['compute']:.0%} was computing, "
        f"{spent['data']:.0%} loading data, {spent['waiting']:.0%} waiting for other ranks and communication, and "
        f"{spent['between']:.0%} {BETWEEN}."
    )
    advice = ("Read the error first. For a verdict, a fit must end without one.",)
    return Verdict(None, None, 1.0, headline, (where,), advice, None, efficiency, spent)


def _parts(rank: Totals, network: float, scale: float) -> dict[Cause, float]:
    """Seconds per step, the rank's own work scaled to another share of the batch."""
    steps = max(rank.steps, 1)
    return {"compute": scale * rank.compute / steps, "data": scale * rank.data / steps, "network": network / steps}


def _takes(rank: Totals, cause: Cause, seconds: float, even: float | None) -> str:
    """For what, and for how long per step."""
    spends = f"spends {1e3 * seconds:.3g} ms of each step"
    if cause == "network":
        return f"it {spends} {DOES[cause]}"
    if even is not None and abs(even - rank.share) > 0.02 * rank.share:
        return f"with an even share of {even:.3g} samples it {spends.replace('spends', 'would spend')} {DOES[cause]}"
    samples = f"its {rank.share:.3g} samples" if rank.samples else "a padding batch, without a sample of its own"
    return f"it {spends} {'computing' if cause == 'compute' else 'loading'} {samples}"


def _spent(ranks: Sequence[Totals]) -> dict[str, float]:
    network, data, compute, between = (
        sum(getattr(r, name) for r in ranks) for name in ("network", "data", "compute", "between")
    )
    waiting = max(sum(r.wait + r.exchange for r in ranks) - network, 0.0)
    spent = {"compute": compute, "data": data, "waiting": waiting, "network": network, "between": between}
    total = max(sum(spent.values()), 1e-12)
    return {name: seconds / total for name, seconds in spent.items()}


def _between(ranks: Sequence[Totals]) -> tuple[float, float]:
    """Of all ranks' time, what some spend between steps while others work, and what all spend there alike."""
    total = max(sum(r.seconds for r in ranks), 1e-12)
    common = len(ranks) * min(r.between for r in ranks)
    return (sum(r.between for r in ranks) - common) / total, common / total


def _job(reached: float, possible: float, efficiency: float) -> str:
    return (
        f"Together the ranks process {reached:,.0f} samples/s: {efficiency:.0%} of the {possible:,.0f} that they would "
        "if each worked all the time and never waited or communicated."
    )


def _where(spent: dict[str, float]) -> str:
    return (
        f"Of all ranks' time, {spent['compute']:.0%} is computing, {spent['data']:.0%} loading data, "
        f"{spent['waiting']:.0%} waiting for slower ranks, {spent['network']:.0%} communication that nothing hides, "
        f"and {spent['between']:.0%} {BETWEEN}."
    )
