"""How far ranks have come when one of them is lost."""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_hetero.comm.agreement import of_rank
from lightning_hetero.comm.collective import Survivor
from lightning_hetero.errors import MembershipLostError


class Standing(NamedTuple):
    """How far a rank has come.

    Attributes:
        windows: optimizer steps.
        meetings: exchanges between replicas.
        calls: collectives over all ranks.
        next_step: the first step that it has not drawn yet.
        reports: how many times it has acted on the reports of all ranks.
        step: batches that it has done.
        met: so many had all ranks done when they last met, as far as it knows; 0 where they do not keep step.
    """

    windows: int
    meetings: int
    calls: int
    next_step: int
    reports: int
    step: int
    met: int


#: Of a rank that has left the fit to begin it again with others: nobody goes on from where it was.
LEFT = Standing(*[-1] * len(Standing._fields))


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


def in_vain(me: int, limit: float, view: int, error: Exception) -> MembershipLostError:
    """The error of a rank that could not meet those with which it has agreed to go on.

    Args:
        me: its id.
        limit: seconds for which it has tried.
        view: most recently.
        error: what came of that.
    """
    return MembershipLostError(
        f"Rank {me} cannot go on: for {limit:g} s (the strategy's `timeout`) the ranks that remain have tried in vain "
        f"to meet, most recently in view {view}: {error}"
    )
