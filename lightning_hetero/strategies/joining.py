"""How a strategy joins its job, and makes what depends on who takes part."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_hetero._lightning import init_dist_connection
from lightning_hetero.comm.async_all_gather import AsyncAllGather
from lightning_hetero.comm.deadline import deadline
from lightning_hetero.comm.topology import Place, device_identity
from lightning_hetero.engine.finite import FiniteSteps
from lightning_hetero.engine.job import Address, Job, meet
from lightning_hetero.engine.step import Workshare
from lightning_hetero.launch.environment import RaggedEnvironment, hostname
from lightning_hetero.launch.observer import ObservedLauncher
from lightning_hetero.strategies.guards import samples_in
from lightning_hetero.strategies.loaders import Loaders
from lightning_hetero.strategies.position import describe, position
from lightning_hetero.strategies.replica_ddp import BucketSize, ReplicaDDP, ReplicaSyncBatchNorm
from lightning_hetero.workload.sampler import Position
from lightning_hetero.workload.stream import Tally
from lightning_hetero.workload.timer import StepTimer

if TYPE_CHECKING:
    from lightning_hetero.strategies.base import HeteroStrategy


def launcher(strategy: "HeteroStrategy") -> ObservedLauncher:
    """Starts the ranks of this machine where no launcher has."""
    assert strategy.cluster_environment is not None
    return ObservedLauncher(
        cluster_environment=RaggedEnvironment(strategy.cluster_environment),
        num_processes=strategy.num_processes,
        num_nodes=strategy.num_nodes,
    )


def connect(strategy: "HeteroStrategy") -> None:
    """Join the world's process group (collective)."""
    cluster, timeout = strategy.cluster_environment, strategy.options.timeout
    assert cluster is not None
    address = Address(cluster.main_address, cluster.main_port, cluster.global_rank(), cluster.world_size())
    meet(lambda: init_dist_connection(cluster, "gloo", timeout=timeout), address, timeout)


def join(strategy: "HeteroStrategy") -> Job:
    """Learn who takes part in the job (collective)."""
    host, options = hostname(), strategy.options
    place = Place(host, strategy.node_rank, strategy.local_rank, device_identity(strategy.root_device, host))
    agreed = {**asdict(options), **strategy.algorithm_options()}
    return Job.join(place, options.ranks_per_node, strategy.replicas, agreed, options.timeout)


@dataclass
class Parts:
    """What is made from a view, and is made again when it changes.

    Attributes:
        share: this rank's part of the work.
        loaders: the dataloaders.
        finite: looks for losses and gradients that are not finite.
        buckets: chooses the size of DDP's buckets.
        data_group: gives the group in which the replica averages gradients; ``None``: it is one rank.
    """

    share: Workshare
    loaders: Loaders
    finite: FiniteSteps
    buckets: BucketSize
    data_group: Callable[[], dist.ProcessGroup | None]

    def wrapped(self, model: torch.nn.Module, device: torch.device, options: dict[str, Any]) -> ReplicaDDP:
        """The model in a DDP over the ranks of this replica (collective over the replica).

        Args:
            model: on its device.
            device: that device.
            options: of DDP.
        """
        own = {**options, "process_group": self.data_group()}  # a LightningCLI passes every option, the group too
        return ReplicaDDP(self.share.timer, module=model, **self.buckets.options(own, model, device))

    def ready_for_batch_norm(self, model: torch.nn.Module, layer_sync: Any) -> Any:
        """See to BatchNorm, if the model has it: least shares, and over which ranks it normalises.

        Args:
            model: to be trained.
            layer_sync: the Trainer's plugin for ``sync_batchnorm=True``, else ``None``.

        Returns:
            The plugin to use.
        """
        if any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            self.share.planner.least = 2  # it cannot normalise one sample
        return None if layer_sync is None else ReplicaSyncBatchNorm(self.data_group())


def make_parts(strategy: "HeteroStrategy", job: Job, timer: StepTimer) -> Parts:
    """Make what depends on who takes part (collective).

    Args:
        strategy: that asks.
        job: with the view.
        timer: this rank's stopwatch.
    """
    view, options = job.view, strategy.options
    # Replicas that differ look when they meet, so that all learn of it at once.
    mode = strategy.on_nan if view.count == 1 else "ignore"
    planner = options.planner(view.world)

    def begin_pass() -> Position:
        share.begin_pass()
        return position(strategy.trainer, share.step)

    def samples_of(batch: Any) -> float:
        if callable(getattr(strategy.lightning_module, "batch_weight", None)):
            return 1.0  # the user's own weights count
        return samples_in(batch)

    def exchange(tally: Tally) -> Tally:
        row = torch.tensor(tally, dtype=torch.float64)
        with timer.waiting(), deadline("exchange batch sizes"):
            if (group := job.small_group()) is not None:
                dist.all_reduce(row, group=group)
        return Tally(*row.tolist())

    loaders = Loaders(
        view.rank,
        view.replica.ranks,
        planner,
        begin_pass,
        strategy.broadcast,
        exchange,
        samples_of,
        options.global_batch_size,
        options.sizes,
        options.balance_iterable,
    )
    ranks, small, gathering = view.replica.ranks, job.small_group, AsyncAllGather(job.report_group())
    share = Workshare(planner, timer, loaders, ranks, small, gathering, defers_reports=view.count > 1)
    finite = FiniteSteps(mode, ranks, small, timer.waiting, lambda: describe(strategy.trainer))
    return Parts(share, loaders, finite, BucketSize(), job.data_group)
