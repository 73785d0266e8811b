"""What to train with, by arithmetic on what was measured."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from lightning_hetero.doctor.links import Link
from lightning_hetero.workload.shares import Cost, makespan, split

#: DDP hides an exchange behind the backward pass, about two thirds of a step; up to this part of it surely.
HIDDEN = 0.5
#: Steps from one background exchange of DASO to the next: by default, and at most.
EVERY, MOST = 4, 8
#: Measurements further apart than this, as a fraction, come from a machine that does other things as well.
BUSY = 0.1
#: What exchanges between rare outer steps may take of the time.
PRICE = 0.05


class Advice(NamedTuple):
    """A suggestion.

    Attributes:
        strategy: as Python, for ``Trainer(strategy=...)``.
        reasons: the arithmetic, a line each.
    """

    strategy: str
    reasons: list[str]


def advise(
    costs: Sequence[Cost],
    nodes: Sequence[Sequence[int]],
    samples: int,
    size: int,
    within: Link | None,
    between: Link | None,
    spread: float = 0.0,
) -> Advice:
    """Compare a step's time with that of the exchanges that each strategy would put into it.

    Args:
        costs: of each rank.
        nodes: the ranks of each.
        samples: of each rank in a step, on average.
        size: bytes of gradients, and of parameters.
        within: the slowest link within a node, if one has several ranks.
        between: the slowest link between nodes, if there are several.
        spread: how far measurements of a rank are apart from round to round, as a fraction.
    """
    reasons: list[str] = []
    step = _step(reasons, costs, samples, spread)
    if len(costs) == 1:
        return Advice('"hetero_ddp"', reasons)
    if between is None:
        assert within is not None
        steps = _exchange(reasons, "the ranks of the node", len(costs), size, within, step)
        if steps <= HIDDEN:
            reasons.append(f"At most {HIDDEN} of a step: it hides behind the backward pass.")
            return Advice('"hetero_ddp"', reasons)
        tau = max(EVERY, math.ceil(2 * steps))
        reasons.append(f"Too long to hide in every step: exchange every {tau} steps, in the background of one of them.")
        reasons.append("hetero_ddp, which is exact, remains the choice if that matters more than time.")
        return Advice(f'EASGDOverlapStrategy(tau={tau}, moving_rate="auto")', reasons)
    steps = _exchange(reasons, "the nodes", len(nodes), size, between, step)
    if steps <= HIDDEN:
        reasons.append(f"At most {HIDDEN} of a step: it hides behind the backward pass.")
        return Advice('"hetero_ddp"', reasons)
    reasons.append(f"The link between nodes alone would take {steps:.1f} times the step: take it out of the step.")
    if steps <= MOST:
        every = EVERY if steps <= EVERY else MOST
        reasons.append(f"An exchange in the background every {every} steps leaves it time enough.")
        options = 'wait="auto"' if every == EVERY else f'global_every={every}, wait="auto"'
        return Advice(f"DASOStrategy({options})", reasons)
    if steps / 2 <= MOST:
        reasons.append(f"In bf16 it takes {steps / 2:.1f} steps: in the background every {MOST} steps.")
        return Advice(f'DASOStrategy(global_every={MOST}, wait="auto", wire="bf16")', reasons)
    tau = math.ceil(steps / PRICE)
    reasons.append(f"Too long for {MOST} steps, in bf16 too: one every {tau} steps takes {PRICE:.0%} of the time.")
    return Advice(f'DiLoCoStrategy(tau={tau}, replica="node")', reasons)


def _step(reasons: list[str], costs: Sequence[Cost], samples: int, spread: float) -> float:
    """Seconds of a step, with what they are by; no gain that is no more than the measurements' own spread."""
    total, least = samples * len(costs), [1] * len(costs)  # a strategy gives every rank something to do
    shares = split(total, costs, least)
    each = [cost.seconds(samples) for cost in costs]
    even, step = max(each), makespan(shares, costs)
    apart = even / min(each) - 1
    if spread > BUSY:
        reasons.append(
            f"Measurements differ by {spread:.0%} from round to round; the machine is busy: run it again when it is "
            "quiet. What follows is not sure."
        )
    if len(costs) == 1:
        reasons.append(f"One rank: a step of {samples} samples takes {_ms(even)}; nobody to wait for.")
        return even
    text = f"Step: {_ms(even)} with {samples} samples on each rank"
    if apart <= spread:
        reasons.append(
            f"{text}. Ranks differ by {apart:.0%}, measurements of one rank by up to {spread:.0%}: no rank is surely "
            "slower than another, and a gain from splitting by speed cannot be told."
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
            f"Rank(s) {', '.join(map(str, idle))}: so slow that the others would be {sure or 'at least '}as fast "
            "without; every rank gets one sample at least, or leave them out."
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
