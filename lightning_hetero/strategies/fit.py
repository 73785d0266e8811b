"""How a strategy joins its job, and makes what depends on who takes part."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.distributed.rendezvous import rendezvous

from lightning_hetero import lightning_compat
from lightning_hetero.algorithms.engine import Engine
from lightning_hetero.batching.accounting import BatchAccounting, PlanAgreement, StreamPeers, samples_in
from lightning_hetero.batching.nonfinite import NonFiniteGuard
from lightning_hetero.batching.planner import PlanningState, Repartition, ShareHistory, plan_for_survivors
from lightning_hetero.batching.sampler import Position
from lightning_hetero.checkpoint.format import COMMON
from lightning_hetero.comm import failures, threads
from lightning_hetero.comm.agreement import AsyncAllGather, gather, of_rank
from lightning_hetero.comm.job import Job, RendezvousAddress, ViewSuccession, join_world
from lightning_hetero.comm.threads import record_sockets
from lightning_hetero.comm.topology import place_of
from lightning_hetero.launch.environment import (
    RaggedEnvironment,
    check_process_group,
    check_variables,
    hostname,
    local_devices,
)
from lightning_hetero.launch.observer import ObservedLauncher, ReturningLauncher
from lightning_hetero.replicas import optimizer_states
from lightning_hetero.replicas.drift import ParameterDriftCheck
from lightning_hetero.replicas.optimizer_states import hyperparameters
from lightning_hetero.strategies import join, numbering
from lightning_hetero.strategies.default_groups import GroupOverrides, register_hook
from lightning_hetero.strategies.loaders import Loaders
from lightning_hetero.strategies.numbering import (
    interface,
    take_number,
)
from lightning_hetero.strategies.position import describe, fit_info, position
from lightning_hetero.strategies.replica_ddp import (
    BucketSize,
    ReplicaDDP,
    ReplicaSyncBatchNorm,
    use_shared_memory_allreduce,
    wrap_anew,
)
from lightning_hetero.strategies.training_step import TrainingStep

if TYPE_CHECKING:
    from lightning_hetero.strategies.base import HeteroStrategy
    from lightning_hetero.strategies.replica import ReplicaStrategy

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
        PlanAgreement.open_mailboxes(job.store(f"plans/{fit}"), job.view.world)
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


def abandon(strategy: "HeteroStrategy") -> None:
    """Drop what is under way: all connections are broken. Local."""
    strategy.share.forget()
    strategy.engine.abandon()


def regroup(
    strategy: "HeteroStrategy", job: Job, moved: Repartition, missed: bool, source: int, past: ShareHistory
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
    settle(strategy)
    known = PlanningState.of(strategy.share.planner)
    of_rank(known, source).apply_to(strategy.share.planner)
    past.end(before.view.ids, strategy.share.planner, moved.start)
    rebuild(strategy, job, moved)
    kept = [before.view.index_of(member.id) for member in job.view.replicas]
    strategy.engine.continue_after_loss(engine, kept, missed, fit_info(strategy))
    renew_model(strategy)
    if strategy.stop_request is not None:
        strategy.stop_request.move(job.store("stop"))
    begin(strategy)
    strategy.timer.restart()


def rebuild(strategy: "HeteroStrategy", job: Job, moved: Repartition) -> None:
    """Make what depends on who takes part, which goes on where the former parts have stopped (collective).

    Args:
        strategy: in the midst of a fit.
        job: with the new view.
        moved: which ranks are in it, by their former numbers, and from which step on they share batches.
    """
    former = strategy.build(job, moved)
    assert former is not None
    strategy.step.continue_from(former.step)
    strategy.parts.loaders.continue_from(former.loaders, moved)


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


def launcher(strategy: "HeteroStrategy") -> ObservedLauncher | ReturningLauncher:
    """Starts the ranks of this machine where no launcher has."""
    if strategy.options.start_method != "popen":
        return ReturningLauncher(strategy, strategy.options.start_method)
    assert strategy.cluster_environment is not None
    survive = strategy.options.on_peer_loss == "continue"
    return ObservedLauncher(
        cluster_environment=RaggedEnvironment(strategy.cluster_environment),
        num_processes=strategy.num_processes,
        num_nodes=strategy.num_nodes,
        survive=survive,
        around=partial(join.until_done, strategy) if survive else None,
    )


def alone(strategy: "HeteroStrategy") -> bool:
    """Whether there is nobody to meet: no job yet, or this rank has failed, and callbacks save what they can."""
    interrupted = lightning_compat.interrupted(lightning_compat.trainer_of(strategy.lightning_module))
    return (interrupted and not stopped(strategy)) or not dist.is_initialized()


def stopped(strategy: "HeteroStrategy") -> bool:
    """Whether all ranks have been asked to stop, have saved, and end."""
    return strategy.stop_request is not None and strategy.stop_request.all_stop


def loss_counts(strategy: "HeteroStrategy") -> bool:
    """Whether this rank's samples have a part in the gradient of the running step."""
    return strategy.job is None or strategy.step.counts


def devices(strategy: "HeteroStrategy") -> list[torch.device]:
    """The devices of this machine's ranks.

    Raises:
        ConfigurationError: the launcher's variables do not fit each other.
    """
    assert strategy.cluster_environment is not None
    assert strategy.parallel_devices is not None
    check_variables(strategy.cluster_environment, strategy.num_nodes)
    return local_devices(strategy.cluster_environment, strategy.parallel_devices)


def connect(strategy: "HeteroStrategy") -> None:
    """Join the world's process group (collective), or that of a job that runs already.

    Raises:
        LaunchError: the launcher has made a process group that cannot be used.
        UnsupportedError: the fit is to go on when ranks are lost, and cannot in that group.
    """
    began = time.monotonic()
    if strategy.entry is None:
        survives = strategy.options.on_peer_loss == "continue"
        check_process_group(failures.watched(), survives)
        if strategy.job is None and (found := join.find(strategy)) is not None:
            join.enter(strategy, found, None)
        trainer = lightning_compat.trainer_of(strategy.lightning_module)
        if survives and trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            threads.freeze_gc()  # before others wait for this rank
    if strategy.entry is not None:
        failures.watch(numbering.interface(strategy), strategy.options.limit.total_seconds())
        return
    cluster, timeout = strategy.cluster_environment, strategy.options.limit
    assert cluster is not None
    address = RendezvousAddress(cluster.main_address, cluster.main_port, cluster.global_rank(), cluster.world_size())

    def init() -> None:
        with record_sockets(of_all=True):
            lightning_compat.init_dist_connection(cluster, "gloo", timeout=timeout, **_store_of_restart(timeout))

    launcher = strategy.launcher
    hint = ""
    if strategy.options.on_peer_loss == "continue" and address.rank == 0 and strategy.options.join_file is None:
        hint = (
            "If they train already without an earlier process of this rank, it cannot come back here: a rank 0 that is "
            "started again finds its job through the strategy's `join_file` only."
        )
    join_world(
        init, address, timeout, launcher.ended if isinstance(launcher, ObservedLauncher) else lambda: None, hint, began
    )


def _store_of_restart(timeout: timedelta) -> dict[str, Any]:
    """Keys of their own for ranks that torchrun has started again: its store may hold addresses of those before.

    With several agents torchrun makes another store for each start, and counts restarts apart.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return {}
    store, *_ = next(rendezvous("env://", timeout=timeout))
    return {"store": dist.PrefixStore(f"restart {restarts}", store)}


def join_job(strategy: "HeteroStrategy") -> Job:
    """Learn who takes part in the job (collective)."""
    strategy.timer.move_to(strategy.root_device)
    join.resume(strategy)
    options = strategy.options
    place = place_of(strategy.root_device, hostname(), strategy.node_rank, strategy.local_rank)
    entry = strategy.entry
    follows = None if entry is None else ViewSuccession(entry.admission.view, _launch(strategy), entry.replica)
    agreed = {"strategy": type(strategy).__name__, **options.agreed(), **strategy.algorithm_options()}
    job = Job.join(place, options.ranks_per_node, strategy.replicas, agreed, options.limit, follows)
    for card, ranks in job.view.topology.shared_cards().items():
        rank_zero_warn(
            f"Ranks {ranks} share {card}: each takes its own memory of it, they slow each other down, and NCCL does "
            "not connect them, so that gradients between them go through the host's memory. Start one rank per GPU."
        )
    return job


def _launch(strategy: "HeteroStrategy") -> str:
    """Names the launcher's job that this process was started in: each one counts its nodes from 0."""
    cluster = numbering.launched(strategy)
    return f"{cluster.main_address}:{cluster.main_port}"


@dataclass
class Fit:
    """What is made from a view, and is made again when it changes.

    Attributes:
        share: this rank's part of the work.
        engine: what happens between replicas.
        step: a training step.
        loaders: the dataloaders.
        finite: looks for losses and gradients that are not finite.
        buckets: chooses the size of DDP's buckets.
        data_group: gives the group in which the replica averages gradients; ``None``: it is one rank.
        same: compares parameters where the replica has unlike devices.
        told: how gradients travel, in the words that the user has been told.
    """

    share: BatchAccounting
    engine: Engine
    step: TrainingStep
    loaders: Loaders
    finite: NonFiniteGuard
    buckets: BucketSize
    data_group: Callable[[], dist.ProcessGroup | None]
    same: ParameterDriftCheck | None
    told: str = ""

    def wrapped(self, strategy: "HeteroStrategy") -> torch.nn.Module:
        """A strategy's model, in a DDP over the ranks of this replica (collective over the replica).

        Args:
            strategy: with the model on its device, and the user's options for DDP.
        """
        model = strategy.model
        assert model is not None
        if len(self.share.replica) == 1:
            return model  # nothing to average with: DDP would only cost time
        options = {**lightning_compat.ddp_options(strategy), "device_ids": strategy.determine_ddp_device_ids()}
        options["process_group"] = group = self.data_group()  # a LightningCLI passes every option, the group too
        assert group is not None
        assert strategy.job is not None
        options = self.buckets.options(options, model, strategy.root_device)
        if strategy.entry is not None:  # all have loaded the same values
            options["init_sync"] = False
        ddp = ReplicaDDP(self.share.timer, module=model, **options)
        if (hook := lightning_compat.comm_hook(strategy)) is not None:
            register_hook(ddp, *hook, group, strategy.lent, strategy.job.view.count > 1)
        way = use_shared_memory_allreduce(strategy, ddp, self.share.replica, group, hooked=hook is not None)
        way = way or strategy.job.view.topology.route(self.share.replica)
        if way != self.told:
            self.told = way
            who = "all ranks" if strategy.job.view.count == 1 else f"ranks {list(self.share.replica)}"
            rank_zero_info(f"{type(strategy).__name__}: gradients of {who} are averaged {way}.")
        return ddp

    def ready_for_batch_norm(self, model: torch.nn.Module, layer_sync: Any, lent: GroupOverrides) -> Any:
        """See to BatchNorm, if the model has it: least shares, and over which ranks it normalises.

        Args:
            model: to be trained.
            layer_sync: the Trainer's plugin for ``sync_batchnorm=True``, else ``None``.
            lent: lends the replica's group to layers.

        Returns:
            The plugin to use.
        """
        if any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            self.share.planner.least = 2  # it cannot normalise one sample
        group = self.data_group()
        lent.lend_layers(model, group)
        return None if layer_sync is None else ReplicaSyncBatchNorm(group, lent)


def make_parts(strategy: "HeteroStrategy", job: Job, former: Fit | None, regrouped: Repartition | None = None) -> Fit:
    """Make what depends on who takes part (collective).

    Args:
        strategy: that asks.
        job: with the view.
        former: what was made from an earlier view, which goes on in the new parts.
        regrouped: in the midst of a fit: which of the former ranks remain, and from which step on they share batches.
    """
    view, options, timer = job.view, strategy.options, strategy.timer
    # Replicas that differ look when they meet, so that all learn of it at once.
    mode = options.on_nan if view.count == 1 else "ignore"
    planner = options.planner(view.world, view.ids if view.number else None)
    if former is not None and regrouped is not None:
        planner = plan_for_survivors(former.share.planner, regrouped.kept, planner)

    def begin_pass() -> Position:
        share.begin_pass()
        here = position(strategy.trainer, share.step)
        planner.origin = here.batch - here.step
        return here

    def samples_of(batch: Any) -> float:
        if callable(getattr(strategy.lightning_module, "batch_weight", None)):
            return 1.0  # the user's own weights count
        return samples_in(batch)

    streams = count()
    loaders = Loaders(
        view.rank,
        view.replica.ranks,
        planner,
        begin_pass,
        strategy.collectives.broadcast,
        lambda length: StreamPeers(job, timer, length, next(streams)),
        samples_of,
        options.global_batch_size,
        options.sizes,
        options.balance_iterable,
    )
    ranks, small, gathering = view.replica.ranks, job.small_group, AsyncAllGather(job.report_group())
    share = BatchAccounting(planner, timer, loaders, ranks, small, gathering, defers_reports=view.count > 1)
    share.settings = lambda: hyperparameters(strategy.optimizers)
    finite = NonFiniteGuard(mode, ranks, small, timer.waiting, lambda: describe(strategy.trainer))
    if former is not None:
        share.continue_from(former.share, regrouped)
    engine = strategy.make_engine(job, share)
    if former is not None:
        engine.continue_from(former.engine)
    step = TrainingStep(share, engine, finite, strategy.collectives, several=view.count > 1)
    return Fit(share, engine, step, loaders, finite, BucketSize(), job.data_group, job.same_parameters())


def restore_precision(strategy: "ReplicaStrategy", state: dict[str, Any]) -> None:
    """Let the precision plugin go on from what a replica has saved of its own.

    Under ``"16-mixed"`` only GPUs scale losses. A replica that was on a CPU has saved nothing of that: a scaler begins
    anew.

    Args:
        strategy: that goes on.
        state: of a plugin's ``state_dict()``.
    """
    if state:
        strategy.precision_plugin.load_state_dict(state)


def common_of(checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of the nearest replica in a checkpoint that was made for others to join; ``None``: it holds none."""
    if COMMON not in checkpoint:
        return None
    return {"optimizers": checkpoint["optimizer_states"], "precision": {}, "algorithm": checkpoint[COMMON]}


def resume_from_consensus(strategy: "ReplicaStrategy", near: dict[str, Any] | None, why: str) -> None:
    """Let all replicas start from the checkpoint's weights, which the model holds.

    Args:
        strategy: that goes on.
        near: the state of the saved replica that is nearest to this one; ``None``: there is none that fits.
        why: replicas cannot go on where they have stopped.
    """
    start, trainer = f"{why} All replicas start from the checkpoint's weights,", strategy.trainer
    tell = rank_zero_warn if strategy.entry is None else rank_zero_info  # that others have joined is no surprise
    if near is None:
        tell(f"{start} with its optimizers' state.")
    else:
        tell(f"{start} each with its own optimizers' state, a new one with that of the nearest number.")
        assert strategy.averager is not None
        for optimizer, saved in zip(strategy.optimizers, near["optimizers"], strict=True):
            optimizer_states.restore(optimizer, saved)
        restore_precision(strategy, near["precision"])
        strategy.averager.load_common(near["algorithm"])
    progress = trainer.fit_loop.epoch_loop.batch_progress.total
    by_hand = not strategy.lightning_module.automatic_optimization  # type: ignore[union-attr]
    strategy.engine.resume(progress.processed if by_hand else trainer.global_step)  # type: ignore[attr-defined]
