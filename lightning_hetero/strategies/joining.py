"""How a strategy joins its job, and makes what depends on who takes part."""

import os
import time
from collections.abc import Callable
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

from lightning_hetero import _lightning
from lightning_hetero.comm import failures, garbage
from lightning_hetero.comm.async_all_gather import AsyncAllGather
from lightning_hetero.comm.leaving import noting_sockets
from lightning_hetero.comm.topology import place_of
from lightning_hetero.engine.drift import SameParameters
from lightning_hetero.engine.finite import FiniteSteps
from lightning_hetero.engine.job import Follows, Job
from lightning_hetero.engine.meeting import Address, meet
from lightning_hetero.engine.optimizer_states import hyperparameters
from lightning_hetero.engine.single import Engine
from lightning_hetero.engine.step import Workshare
from lightning_hetero.engine.streams import StreamPeers, samples_in
from lightning_hetero.launch.environment import (
    RaggedEnvironment,
    check_process_group,
    check_variables,
    hostname,
    local_devices,
)
from lightning_hetero.launch.observer import ObservedLauncher
from lightning_hetero.launch.returning import ReturningLauncher
from lightning_hetero.strategies import entering, growth, regrouping
from lightning_hetero.strategies.default_groups import LentGroups, register_hook
from lightning_hetero.strategies.loaders import Loaders
from lightning_hetero.strategies.position import describe, position
from lightning_hetero.strategies.replica_ddp import BucketSize, ReplicaDDP, ReplicaSyncBatchNorm
from lightning_hetero.strategies.training import TrainingStep
from lightning_hetero.strategies.within import average_within
from lightning_hetero.workload.regrouping import Regrouping, plan_among
from lightning_hetero.workload.sampler import Position

if TYPE_CHECKING:
    from lightning_hetero.strategies.base import HeteroStrategy


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
        around=partial(growth.until_done, strategy) if survive else None,
    )


def alone(strategy: "HeteroStrategy") -> bool:
    """Whether there is nobody to meet: no job yet, or this rank has failed, and callbacks save what they can."""
    interrupted = _lightning.interrupted(_lightning.trainer_of(strategy.lightning_module))
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
        if strategy.job is None and (found := entering.find(strategy)) is not None:
            entering.enter(strategy, found, None)
        trainer = _lightning.trainer_of(strategy.lightning_module)
        if survives and trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            garbage.leave_out()  # before others wait for this rank
    if strategy.entry is not None:
        failures.watch(regrouping.interface(strategy), strategy.options.limit.total_seconds())
        return
    cluster, timeout = strategy.cluster_environment, strategy.options.limit
    assert cluster is not None
    address = Address(cluster.main_address, cluster.main_port, cluster.global_rank(), cluster.world_size())

    def init() -> None:
        with noting_sockets(of_all=True):
            _lightning.init_dist_connection(cluster, "gloo", timeout=timeout, **_store_of_restart(timeout))

    launcher = strategy.launcher
    hint = ""
    if strategy.options.on_peer_loss == "continue" and address.rank == 0 and strategy.options.join_file is None:
        hint = (
            "If they train already without an earlier process of this rank, it cannot come back here: a rank 0 that is "
            "started again finds its job through the strategy's `join_file` only."
        )
    meet(
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
    entering.resume(strategy)
    options = strategy.options
    place = place_of(strategy.root_device, hostname(), strategy.node_rank, strategy.local_rank)
    entry = strategy.entry
    follows = None if entry is None else Follows(entry.admission.view, _launch(strategy), entry.replica)
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
    cluster = regrouping.launched(strategy)
    return f"{cluster.main_address}:{cluster.main_port}"


@dataclass
class Parts:
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

    share: Workshare
    engine: Engine
    step: TrainingStep
    loaders: Loaders
    finite: FiniteSteps
    buckets: BucketSize
    data_group: Callable[[], dist.ProcessGroup | None]
    same: SameParameters | None
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
        options = {**_lightning.ddp_options(strategy), "device_ids": strategy.determine_ddp_device_ids()}
        options["process_group"] = group = self.data_group()  # a LightningCLI passes every option, the group too
        assert group is not None
        assert strategy.job is not None
        options = self.buckets.options(options, model, strategy.root_device)
        if strategy.entry is not None:  # all have loaded the same values
            options["init_sync"] = False
        ddp = ReplicaDDP(self.share.timer, module=model, **options)
        if (hook := _lightning.comm_hook(strategy)) is not None:
            register_hook(ddp, *hook, group, strategy.lent, strategy.job.view.count > 1)
        way = average_within(strategy, ddp, self.share.replica, group, hooked=hook is not None)
        way = way or strategy.job.view.topology.route(self.share.replica)
        if way != self.told:
            self.told = way
            who = "all ranks" if strategy.job.view.count == 1 else f"ranks {list(self.share.replica)}"
            rank_zero_info(f"{type(strategy).__name__}: gradients of {who} are averaged {way}.")
        return ddp

    def ready_for_batch_norm(self, model: torch.nn.Module, layer_sync: Any, lent: LentGroups) -> Any:
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


def make_parts(
    strategy: "HeteroStrategy", job: Job, former: Parts | None, regrouped: Regrouping | None = None
) -> Parts:
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
        planner = plan_among(former.share.planner, regrouped.kept, planner)

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
    share = Workshare(planner, timer, loaders, ranks, small, gathering, defers_reports=view.count > 1)
    share.settings = lambda: hyperparameters(strategy.optimizers)
    finite = FiniteSteps(mode, ranks, small, timer.waiting, lambda: describe(strategy.trainer))
    if former is not None:
        share.take_over(former.share, regrouped)
    engine = strategy.make_engine(job, share)
    if former is not None:
        engine.take_over(former.engine)
    step = TrainingStep(share, engine, finite, strategy.collectives, several=view.count > 1)
    return Parts(share, engine, step, loaders, finite, BucketSize(), job.data_group, job.same_parameters())
