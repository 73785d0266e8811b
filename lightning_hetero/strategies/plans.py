"""New shares within an epoch, for strategies that let ranks take steps at their own pace."""

from itertools import count
from typing import TYPE_CHECKING

from lightning_hetero.comm import failures
from lightning_hetero.comm.agreement import gather, of_rank
from lightning_hetero.engine.plan_agreement import PlanAgreement

if TYPE_CHECKING:
    from lightning_hetero.strategies.base import HeteroStrategy

_fits = count()  # of this process


def begin(strategy: "HeteroStrategy") -> None:
    """Agree on plans in the background from now on, if that serves the strategy (collective).

    Where replicas exchange all at once, plans come from the reports that they exchange there. So they do where only
    reports tell how large a step is.

    Args:
        strategy: in a fit, with its training data set up.
    """
    end(strategy)  # of a fit that did not
    job, share = strategy.job, strategy.share
    assert job is not None
    planner = share.planner
    moves = planner.auto and not planner.held and planner.total > 0 and not planner.learns
    if not moves or strategy.engine.lockstep or job.view.count == 1:
        return
    fit = next(_fits)
    if job.view.rank == 0:
        PlanAgreement.open_boxes(job.store(f"plans/{fit}"), job.view.world)
    store = job.store(f"plans/{of_rank(fit, 0)}")

    def lost() -> str | None:
        failure = failures.first(0.0)
        return str(failure) if failure else "a rank was lost" if strategy.survival.changing else None

    def before_draw(step: int) -> None:
        agreement = strategy.share.agreement  # another one, once ranks were lost
        if agreement is not None:
            agreement.before_draw(step)

    PlanAgreement(share, store, job.view.rank, strategy.options.limit.total_seconds(), lost)
    planner.before_draw = lambda step: strategy.survival.again(lambda: before_draw(step))


def settle(strategy: "HeteroStrategy") -> None:
    """End with the same plan on all ranks that remain (collective over them)."""
    if (agreement := strategy.share.agreement) is not None:
        agreement.settle(lambda plan: gather(plan, "the plan that is agreed"))


def end(strategy: "HeteroStrategy") -> None:
    """All ranks have trained on all that they draw, or are about to have (collective)."""
    if (agreement := strategy.share.agreement) is not None:
        strategy.survival.again(lambda: gather(None, "the end of training"))  # until then some may wait for others
        strategy.survival.again(lambda: settle(strategy))
        agreement.close()


def close(strategy: "HeteroStrategy") -> None:
    """End the thread, if there is one; idempotent."""
    if strategy.job is not None and strategy.share.agreement is not None:
        strategy.share.agreement.close()
