"""What to train with, by arithmetic on what was measured."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from lightning_hetero.forecast.cluster import HIDDEN
from lightning_hetero.forecast.links import Link
from lightning_hetero.forecast.rhythm import PRICE, smallest_tau
from lightning_hetero.workload.shares import Cost, makespan, split

#: Steps from one background exchange of DASO to the next: by default, and at most.
EVERY, MOST = 4, 8
#: Measurements further apart than this, as a fraction, come from a machine that does other things as well.
BUSY = 0.1


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

    within: Link | None
    between: Link | None


def advise(
    costs: Sequence[Cost],
    nodes: Sequence[Sequence[int]],
    samples: int,
    size: int,
    links: Slowest,
    spread: float = 0.0,
) -> Advice:
    """Compare a step's time with that of the exchanges that each strategy would put into it.

    Args:
        costs: of each rank.
        nodes: the ranks of each.
        samples: of each rank in a step, on average.
        size: bytes of gradients, and of parameters.
        links: the slowest ones.
        spread: how far measurements of a rank are apart from round to round, as a fraction.
    """
    reasons: list[str] = []
    step = _step(reasons, costs, samples, spread)
    if len(costs) == 1:
        return Advice('"hetero_ddp"', reasons)
    if links.between is None:
        assert links.within is not None
        steps = _exchange(reasons, "the ranks of the node", len(costs), size, links.within, step)
        choice = within_a_node(steps)
    else:
        steps = _exchange(reasons, "the nodes", len(nodes), size, links.between, step)
        choice = between_nodes(steps)
    return Advice(choice.strategy, reasons + choice.reasons)


def between_nodes(steps: float) -> Advice:
    """The rule for a job of several nodes; ``docs/choosing.md`` works through an example.

    Args:
        steps: time that an all-reduce of the gradients between the nodes takes, over the time of a step.
    """
    if steps <= HIDDEN:
        return _hides()
    reasons = [f"The exchange between nodes takes {steps:.1f} times as long as the step: take it out of the step."]
    if steps <= MOST:
        every = EVERY if steps <= EVERY else MOST
        reasons.append(f"In the background, once every {every} steps, there is time enough for it.")
        options = 'wait="auto"' if every == EVERY else f'global_every={every}, wait="auto"'
        return Advice(f"DASOStrategy({options})", reasons)
    if steps / 2 <= MOST:
        reasons.append(f"In bf16 it takes {steps / 2:.1f} steps: do it in the background, once every {MOST} steps.")
        return Advice(f'DASOStrategy(global_every={MOST}, wait="auto", wire="bf16")', reasons)
    tau = smallest_tau([steps], delay=0)
    reasons.append(
        f"Even in bf16 it takes more than {MOST} steps: once every {tau} steps it takes {PRICE:.0%} of the time."
    )
    return Advice(f'DiLoCoStrategy(tau={tau}, replica="node")', reasons)


def within_a_node(steps: float) -> Advice:
    """The rule for a job on one node.

    Args:
        steps: time that an all-reduce of the gradients between the ranks takes, over the time of a step.
    """
    if steps <= HIDDEN:
        return _hides()
    tau = max(EVERY, math.ceil(2 * steps))
    reasons = [
        f"Too long to hide in every step: exchange every {tau} steps, in the background of one of them.",
        "If exactness matters more than time, take hetero_ddp all the same.",
    ]
    return Advice(f'EASGDOverlapStrategy(tau={tau}, moving_rate="auto")', reasons)


def _hides() -> Advice:
    return Advice('"hetero_ddp"', [f"At most {HIDDEN} of a step: it hides behind the backward pass."])


def _step(reasons: list[str], costs: Sequence[Cost], samples: int, spread: float) -> float:
    """Seconds of a step, split by speed only if the gain is larger than the spread of the measurements."""
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
        reasons.append(f"One rank: a step of {samples} samples takes {_ms(even)}; nobody to wait for.")
        return even
    text = f"Step: {_ms(even)} with {samples} samples on each rank"
    if apart <= spread:
        reasons.append(
            f"{text}. Ranks differ by {apart:.0%}, and measurements of one rank by up to {spread:.0%}: it is not clear "
            "that any rank is slower than another, nor that splitting by speed would help."
        )
        return even
    sure = "" if spread <= BUSY else "perhaps "
    reasons.append(
        f"{text}, {sure}{_ms(step)} if they are split by speed ({', '.join(map(str, shares))}): "
        f"{sure}{even / step:.2f}x as fast."
    )
    idle = [rank for rank, share in enumerate(split(total, costs)) if share == 0]
    if idle:
        reasons.append(
            f"Rank(s) {', '.join(map(str, idle))}: so slow that the job would {sure}be at least as fast without. "
            "Every rank gets at least one sample, so leave them out."
        )
    return step


def _exchange(reasons: list[str], between: str, members: int, size: int, link: Link, step: float) -> float:
    """An all-reduce's time in steps, with its arithmetic."""
    seconds = link.all_reduce(size, members)
    rounds = 2 * (members - 1)
    reasons.append(
        f"Gradients between {between}: {rounds} x ({size / 1e6:.2f} MB / {members} / {link.bandwidth / 1e6:.1f} MB/s "
        f"+ {_ms(link.latency)}) = {_ms(seconds)}, that is {seconds / step:.2f} steps."
    )
    return seconds / step


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
