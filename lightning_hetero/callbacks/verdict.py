"""Who is slowest and why, and where the job's time goes: in words, from sums of seconds."""

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Literal, NamedTuple

from lightning_hetero.callbacks.totals import Totals, own_exchanges

Cause = Literal["compute", "data", "network"]
#: A rank stands out if a sample takes it so many times as long as the median of the others.
NOTABLE = 1.15
#: From this fraction of the job's time on, something is worth a word.
WORTH_A_WORD = 0.1
BETWEEN = "between steps: waiting at the end of an epoch, validation, checkpoints"
NAMES: dict[Cause, str] = {"compute": "its compute", "data": "its data loading", "network": "its network"}
DOES: dict[Cause, str] = {"compute": "computing", "data": "loading data", "network": "in exchanges with other replicas"}


class Verdict(NamedTuple):
    """The report's words.

    Attributes:
        slowest: the rank that takes longest; nothing for one rank alone.
        cause: what sets it apart; nothing if it does not stand out.
        times: how many times as long as the others' median it takes.
        headline: one sentence on the slowest rank.
        sentences: more: how close the job comes to its ranks' speeds, and what to do.
        efficiency: the job's samples per second over the sum of the ranks' own speeds.
        spent: parts of all ranks' time, which add up to 1: ``compute``, ``data``, ``waiting`` (for slower ranks),
            ``network`` (what even the ranks that nobody waits for spend on communication) and ``between`` steps.
    """

    slowest: int | None
    cause: Cause | None
    times: float
    headline: str
    sentences: tuple[str, ...]
    efficiency: float
    spent: dict[str, float]


def judge(ranks: Sequence[Totals], lockstep: bool, automatic: bool, missing: int = 0) -> Verdict:
    """Name the slowest rank and why, and say where the time goes.

    A rank's time has three parts: compute, data, and what exchanges between replicas take from training. The slowest
    rank is the one with the greatest sum; the cause is the part by which it exceeds the median of the others most.
    Waiting for it is what the others do, and no part. Where replicas exchange all at once, an exchange takes the same
    from all and tells none of them apart; where they meet one by one, what a rank may have waited there for a slower
    one does not count (``own_exchanges``).

    Where batches are split by speed, all ranks take equally long for a step, and the time of a sample is compared;
    otherwise that of a step, for which the others wait.

    Args:
        ranks: one per rank.
        lockstep: whether replicas exchange all at once.
        automatic: whether batches are split by measured speed.
        missing: ranks of which nothing is known.
    """
    spent = _spent(ranks)
    reached, possible = sum(r.pace for r in ranks), sum(r.speed for r in ranks)
    efficiency = reached / max(possible, 1e-12)
    if missing:
        return _in_part(ranks[0], missing, efficiency, spent)
    uneven, common = _between(ranks)
    advice = partial(_advice, spent, uneven, common, automatic)
    network = [0.0] * len(ranks) if lockstep else own_exchanges([r.work for r in ranks], [r.exchange for r in ranks])
    parts = [
        (rank, _parts(rank, own, rank.samples if automatic else rank.steps))
        for rank, own in zip(ranks, network, strict=True)
        if rank.samples or not automatic  # a rank without samples takes no time for one
    ]
    if len(parts) < 2:
        own = parts[0][0] if parts else ranks[0]
        does = DOES["data" if own.data > own.compute else "compute"]
        each = f", {1e3 * max(own.data, own.compute) / own.samples:.2f} ms per sample {does}" if own.samples else ""
        who = "One rank alone" if len(ranks) == 1 else f"Rank {own.rank} alone has samples"
        headline = f"{who}: {own.pace:,.0f} samples/s{each}."
        return Verdict(None, None, 1.0, headline, (_where(spent), *advice(None)), efficiency, spent)
    at = max(range(len(parts)), key=lambda i: sum(parts[i][1].values()))
    slowest, takes = parts[at]
    others = [part for i, (_, part) in enumerate(parts) if i != at]
    usual = {name: median(part[name] for part in others) for name in takes}
    times = sum(takes.values()) / max(median(sum(part.values()) for part in others), 1e-12)
    sentences = [_job(reached, possible, efficiency), _where(spent)]
    if times < NOTABLE:
        headline = (
            f"No rank stands out: the slowest, rank {slowest.rank}, takes {max(times - 1, 0):.0%} longer per "
            f"{'sample' if automatic else 'step'} than the median of the others."
        )
        return Verdict(slowest.rank, None, times, headline, (*sentences, *advice(None)), efficiency, spent)
    cause = max(takes, key=lambda name: takes[name] - usual[name])
    headline = (
        f"Rank {slowest.rank} is the slowest, because of {NAMES[cause]}: it spends {1e3 * takes[cause]:.3g} ms "
        f"{_on_what(slowest, cause, automatic)}, the others {1e3 * usual[cause]:.3g} ms (median)."
    )
    whose = "its samples take" if automatic else "its work on a step takes"
    sentences.insert(0, f"In all, {whose} {times:.1f} times as long as the others'.")
    if automatic and spent["waiting"] + uneven < WORTH_A_WORD:
        mine, everyone = (sum(r.samples / r.steps for r in group) for group in ([slowest], ranks))
        sentences.insert(
            1, f"The others hardly wait for it: it was given {mine:.3g} of {everyone:.4g} samples per step."
        )
    return Verdict(slowest.rank, cause, times, headline, (*sentences, *advice(cause)), efficiency, spent)


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
    return Verdict(None, None, 1.0, headline, (where,), efficiency, spent)


def _parts(rank: Totals, network: float, units: float) -> dict[Cause, float]:
    """Seconds per sample or per step."""
    units = max(units, 1e-12)
    return {"compute": rank.compute / units, "data": rank.data / units, "network": network / units}


def _on_what(rank: Totals, cause: Cause, automatic: bool) -> str:
    if automatic:
        return f"per sample {DOES[cause]}"
    samples = (
        f"its {rank.samples / rank.steps:.3g} samples" if rank.samples else "a filler, without a sample of its own"
    )
    does: dict[Cause, str] = {"compute": f"computing {samples}", "data": f"loading {samples}"}
    return f"of each step {does.get(cause, DOES[cause])}"


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


def _advice(spent: dict[str, float], uneven: float, common: float, automatic: bool, cause: Cause | None) -> list[str]:
    advice = []
    if max(spent["waiting"], uneven) >= WORTH_A_WORD:
        at_ends = f" at the ends of epochs ({uneven:.0%} of all ranks' time)" if uneven >= WORTH_A_WORD else ""
        waits = f"Ranks wait for slower ones{', also' if at_ends and spent['waiting'] >= WORTH_A_WORD else ''}{at_ends}"
        advice.append(
            f"{waits} although batches are split by speed: speeds may change faster than the split, or "
            "min_batch_size, max_batch_size or few samples per rank bind it."
            if automatic
            else f"{waits}: balance='auto' would split batches by measured speed."
        )
    if common >= WORTH_A_WORD:
        advice.append(
            f"All ranks spend {common:.0%} of their time between steps: fewer validations or checkpoints, longer "
            "epochs or DataLoader(persistent_workers=True) would leave more for training."
        )
    if cause == "data" or spent["data"] >= WORTH_A_WORD:
        advice.append("Loading data takes time from training: more DataLoader workers (num_workers) would hide it.")
    if cause == "network" or spent["network"] >= WORTH_A_WORD:
        advice.append(
            "Communication takes time from training: larger batches, rarer exchanges or such as happen in the "
            "background (hetero_daso, say) would take less."
        )
    return advice
