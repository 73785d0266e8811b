"""What to train with: the choice of ``hetero_auto`` on what was measured, with its arithmetic."""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_hetero.forecast.changes import RAREST
from lightning_hetero.forecast.choice import Wish, choose
from lightning_hetero.forecast.cluster import MEMORY, Cluster, Way
from lightning_hetero.forecast.predictions import Prediction, predictions
from lightning_hetero.forecast.rhythm import smallest_tau
from lightning_hetero.workload.shares import Cost, makespan, split, too_slow

#: Measurements further apart than this, as a fraction, come from a machine that does other things as well.
BUSY = 0.1
#: If ranks only communicate for more than this part of a step, rarer exchanges are worth a word.
MUCH = 0.2


class Advice(NamedTuple):
    """A suggestion.

    Attributes:
        strategy: as Python, for ``Trainer(strategy=...)``.
        reasons: the arithmetic, a line each.
    """

    strategy: str
    reasons: list[str]


class Slowest(NamedTuple):
    """The slowest links.

    Attributes:
        within: a node, if one has several ranks.
        between: nodes, if there are several.
    """

    within: Way | None
    between: Way | None


def cluster_of(
    costs: Sequence[Cost], nodes: Sequence[Sequence[int]], samples: int, size: int, links: Slowest
) -> Cluster:
    """What was measured, as ``lightning-hetero plan`` and ``hetero_auto`` see it.

    Args:
        costs: of each rank.
        nodes: the ranks of each.
        samples: of each rank in a step, on average.
        size: bytes of gradients, and of parameters.
        links: the slowest ones.
    """
    ranks = tuple(tuple(costs[rank] for rank in node) for node in nodes)
    return Cluster(ranks, samples * len(costs), size, links.within or MEMORY, links.between or MEMORY)


def advise(
    costs: Sequence[Cost],
    nodes: Sequence[Sequence[int]],
    samples: int,
    size: int,
    links: Slowest,
    spread: float = 0.0,
) -> Advice:
    """What ``hetero_auto`` would choose if ``hetero_ddp`` took as long as predicted.

    Args:
        costs: of each rank.
        nodes: the ranks of each.
        samples: of each rank in a step, on average.
        size: bytes of gradients, and of parameters.
        links: the slowest ones.
        spread: how far measurements of a rank are apart from round to round, as a fraction.
    """
    reasons = _step(costs, samples, spread)
    if len(costs) == 1:
        return Advice('"hetero_ddp"', reasons)
    cluster = cluster_of(costs, nodes, samples, size, links)
    exact = next(one for one in predictions(cluster) if one.name == "hetero_ddp")
    reasons += _exact(cluster, exact)
    chosen = choose(cluster, exact.step, Wish()).prediction
    if chosen is None:
        return Advice(exact.strategy, [*reasons, _too_little(cluster, exact)])
    reasons.append(
        f"{chosen.strategy} would take {_ms(chosen.step)}, {_times(chosen, exact)} times the samples/s: more than "
        f"1 + gain = {1 + Wish().gain:g}. If exactness matters more than time, take hetero_ddp all the same."
    )
    return Advice(chosen.strategy, [*reasons, *_limits(cluster, exact, chosen)])


def _exact(cluster: Cluster, exact: Prediction) -> list[str]:
    """The all-reduce of the gradients, and what of it a step of ``hetero_ddp`` waits for."""
    several = len(cluster.nodes) > 1
    way, seconds = cluster.between if several else cluster.within, cluster.gradients()
    return [
        f"Gradients of all ranks, in a ring over the slowest link {'between nodes' if several else 'of the node'}: "
        f"{2 * (cluster.world - 1)} x ({cluster.size / 1e6:.2f} MB / {cluster.world} / {way.bandwidth / 1e6:.1f} MB/s "
        f"+ {_ms(way.latency)}) = {_ms(seconds)}, that is {seconds / cluster.split:.2f} steps.",
        f"hetero_ddp, which is exact, hides them behind at most {cluster.hidden:.0%} of a step, and waits for the last "
        f"ones: {_ms(exact.step)} a step, in {_ms(exact.exposed)} ({exact.exposed / exact.step:.0%}) of which ranks "
        "only communicate.",
    ]


def _too_little(cluster: Cluster, exact: Prediction) -> str:
    """Why nothing is better than the exact strategy."""
    other = choose(cluster, exact.step, Wish(gain=0.0)).prediction
    if other is None:
        return "No strategy that trains replicas apart would be faster."
    return (
        f"Of those that train replicas apart, {other.strategy} would take {_ms(other.step)}, "
        f"{_times(other, exact)} times the samples/s: not more than 1 + gain = {1 + Wish().gain:g}, so stay exact."
    )


def _limits(cluster: Cluster, exact: Prediction, chosen: Prediction) -> list[str]:
    """What to know about a strategy that trains replicas apart, before one takes it."""
    lines = []
    if not chosen.repeatable or chosen.options.get("wait") == "auto":  # which is measured, and never twice alike
        steady = choose(cluster, exact.step, Wish(deterministic=True)).prediction
        instead = "hetero_ddp" if steady is None else f"{steady.strategy}, {_ms(steady.step)} a step"
        lines.append(f"It depends on timing: two runs differ. If they must not: {instead}.")
    several = len(cluster.nodes) > 1
    exchange = cluster.across() if several else cluster.gradients()
    every = smallest_tau([exchange / cluster.split], delay=0, longest=RAREST)
    rarer = choose(cluster, exact.step, Wish(every=every)).prediction
    if chosen.exposed > MUCH * chosen.step and rarer is not None and rarer.step < chosen.step:
        lines.append(
            f"Ranks still only communicate for {chosen.exposed / chosen.step:.0%} of a step. If replicas may meet as "
            f"rarely as every {every} steps: {rarer.strategy}, {_ms(rarer.step)} a step."
        )
    if not several:
        lines.append(
            "The link was measured over gloo. If gradients travel in shared memory or over NCCL, hetero_ddp may be "
            "faster than predicted: hetero_auto measures its steps in training."
        )
    return lines


def _step(costs: Sequence[Cost], samples: int, spread: float) -> list[str]:
    """The work of a step, which a split by speed shortens only if the gain is larger than the measurements' spread."""
    reasons: list[str] = []
    total, least = samples * len(costs), [1] * len(costs)  # a strategy gives every rank something to do
    shares = split(total, costs, least)
    each = [cost.seconds(samples) for cost in costs]
    even, step = max(each), makespan(shares, costs)
    apart = even / min(each) - 1
    if spread > BUSY:
        reasons.append(
            f"Measurements differ by {spread:.0%} from round to round, because the machine is busy. Run it again when "
            "it is quiet; what follows may be wrong."
        )
    if len(costs) == 1:
        return [*reasons, f"One rank: a step of {samples} samples takes {_ms(even)}; nobody to wait for."]
    text = f"Step: {_ms(even)} with {samples} samples on each rank"
    if apart <= spread:
        text += (
            f". Ranks differ by {apart:.0%}, and measurements of one rank by up to {spread:.0%}: it is not clear "
            "that any rank is slower than another, nor that splitting by speed would help."
        )
        return [*reasons, text]
    sure = "" if spread <= BUSY else "perhaps "
    reasons.append(
        f"{text}, {sure}{_ms(step)} if they are split by speed ({', '.join(map(str, shares))}): "
        f"{sure}{even / step:.2f}x as fast."
    )
    if slow := too_slow(total, costs, noise=[spread] * len(costs)):
        reasons.append(str(slow))
    return reasons


def _times(one: Prediction, exact: Prediction) -> str:
    return f"{one.speed / exact.speed:.2f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
