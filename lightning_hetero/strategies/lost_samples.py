"""How many samples nobody trains on because ranks were lost: counted from the last step that is known of each."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_hetero.comm.agreement import gather
from lightning_hetero.strategies.standing import Standing
from lightning_hetero.workload.past_shares import PastShares

#: What a number of samples is; to be put before it.
EXACT, AT_MOST, AT_LEAST = "", "up to ", "at least "


def sentence(samples: int, bound: str, which: str) -> str:
    """The number in words, with a blank before them; empty if there is nothing to say.

    Args:
        samples: how many.
        bound: what that number is.
        which: completes "samples ...".
    """
    if samples:
        return f" {bound.capitalize()}{samples} samples {which} are not trained on."
    return f" How many samples {which} are not trained on is not known." if bound == AT_LEAST else ""


class Count(NamedTuple):
    """Samples that nobody trains on.

    Attributes:
        samples: how many.
        bound: what that number is: ``""``, ``"up to "`` or ``"at least "``.
    """

    samples: int
    bound: str


def count(
    lost: Mapping[int, str], known: Mapping[int, int], standings: Sequence[Standing], past: PastShares, alike: bool
) -> Count:
    """Count the samples that were drawn for lost ranks, and that they have not trained on (collective).

    A rank tells with its heartbeats how many steps it has done, so it may have done more. Where all ranks exchange
    after the same steps it has done those, too, after which all have met.

    Args:
        lost: by their ids.
        known: steps that some of them have done, as far as is known.
        standings: of the ranks that remain.
        past: what each rank was to take.
        alike: whether all ranks take every step together, so that nobody can have done more or fewer than these.

    Returns:
        The same on all ranks, which need not remember plans equally far back.
    """
    least = min(standing.step for standing in standings)
    met = max(standing.met for standing in standings)
    first = {id: max(known.get(id, 0), met) for id in lost if id in known or met > 0}
    if alike:
        first, bound = {}, EXACT
    else:
        bound = AT_MOST if first.keys() == lost.keys() else AT_LEAST
    samples = sum(past.samples(id, first.get(id, least)) for id in lost)
    return Count(max(gather(samples, "samples that are lost")), bound)
