"""What a strategy does in the midst of a fit when the ranks that share it have changed."""

import csv
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_hetero.comm import failures
from lightning_hetero.comm.address import interface_towards
from lightning_hetero.comm.agreement import of_rank
from lightning_hetero.engine import optimizer_states
from lightning_hetero.engine.job import Job
from lightning_hetero.launch.environment import RegroupedEnvironment
from lightning_hetero.strategies import plans
from lightning_hetero.strategies.length import run_of
from lightning_hetero.strategies.replica_ddp import wrap_anew
from lightning_hetero.workload.past_shares import PastShares
from lightning_hetero.workload.regrouping import Knowledge, Regrouping

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_hetero.strategies.base import HeteroStrategy


def interface(strategy: "HeteroStrategy") -> str:
    """This rank's address in the network of the job."""
    assert strategy.cluster_environment is not None
    return interface_towards(strategy.cluster_environment.main_address)


def abandon(strategy: "HeteroStrategy") -> None:
    """Drop what is under way: all connections are broken. Local."""
    strategy.share.forget()
    strategy.engine.abandon()


def regroup(
    strategy: "HeteroStrategy", job: Job, moved: Regrouping, missed: bool, source: int, past: PastShares
) -> None:
    """Make all that depends on who takes part anew, and go on with it (collective).

    Args:
        strategy: in the midst of a fit.
        job: of the ranks that remain.
        moved: which ones, by their former numbers, and from which step on they share batches.
        missed: whether the others have completed an exchange between replicas that this rank has not.
        source: a rank that has acted on the latest reports.
        past: learns by which plans the ranks have shared batches until now.
    """
    before, engine = strategy.job, strategy.engine
    assert before is not None
    take_number(strategy, job)
    failures.watch(interface(strategy), strategy.options.limit.total_seconds(), job.view.ids)
    plans.settle(strategy)
    known = Knowledge.of(strategy.share.planner)
    of_rank(known, source).teach(strategy.share.planner)
    past.end(before.view.ids, strategy.share.planner, moved.start)
    rebuild(strategy, job, moved)
    kept = [before.view.index_of(member.id) for member in job.view.replicas]
    strategy.engine.go_on(engine, kept, missed, run_of(strategy))
    renew_model(strategy)
    if strategy.stop_request is not None:
        strategy.stop_request.move(job.store("stop"))
    plans.begin(strategy)
    strategy.timer.restart()


def rebuild(strategy: "HeteroStrategy", job: Job, moved: Regrouping) -> None:
    """Make what depends on who takes part, which goes on where the former parts have stopped (collective).

    Args:
        strategy: in the midst of a fit.
        job: with the new view.
        moved: which ranks are in it, by their former numbers, and from which step on they share batches.
    """
    former = strategy.build(job, moved)
    assert former is not None
    strategy.step.take_over(former.step)
    strategy.parts.loaders.take_over(former.loaders, moved)


def launched(strategy: "HeteroStrategy") -> ClusterEnvironment:
    """What the launcher said about this process."""
    environment = strategy.cluster_environment
    assert environment is not None
    while isinstance(environment, RegroupedEnvironment):
        environment = environment.inner
    return environment


def renumber(strategy: "HeteroStrategy", rank: int, world: int) -> None:
    """Let this process have another number, among other ranks than were launched with it."""
    strategy.cluster_environment = RegroupedEnvironment(launched(strategy), rank, world)
    rank_zero_only.rank = rank  # type: ignore[attr-defined]


def take_number(strategy: "HeteroStrategy", job: Job) -> None:
    """Let this process have its new number, and the duties of rank zero if that is it."""
    first = not strategy.is_global_zero and job.view.rank == 0
    renumber(strategy, job.view.rank, job.view.world)
    if first:
        _go_on_logging(strategy.trainer)
        if strategy.trainer.training:
            _show_progress(strategy.trainer)


def _go_on_logging(trainer: "pl.Trainer") -> None:
    """Let loggers of files write on where the former rank zero has stopped, not from the beginning."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            path = Path(logger.log_dir) / "metrics.csv"
            with suppress(OSError), path.open(newline="") as file, warnings.catch_warnings():
                rows: list[Any] = [{name: x for name, x in row.items() if x} for row in csv.DictReader(file)]
                warnings.simplefilter("ignore")  # that the file is there already
                logger.experiment.metrics = rows


def _show_progress(trainer: "pl.Trainer") -> None:
    """Begin to show the progress of training on this rank, as if training and the epoch had just started."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ProgressBar):
            callback.enable()
            callback.on_train_start(trainer, trainer.lightning_module)
            callback.on_train_epoch_start(trainer, trainer.lightning_module)


def copy_states(strategy: "HeteroStrategy", windows: Sequence[int]) -> None:
    """Let the ranks of each replica go on from the one that has taken most optimizer steps (collective).

    Args:
        strategy: in the midst of a fit.
        windows: optimizer steps of each rank.
    """
    assert strategy.job is not None
    for replica in strategy.job.view.replicas:
        steps = [windows[rank] for rank in replica.ranks]
        if len(set(steps)) > 1:
            _copy_state(strategy, replica.ranks, replica.ranks[steps.index(max(steps))])


def _copy_state(strategy: "HeteroStrategy", ranks: Sequence[int], source: int) -> None:
    """Give some ranks the weights and the optimizers' state of one of them (collective over all ranks)."""
    module, own = strategy.lightning_module, None
    assert module is not None
    if strategy.global_rank == source:
        own = module.state_dict(), [optimizer.state_dict()["state"] for optimizer in strategy.optimizers]
    theirs = of_rank(own, source)
    if strategy.global_rank not in ranks or strategy.global_rank == source:
        return
    values, states = theirs
    module.load_state_dict(values)
    for optimizer, state in zip(strategy.optimizers, states, strict=True):
        # The learning rate is this rank's own: its schedule has yet to follow.
        optimizer_states.restore(optimizer, {**optimizer.state_dict(), "state": state})


def renew_model(strategy: "HeteroStrategy") -> None:
    """Let DDP average gradients over the ranks that remain; BatchNorm, if it is synchronised, too."""
    module = strategy.lightning_module
    assert module is not None
    assert strategy.job is not None
    strategy.lent.lend_layers(module, strategy.job.data_group())
    wrap_anew(strategy)
