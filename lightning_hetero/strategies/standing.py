"""How far ranks have come when one of them is lost."""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_hetero.comm.agreement import of_rank
from lightning_hetero.comm.collective import Survivor


class Standing(NamedTuple):
    """How far a rank has come.

    Attributes:
        windows: optimizer steps.
        meetings: exchanges between replicas.
        calls: collectives over all ranks.
        next_step: the first step that it has not drawn yet.
        reports: how many times it has acted on the reports of all ranks.
    """

    windows: int
    meetings: int
    calls: int
    next_step: int
    reports: int


#: Of a rank that has left the fit to begin it again with others: nobody goes on from where it was.
LEFT = Standing(-1, -1, -1, -1, -1)


class Behind(NamedTuple):
    """What others have completed while this rank lost its connections.

    Attributes:
        step: the running optimizer step; the weights after it are there now.
        exchange: the exchange between replicas that follows a step.
    """

    step: bool
    exchange: bool


def catch_up(survivor: Survivor, standings: Sequence[Standing], own: Standing) -> None:
    """Give the results of collectives to those who missed them (collective).

    Args:
        survivor: has the results of this rank.
        standings: of all ranks.
        own: of this rank.
    """
    calls = [standing.calls for standing in standings]
    if len(set(calls)) == 1:
        return
    ahead = calls.index(max(calls))
    results = {number: survivor.results.get(number) for number in range(min(calls), max(calls))}
    results = of_rank(results, ahead)
    missed = {number: result for number, result in results.items() if number >= own.calls}
    survivor.received.update(missed)
