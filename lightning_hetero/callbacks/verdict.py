"""Who is slowest and why, and where the job's time goes: in words, from sums of seconds."""

from collections.abc import Sequence
from statistics import median
from typing import Literal, NamedTuple

Cause = Literal["compute", "data", "network"]
#: A rank stands out if a sample takes it so many times as long as the median of the others.
NOTABLE = 1.15
#: From this fraction of the job's time on, something is worth a word.
WORTH_A_WORD = 0.1
NAMES: dict[Cause, str] = {"compute": "its compute", "data": "its data loading", "network": "its network"}
DOES: dict[Cause, str] = {"compute": "computing", "data": "loading data", "network": "in exchanges with other replicas"}


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
    """

    rank: int
    steps: int
    samples: float
    data: float
    compute: float
    wait: float
    exchange: float
    network: float

    @property
    def speed(self) -> float:
        """Samples per second while it works, which it would reach if it never waited."""
        return self.samples / max(self.data + self.compute, 1e-12)

    @property
    def pace(self) -> float:
        """Samples per second that it does reach."""
        return self.samples / max(self.data + self.compute + self.wait + self.exchange, 1e-12)


class Verdict(NamedTuple):
    """The report's words.

    Attributes:
        slowest: the rank whose samples take longest; nothing for one rank alone.
        cause: what sets it apart; nothing if it does not stand out.
        times: how many times as long as the others' median its samples take.
        headline: one sentence on the slowest rank.
        sentences: more: how close the job comes to its ranks' speeds, and what to do.
        efficiency: the job's samples per second over the sum of the ranks' own speeds.
        spent: parts of all ranks' time, which add up to 1: ``compute``, ``data``, ``waiting`` (for slower ranks) and
            ``network`` (what even the ranks that nobody waits for spend on communication).
    """

    slowest: int | None
    cause: Cause | None
    times: float
    headline: str
    sentences: tuple[str, ...]
    efficiency: float
    spent: dict[str, float]


def judge(ranks: Sequence[Totals], lockstep: bool, automatic: bool) -> Verdict:
    """Name the slowest rank and why, and say where the time goes.

    The time of a rank's sample has three parts: compute, data, and what exchanges between replicas take from training.
    The slowest rank is the one with the greatest sum; the cause is the part by which it exceeds the median of the
    others most. Waiting for it is what the others do, and no part. Where replicas exchange all at once, an exchange
    takes the same from all and tells none of them apart.

    Args:
        ranks: one per rank.
        lockstep: whether replicas exchange all at once.
        automatic: whether batches are split by measured speed.
    """
    spent = _spent(ranks)
    efficiency = sum(r.pace for r in ranks) / sum(r.speed for r in ranks)
    parts = [_per_sample(r, 0.0 if lockstep else r.exchange) for r in ranks]
    sentences = [_job(ranks, efficiency), _where(spent)]
    if len(ranks) == 1:
        seconds, cause = max((seconds, name) for name, seconds in parts[0].items())
        headline = f"One rank alone: {ranks[0].speed:,.0f} samples/s, {1e3 * seconds:.2f} ms per sample {DOES[cause]}."
        return Verdict(None, None, 1.0, headline, (_where(spent), *_advice(None, spent, automatic)), efficiency, spent)
    at = max(range(len(ranks)), key=lambda i: sum(parts[i].values()))
    others = [part for i, part in enumerate(parts) if i != at]
    usual = {name: median(part[name] for part in others) for name in parts[at]}
    times = sum(parts[at].values()) / max(median(sum(part.values()) for part in others), 1e-12)
    rank = ranks[at].rank
    if times < NOTABLE:
        headline = (
            f"No rank stands out: the slowest, rank {rank}, takes {max(times - 1, 0):.0%} longer per sample than the "
            "median of the others."
        )
        return Verdict(rank, None, times, headline, (*sentences, *_advice(None, spent, automatic)), efficiency, spent)
    cause = max(parts[at], key=lambda name: parts[at][name] - usual[name])
    headline = (
        f"Rank {rank} is the slowest, because of {NAMES[cause]}: it spends {1e3 * parts[at][cause]:.3g} ms per sample "
        f"{DOES[cause]}, the others {1e3 * usual[cause]:.3g} ms (median)."
    )
    sentences.insert(0, f"In all, its samples take {times:.1f} times as long as the others'.")
    if automatic and spent["waiting"] < WORTH_A_WORD:
        mine, everyone = (sum(r.samples / r.steps for r in group) for group in ([ranks[at]], ranks))
        sentences.insert(
            1, f"The others hardly wait for it: it was given {mine:.3g} of {everyone:.4g} samples per step."
        )
    return Verdict(rank, cause, times, headline, (*sentences, *_advice(cause, spent, automatic)), efficiency, spent)


def _per_sample(rank: Totals, network: float) -> dict[Cause, float]:
    samples = max(rank.samples, 1e-12)
    return {"compute": rank.compute / samples, "data": rank.data / samples, "network": network / samples}


def _spent(ranks: Sequence[Totals]) -> dict[str, float]:
    network, data, compute = (sum(getattr(r, name) for r in ranks) for name in ("network", "data", "compute"))
    waiting = max(sum(r.wait + r.exchange for r in ranks) - network, 0.0)
    spent = {"compute": compute, "data": data, "waiting": waiting, "network": network}
    total = max(sum(spent.values()), 1e-12)
    return {name: seconds / total for name, seconds in spent.items()}


def _job(ranks: Sequence[Totals], efficiency: float) -> str:
    reached, possible = sum(r.pace for r in ranks), sum(r.speed for r in ranks)
    return (
        f"Together the ranks process {reached:,.0f} samples/s: {efficiency:.0%} of the {possible:,.0f} that they would "
        "if none of them ever waited or communicated."
    )


def _where(spent: dict[str, float]) -> str:
    return (
        f"Of all ranks' time, {spent['compute']:.0%} is computing, {spent['data']:.0%} loading data, "
        f"{spent['waiting']:.0%} waiting for slower ranks, and {spent['network']:.0%} communication that nothing hides."
    )


def _advice(cause: Cause | None, spent: dict[str, float], automatic: bool) -> list[str]:
    advice = []
    if spent["waiting"] >= WORTH_A_WORD:
        advice.append(
            "Ranks wait for slower ones although batches are split by speed: speeds may change faster than the split, "
            "or min_batch_size, max_batch_size or few samples per rank bind it."
            if automatic
            else "Ranks wait for slower ones: balance='auto' would split batches by measured speed."
        )
    if cause == "data" or spent["data"] >= WORTH_A_WORD:
        advice.append("Loading data takes time from training: more DataLoader workers (num_workers) would hide it.")
    if cause == "network" or spent["network"] >= WORTH_A_WORD:
        advice.append(
            "Communication takes time from training: larger batches, rarer exchanges or such as happen in the "
            "background (hetero_daso, say) would take less."
        )
    return advice
